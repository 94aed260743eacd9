"""All that running names of TensorRT; `library` has what building names.

Which of the libraries it is shows in the names that it has, as there. Addresses and streams are integers; what the
library answers with False or nothing is a `WavekitError` here, with what it logged.
"""

import importlib
import logging
from pathlib import Path
from typing import Any

from wavekit_engines.errors import WavekitError

_logger = logging.getLogger(__name__)


class Runtime:
    """Loads engines with one library. Raises WavekitError where the library finds no GPU."""

    def __init__(self, module: str) -> None:
        trt = self._trt = importlib.import_module(module)
        self._log = _log(trt)
        try:
            self._runtime = trt.Runtime(self._log)
        except RuntimeError as error:
            raise WavekitError(f"{module} cannot run here: {_one_line(str(error))}") from None

    def load(self, file: Path, part: str) -> "LoadedEngine":
        """Load an engine, reading its file piece by piece.

        Raises:
            WavekitError: the library does not take it.
            OSError: the file cannot be read.
        """
        trt, log = self._trt, self._log
        log.last_error = ""
        with file.open("rb") as opened:
            engine = self._runtime.deserialize_cuda_engine(_reader(trt, opened))
        if engine is None:
            raise WavekitError(f"{trt.__name__} cannot load {part}: {log.last_error or 'it does not say why'}")
        return LoadedEngine(trt, engine, log, part)


class LoadedEngine:
    """An engine whose weights are on the GPU, once for all of its contexts."""

    def __init__(self, trt: Any, engine: Any, log: Any, part: str) -> None:
        self._trt, self._engine, self._log, self._part = trt, engine, log, part

    def context(self, profile: int, stream: int, fixed: bool = False, captures: bool = False) -> "Context":
        """A context for one profile, with memory for its activations.

        Args:
            profile: which of the engine's.
            stream: what the context is set up on, and will run on.
            fixed: its passes all have one shape, so that kernels for that shape are worth compiling.
            captures: let the library record CUDA graphs by itself, where it can.
        """
        trt, engine = self._trt, self._engine
        settings = engine.create_runtime_config()
        strategy = trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        settings.set_execution_context_allocation_strategy(strategy)
        if captures and hasattr(settings, "cuda_graph_strategy"):
            settings.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if fixed and hasattr(settings, "dynamic_shapes_kernel_specialization_strategy"):
            eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            settings.dynamic_shapes_kernel_specialization_strategy = eager
        context = engine.create_execution_context(settings)
        if context is None:
            raise self._failure("there is no memory for its activations")
        if not context.set_optimization_profile_async(profile, stream):
            raise self._failure(f"it refuses profile {profile}")
        return Context(context, self._failure)

    def _failure(self, what: str) -> WavekitError:
        said, self._log.last_error = self._log.last_error, ""
        return WavekitError(f"{self._part} failed in {self._trt.__name__}: {said or what}")


class Context:
    """One profile of an engine, with addresses and shapes. Not for two threads at once."""

    def __init__(self, context: Any, failure: Any) -> None:
        self._context, self._failure = context, failure

    def set_address(self, name: str, address: int) -> None:
        """Read or write a tensor there from now on."""
        if not self._context.set_tensor_address(name, address):
            raise self._failure(f"it has no tensor {name}")

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """The shape of an input from now on."""
        if not self._context.set_input_shape(name, shape):
            raise self._failure(f"it refuses {name} of the shape {list(shape)}")

    def enqueue(self, stream: int) -> None:
        """Enqueue one pass."""
        if not self._context.execute_async_v3(stream):
            raise self._failure("the pass was not enqueued")

    def capturable(self, stream: int) -> bool:
        """Whether a pass may be recorded as a CUDA graph, as far as the library says."""
        context = self._context
        return bool(context.is_stream_capturable(stream)) if hasattr(context, "is_stream_capturable") else True


def _log(trt: Any) -> Any:
    severity = trt.ILogger

    class Log(trt.ILogger):  # type: ignore[misc]
        last_error = ""

        def __init__(self) -> None:
            super().__init__()

        def log(self, level: Any, message: str) -> None:
            if level in (severity.ERROR, severity.INTERNAL_ERROR):
                self.last_error = _one_line(message)
            _logger.debug("%s: %s", trt.__name__, message)

    return Log()


def _reader(trt: Any, file: Any) -> Any:
    class Reader(trt.IStreamReaderV2):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def read(self, size: int, stream: int) -> bytes:
            return bytes(file.read(size))

        def seek(self, offset: int, where: Any) -> bool:
            origin = trt.SeekPosition
            file.seek(offset, [origin.SET, origin.CUR, origin.END].index(where))
            return True

    return Reader()


def _one_line(text: str) -> str:
    return " ".join(text.split())
