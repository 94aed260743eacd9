"""Stands in for TensorRT in a builder's process: what it builds is text, and ``FAKE_TENSORRT`` says how it fails.

It has the names that the adapter uses and no compute capabilities, like the library for data-centre GPUs.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

__version__ = "1.0"


class ILogger:
    ERROR, INTERNAL_ERROR, VERBOSE = "error", "internal error", "verbose"


class IProgressMonitor:
    pass


class IKVCacheUpdateLayer:
    pass


class NetworkDefinitionCreationFlag:
    pass


class ProfilingVerbosity:
    DETAILED = "detailed"


class _Network:
    num_layers = 0


class OnnxParser:
    num_errors = 0

    def __init__(self, network: Any, logger: Any) -> None:
        pass

    def parse_from_file(self, path: str) -> bool:
        return Path(path).is_file()


class _Profile:
    def set_shape(self, *shape: Any) -> None:
        pass


class _Config:
    progress_monitor: Any = None

    def add_optimization_profile(self, profile: Any) -> int:
        return 0


class Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int) -> _Network:
        return _Network()

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: Any, config: _Config) -> bytes | None:
        calls = Path(os.environ["FAKE_TENSORRT_CALLS"])
        with calls.open("a") as file:
            file.write(f"{os.getpid()}\n")
        config.progress_monitor.phase_start("tactics", None, 2)
        going = config.progress_monitor.step_complete("tactics", 1)
        how = os.environ.get("FAKE_TENSORRT", "")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crashed":
            os.abort()
        if how == "full":
            raise OSError(28, "No space left on device")
        if how == "refused":
            self._logger.log(ILogger.ERROR, "no kernel\n  for this")
            return None
        if how == "endless":
            time.sleep(60)
        self._logger.log(ILogger.VERBOSE, "Total Weights Memory: 12 bytes")
        return b"an engine" if going else None
