"""Small helpers of the integration tests: export a checkpoint folder and open its decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from wavekit.backends import open_engines
from wavekit.decoding.decoder import Decoder
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.export import ExportOptions, export_bundle


def exported(checkpoint: Path, bundle: Path, **options: Any) -> Path:
    """Export a checkpoint folder and return the bundle's path."""
    export_bundle(open_checkpoint(str(checkpoint)), bundle, ExportOptions(**options))
    return bundle


def opened(bundle: Path, threads: int = 1, engine: str = "onnxruntime") -> Decoder:
    """Open a bundle's engines."""
    found = open_bundle(bundle)
    return Decoder(found.manifest, open_engines(found, engine, "cpu", threads))


def slowly(names: Sequence[str], slow: Sequence[str]) -> list[Any]:
    """Parameters of a test, those that take long marked."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def greedy(logits: np.ndarray, position: int) -> int:
    """The most likely token."""
    return int(logits.argmax())


def decoded(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens after a prompt."""
    return [token for tokens in decoder.decode(prompt, greedy, count) for token in tokens]


def without_rounded_activations(bundle: Path) -> None:
    """Change the graphs of a bundle: its quantized products no longer round their activations to int8."""
    changed = 0
    for file in (bundle / "graphs").glob("*.onnx"):
        graph = onnx.load(file, load_external_data=False)
        for attribute in (attribute for node in graph.graph.node for attribute in node.attribute):
            if attribute.name == "accuracy_level":
                attribute.i, changed = 1, changed + 1
        onnx.save(graph, file)
    assert changed
