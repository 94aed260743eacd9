"""What a TensorRT build log says of the engine: its layers, which of them are fused, and the memory it needs.

Where there is no GPU nothing can ask the engine itself; a log of a build with detailed verbosity has the same facts.
"""

import re
from dataclasses import dataclass

_LAYER = re.compile(r"^Name: (?P<name>[^,]+), LayerType: (?P<kind>[^,]+),", re.MULTILINE)
_SOURCE = re.compile(r"\[ONNX Layer: ")
_BYTES = {
    "weight_bytes": re.compile(r"^Total Weights Memory: (\d+) bytes", re.MULTILINE),
    "activation_bytes": re.compile(r"^Total Activation Memory: (\d+) bytes", re.MULTILINE),
    "scratch_bytes": re.compile(r"^Max Scratch Memory: (\d+) bytes", re.MULTILINE),
}


@dataclass(frozen=True)
class EngineFacts:
    """Layers of an engine, those that do the work of several nodes of the graph or of attention, and bytes."""

    layers: int
    fused: tuple[str, ...]
    weight_bytes: int
    activation_bytes: int
    scratch_bytes: int


def read_build_log(text: str) -> EngineFacts:
    """The facts of the last engine in a log; of several profiles, the largest memory."""
    listed = text.rpartition("\nLayers:\n")[2].partition("\nI/O Tensors:")[0]
    lines = [line for line in listed.splitlines() if _LAYER.match(line)]
    fused = [_LAYER.match(line)["name"] for line in lines if len(_SOURCE.findall(line)) > 1 or "_mha_" in line]  # type: ignore[index]
    sizes = {name: max(map(int, pattern.findall(text)), default=0) for name, pattern in _BYTES.items()}
    return EngineFacts(layers=len(lines), fused=tuple(fused), **sizes)
