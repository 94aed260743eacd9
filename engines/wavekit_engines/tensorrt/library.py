"""All that building names of TensorRT: `tensorrt` 10.16 and later, `tensorrt` 11, and `tensorrt_rtx`.

`runtime_library` has what running names, and nothing else names anything. The libraries' differences are found by
asking for a name, never by a version or the number of an enumeration. What a build needs goes in as plain data; an
engine's bytes, or one clear line, come out.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.tensorrt.profiles import Shapes

PORTABLE = "tensorrt_rtx"
MODULES = (PORTABLE, "tensorrt")
"""By preference: the first builds for any card of its list, the second for the GPU of the machine it runs on."""

Told = Callable[[str, int, int], bool]
"""Called with a phase, its steps done and in all; False stops the build."""


@dataclass(frozen=True)
class Job:
    """One engine to build. No compute capabilities: for any GPU of the library, or for the one that is there."""

    graph: str
    engine: str
    profiles: list[Shapes]
    compute_capabilities: list[str] = field(default_factory=list)
    decomposable_attention: bool = False
    """Attention in float32 has no fused kernel."""


def installed() -> tuple[str, str]:
    """Module and version of the library that builds here, without importing it.

    Raises:
        MisuseError: none is installed.
    """
    for module in MODULES:
        if importlib.util.find_spec(module) is not None:
            return module, importlib.metadata.version(module.replace("_", "-"))
    raise MisuseError(
        "TensorRT engines need tensorrt_rtx or tensorrt, not installed here; in a clone of wavekit: "
        "pip install -c constraints.txt -e '.[tensorrt]'"
    )


def build(module: str, job: Job, log: Path, told: Told) -> None:
    """Build an engine into ``job.engine`` and write the library's log, every layer of the engine in it, to ``log``.

    Raises:
        MisuseError: the library lacks what the job asks for.
        WavekitError: it refuses the graph or the profiles, or the build was stopped.
    """
    trt = importlib.import_module(module)
    if not hasattr(trt, "IKVCacheUpdateLayer"):
        raise MisuseError(f"{module} {trt.__version__} cannot update a cache in place: install 10.16 or later")
    with log.open("w", encoding="utf-8") as file:
        logger = _logger(trt, file)
        builder = trt.Builder(logger)
        network = builder.create_network(_network_flags(trt))
        _parse(trt, network, job, logger)
        if job.decomposable_attention:
            _make_decomposable(trt, network)
        config = _configured(trt, builder, job, told)
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise WavekitError(f"{module} refuses to build it: {logger.first_error or 'it was stopped'}")
    Path(job.engine).write_bytes(memoryview(engine))


def _logger(trt: Any, file: Any) -> Any:
    severity = trt.ILogger

    class Logger(trt.ILogger):  # type: ignore[misc]
        first_error = ""

        def __init__(self) -> None:
            super().__init__()

        def log(self, level: Any, message: str) -> None:
            file.write(message + "\n")
            if level in (severity.ERROR, severity.INTERNAL_ERROR) and not self.first_error:
                self.first_error = " ".join(message.split())

    return Logger()


def _network_flags(trt: Any) -> int:
    """Strongly typed, where that is not the only kind."""
    flags = trt.NetworkDefinitionCreationFlag
    return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0


def _parse(trt: Any, network: Any, job: Job, logger: Any) -> None:
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job.graph):
        reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise WavekitError(f"{trt.__name__} cannot read it: {' '.join((reasons or [logger.first_error])[0].split())}")


def _make_decomposable(trt: Any, network: Any) -> None:
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _configured(trt: Any, builder: Any, job: Job, told: Told) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = _monitor(trt, told)
    for ranges in job.profiles:
        profile = builder.create_optimization_profile()
        for name, (least, usual, most) in ranges.items():
            profile.set_shape(name, tuple(least), tuple(usual), tuple(most))
        config.add_optimization_profile(profile)
    _choose_capabilities(trt, config, job.compute_capabilities)
    return config


def _choose_capabilities(trt: Any, config: Any, wanted: Sequence[str]) -> None:
    if not wanted:
        return
    if not hasattr(trt, "ComputeCapability"):
        raise MisuseError(
            f"{trt.__name__} builds for the GPU of this machine only: leave --compute-capability out, or install "
            "tensorrt_rtx"
        )
    config.num_compute_capabilities = len(wanted)
    for index, text in enumerate(wanted):
        name = f"SM{text.replace('.', '')}"
        if not hasattr(trt.ComputeCapability, name):
            known = [known for known in dir(trt.ComputeCapability) if known.startswith("SM")]
            listed = ", ".join(sorted(f"{known[2:-1]}.{known[-1]}" for known in known))
            raise MisuseError(f"{trt.__name__} has no compute capability {text}; it has {listed}")
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)


def _monitor(trt: Any, told: Told) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

        def step_complete(self, phase: str, step: int) -> bool:
            return told(phase, step, self.steps.get(phase, step))

    return Monitor()
