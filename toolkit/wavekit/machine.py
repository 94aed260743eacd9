"""The machine that runs a bundle, as far as it decides how fast that goes."""

import hashlib
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CPUS = Path("/proc/cpuinfo")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


@dataclass(frozen=True)
class Machine:
    """What measurements belong to."""

    cpu: str
    cores: int
    """That this process may use."""
    onnxruntime: str

    @property
    def key(self) -> str:
        """Names the machine in file names: 16 hexadecimal digits."""
        return hashlib.sha256("\n".join((self.cpu, str(self.cores), self.onnxruntime)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} {'core' if self.cores == 1 else 'cores'}, onnxruntime {self.onnxruntime}"


def this_machine() -> Machine:
    """The one this process runs on."""
    return Machine(_cpu(), available_cores(), _runtime())


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    lines = _CPUS.read_text().splitlines() if _CPUS.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _runtime() -> str:
    for package in _RUNTIMES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"
