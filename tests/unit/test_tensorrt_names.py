"""Every name of TensorRT that wavekit uses is one that the libraries have, read from its source.

``tensorrt_names.json`` holds, for four versions of the Python bindings, those of their public names that matter here.
"""

import ast
import json
from pathlib import Path

import pytest

from wavekit_engines.tensorrt import library, runtime_library

NAMES = {
    version: set(names)
    for version, names in json.loads(Path(__file__).with_name("tensorrt_names.json").read_text()).items()
}

CLASSES = {
    "trt": "",
    "severity": "ILogger.",
    "flags": "NetworkDefinitionCreationFlag.",
    "builder": "Builder.",
    "network": "INetworkDefinition.",
    "parser": "OnnxParser.",
    "config": "IBuilderConfig.",
    "profile": "IOptimizationProfile.",
    "layer": "ILayer.",
    "self._runtime": "Runtime.",
    "engine": "ICudaEngine.",
    "settings": "IRuntimeConfig.",
    "context": "IExecutionContext.",
    "self._context": "IExecutionContext.",
    "origin": "SeekPosition.",
}
"""What the adapter calls its objects of the library, and where the library has their names."""

ATTENTION = {
    "layer.attention": "IAttentionInputLayer.attention",
    "layer.attention.decomposable": "IAttention.decomposable",
}
MODULES = (library, runtime_library)
"""The only ones that name anything of the library."""

OVERRIDDEN = {
    "IProgressMonitor": ("phase_start", "phase_finish", "step_complete"),
    "IStreamReaderV2": ("read", "seek"),
    "ILogger": ("log",),
}
CAPABILITIES = {
    *("ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"),
}
RTX_ONLY = CAPABILITIES | {
    *("CudaGraphStrategy", "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE", "IRuntimeConfig.cuda_graph_strategy"),
    *("DynamicShapesKernelSpecializationStrategy", "DynamicShapesKernelSpecializationStrategy.EAGER"),
    *("IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy", "IExecutionContext.is_stream_capturable"),
}
GUARDED = {
    "tensorrt-10.13": NAMES["tensorrt_rtx-1.7"],  # refused: it has no IKVCacheUpdateLayer
    "tensorrt-10.16": RTX_ONLY,
    "tensorrt-11.4": RTX_ONLY,
    "tensorrt_rtx-1.7": set(),
}


def qualified(node: ast.Attribute) -> str | None:
    """The library's name for an attribute that the adapter reads, sets or calls."""
    text = ast.unparse(node)
    owner, _, name = text.rpartition(".")
    if text in ATTENTION or name.startswith("__"):
        return ATTENTION.get(text)
    if owner.startswith("trt."):
        return text.removeprefix("trt.")
    return CLASSES[owner] + name if owner in CLASSES else None


def used() -> set[str]:
    tree = ast.parse("".join(Path(module.__file__).read_text(encoding="utf-8") for module in MODULES))
    names = {qualified(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    overridden = {f"{owner}.{name}" for owner, some in OVERRIDDEN.items() for name in some if name in methods}
    return {name for name in names if name} | overridden | {"ParserError.desc"}


def test_the_source_is_read_at_all() -> None:
    assert {
        "Builder",
        "Builder.build_serialized_network",
        "LayerType.ATTENTION_INPUT",
        "IAttention.decomposable",
        "Runtime.deserialize_cuda_engine",
        "IExecutionContext.execute_async_v3",
        "IStreamReaderV2.read",
    } < used()


@pytest.mark.parametrize("version", GUARDED)
def test_every_name_is_there_or_asked_for(version: str) -> None:
    assert used() - NAMES[version] <= GUARDED[version]


def test_what_is_missing_somewhere_is_asked_for_by_the_source() -> None:
    sources = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in MODULES)
    for name in ("IKVCacheUpdateLayer", "ComputeCapability"):
        assert f'hasattr(trt, "{name}")' in sources
    for name in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"):
        assert f'hasattr(settings, "{name}")' in sources
    assert 'hasattr(context, "is_stream_capturable")' in sources


def test_no_other_module_imports_the_library() -> None:
    for file in Path(library.__file__).parent.glob("*.py"):
        if file not in {Path(module.__file__) for module in MODULES}:
            assert "import_module(module)" not in file.read_text(encoding="utf-8")
