"""Every name of TensorRT that the adapter uses is one that the libraries have, read from its source.

``tensorrt_names.json`` holds, for four versions of the Python bindings, those of their public names that matter here.
"""

import ast
import json
from pathlib import Path

import pytest

from wavekit_engines.tensorrt import library

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
}
"""What the adapter calls its objects of the library, and where the library has their names."""

ATTENTION = {
    "layer.attention": "IAttentionInputLayer.attention",
    "layer.attention.decomposable": "IAttention.decomposable",
}
CAPABILITIES = {
    *("ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"),
}
GUARDED = {
    "tensorrt-10.13": NAMES["tensorrt_rtx-1.7"],  # refused: it has no IKVCacheUpdateLayer
    "tensorrt-10.16": CAPABILITIES,
    "tensorrt-11.4": CAPABILITIES,
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
    tree = ast.parse(Path(library.__file__).read_text(encoding="utf-8"))
    names = {qualified(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    monitor = {"phase_start", "phase_finish", "step_complete"}
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} & monitor
    return {name for name in names if name} | {f"IProgressMonitor.{name}" for name in methods} | {"ParserError.desc"}


def test_the_source_is_read_at_all() -> None:
    assert {
        "Builder",
        "Builder.build_serialized_network",
        "LayerType.ATTENTION_INPUT",
        "IAttention.decomposable",
    } < used()


@pytest.mark.parametrize("version", GUARDED)
def test_every_name_is_there_or_asked_for(version: str) -> None:
    assert used() - NAMES[version] <= GUARDED[version]


def test_what_is_missing_somewhere_is_asked_for_by_the_source() -> None:
    source = Path(library.__file__).read_text(encoding="utf-8")
    for name in ("IKVCacheUpdateLayer", "ComputeCapability"):
        assert f'hasattr(trt, "{name}")' in source
