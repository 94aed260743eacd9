"""Opening all graphs of a bundle with one engine on one device.

Each engine's library is imported only when the engine is asked for. Nothing here decodes.
"""

from importlib.util import find_spec
from typing import Literal, get_args

from wavekit.decoding.lattice import LATTICE_ROWS
from wavekit.decoding.sequence_workers import Engines
from wavekit_engines.bundle import Bundle, GraphInfo
from wavekit_engines.errors import MisuseError

EngineName = Literal["onnxruntime", "torch", "tensorrt"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

_CUDA = "CUDAExecutionProvider"


def open_engines(bundle: Bundle, engine: str, device: str | None, threads: int) -> Engines:
    """Open the graphs of a bundle.

    Args:
        bundle: the bundle.
        engine: one of ``ENGINES``.
        device: ``cpu`` or ``cuda``; with torch any device that it knows, with TensorRT also ``cuda:1``. None: the GPU
            for TensorRT, the CPU for the others.
        threads: threads a run may use on the CPU.

    Raises:
        MisuseError: there is no such engine or device, here or at all, or the engine cannot run this bundle on it.
        BundleError: a graph cannot be opened.
        WavekitError: the GPU has no room, or TensorRT takes no engine.
    """
    if engine == "torch":
        return _open_in_torch(bundle, device or "cpu", threads)
    if engine == "onnxruntime":
        return _open_in_onnxruntime(bundle, device or "cpu", threads)
    if engine == "tensorrt":
        return _open_in_tensorrt(bundle, device or "cuda")
    raise MisuseError(f"there is no engine {engine!r}; take one of {', '.join(ENGINES)}")


def _open_in_onnxruntime(bundle: Bundle, device: str, threads: int) -> Engines:
    _require("onnxruntime", "onnxruntime")
    from wavekit_engines.ort_engine import CPU, OrtEngine, available_providers

    manifest, providers = bundle.manifest, CPU
    if device != "cpu":
        _check_cuda(bundle, device, available_providers())
        providers = (_CUDA, *CPU)

    def opened(info: GraphInfo) -> OrtEngine:
        return OrtEngine(bundle.path, info, threads, providers=providers)

    draft, greedy, exits = manifest.draft, manifest.greedy_head, manifest.exits
    exit_graphs = zip(exits.spec.boundaries, exits.graphs, strict=True) if exits is not None else ()
    return Engines(
        [opened(stage.graph) for stage in manifest.stages],
        head=opened(manifest.head),
        greedy_head=opened(greedy) if greedy is not None else None,
        draft=opened(draft.graph) if draft is not None else None,
        exits={boundary: opened(graph) for boundary, graph in exit_graphs},
    )


def _check_cuda(bundle: Bundle, device: str, available: list[str]) -> None:
    if device != "cuda":
        raise MisuseError(f"ONNX Runtime has no device {device!r} here; take cpu or cuda")
    if _CUDA not in available:
        raise MisuseError(
            "the ONNX Runtime installed here has no CUDA provider; install onnxruntime-gpu instead of onnxruntime, or "
            "take --engine torch"
        )
    if bundle.manifest.engine.compute_dtype == "float16":
        raise MisuseError(
            "ONNX Runtime's CUDA attention takes no mask, so it cannot run an fp16 bundle; take --engine torch, or a "
            "bundle of another precision, whose attention runs on the CPU"
        )


def _open_in_torch(bundle: Bundle, device: str, threads: int) -> Engines:
    _require("torch", "torch", "onnx_ir")
    from wavekit_engines.torch_engine import TorchEngines

    opened, manifest = TorchEngines(bundle, device, threads), bundle.manifest
    boundaries = manifest.exits.spec.boundaries if manifest.exits is not None else ()
    return Engines(
        [opened.stage(number) for number in range(len(manifest.stages))],
        head=opened.head(),
        greedy_head=opened.greedy_head(),
        draft=opened.draft() if manifest.draft is not None else None,
        exits={boundary: opened.exit(boundary) for boundary in boundaries},
    )


def _open_in_tensorrt(bundle: Bundle, device: str) -> Engines:
    from wavekit_engines.tensorrt.runtime import TensorRTEngines

    opened, manifest = TensorRTEngines(bundle, device), bundle.manifest
    limits, draft, exits = opened.limits, manifest.draft, manifest.exits
    if min(limits.context, limits.tree) < LATTICE_ROWS:
        raise MisuseError(
            f"the TensorRT engines have room for {limits.context} tokens and {limits.tree} rows, and the decoder needs "
            f"{LATTICE_ROWS} of both: build them with a larger --max-context or --max-tree"
        )
    exit_graphs = zip(exits.spec.boundaries, exits.graphs, strict=True) if exits is not None else ()
    return Engines(
        [opened.engine(stage.graph) for stage in manifest.stages],
        head=opened.engine(manifest.head),
        draft=opened.engine(draft.graph) if draft is not None else None,
        exits={boundary: opened.engine(graph) for boundary, graph in exit_graphs},
        context=limits.context,
        rows=limits.tree,
        rounds=opened.rounds,
    )


def _require(engine: str, *modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MisuseError(
            f"the engine {engine} needs {', '.join(missing)}, not installed here; in a clone of wavekit: "
            f"pip install -c constraints.txt -e '.[{engine}]'"
        )
