"""A machine with an imagined GPU: `fake_tensorrt_device` builds, loads and runs engines on `fake_cuda`."""

from pathlib import Path

import fake_tensorrt_device
import pytest
from fake_cuda import FakeCuda

from wavekit_engines.bundle import Bundle, open_bundle
from wavekit_engines.tensorrt import engines, library, runtime
from wavekit_engines.tensorrt.engines import BuildOptions, EnginePrecision, build_engines
from wavekit_engines.tensorrt.library import Job
from wavekit_engines.tensorrt.profiles import Limits

LIBRARY = "fake_tensorrt_device"
LIMITS = Limits(context=192, tree=64)


def build_here(bundle: Path, precision: EnginePrecision = "fp32", limits: Limits = LIMITS) -> Bundle:
    """Engines of every graph of a bundle, in this process."""

    def run_builder(module: str, job: Job, log: Path, part: str, told: object) -> None:
        library.build(module, job, log, lambda phase, done, total: True)

    opened = open_bundle(bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "installed", lambda: (LIBRARY, "1.0"))
        patch.setattr(engines, "run_builder", run_builder)
        build_engines(opened, BuildOptions(limits, precision))
    return opened


def plug_in(patch: pytest.MonkeyPatch, cuda: FakeCuda | None = None) -> FakeCuda:
    """From now on there is a GPU, and the library that built with `build_here`."""
    cuda = cuda or FakeCuda()
    patch.setattr(fake_tensorrt_device, "cuda", cuda)
    patch.setattr(runtime, "installed", lambda: (LIBRARY, "1.0"))
    patch.setattr(runtime, "open_cuda", lambda device: cuda)
    return cuda
