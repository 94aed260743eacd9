"""The engines of a bundle with every boundary put out, and the stream between the halves of every layer besides.

A graph is loaded, given more outputs, and opened from memory; its weights stay in the bundle's own files, and nothing
is written. The stream is found by what reads it: a layer's first norm, or its first product where the family has no
norm there. So what is traced is what the layers read, whatever an output of the graph is called.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from wavekit.decoding.sequence_workers import switches_to_long
from wavekit.decoding.stage_worker import StageWorker
from wavekit.verification.against_checkpoint.reference import States, joined
from wavekit_engines.bundle import Manifest, StageInfo
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array
from wavekit_engines.errors import BundleError
from wavekit_engines.ort_engine import CPU, OrtEngine

_TRACED = 1_000_000
"""Outputs ``boundary_<k>`` from here on are traced: twice the layer's number, one more for its middle."""


@dataclass(frozen=True)
class Traced:
    """States over one text: those the layers read, and those that the bundle puts out, by what it calls them."""

    states: States
    put_out: dict[int, Array]


class TracedEngines:
    """The stages of a bundle, opened for tracing."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        """Raises BundleError for a graph in which a layer's norms and products cannot be found."""
        self._manifest = manifest
        self._stages = [
            (
                _TracedEngine(_traced_graph(folder / info.graph.file, info, manifest.decoder), folder, info, threads),
                info,
            )
            for info in manifest.stages
        ]

    def run(self, text: Sequence[int]) -> Traced:
        """Run a text in one pass."""
        spec, dtype = self._manifest.decoder, self._manifest.engine.compute_dtype
        x: Array = np.array(text, np.int64)
        positions = np.arange(len(text))
        boundaries, middle, put_out = list[Array](), list[Array](), dict[int, Array]()
        for engine, info in self._stages:
            traced = replace(info, boundaries=(*info.boundaries, *_codes(info)))
            worker = StageWorker(engine, traced, spec, dtype, len(text), len(text))
            worker.reset(switches_to_long(spec, len(text)))
            worker.load(x, positions)
            worker.run()
            x = worker.output(info.last)
            boundaries += [worker.output(code).astype(np.float32) for code in _codes(info)[::2]]
            middle += [worker.output(code).astype(np.float32) for code in _codes(info)[1::2]]
            put_out |= {k: worker.output(k).astype(np.float32) for k in info.boundaries}
        boundaries.append(x.astype(np.float32))
        return Traced(joined(np.stack(boundaries), np.stack(middle)), put_out)


class _TracedEngine(OrtEngine):
    """A graph opened from memory."""

    def __init__(self, graph: bytes, folder: Path, info: StageInfo, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        weights = (folder / info.graph.file).parent
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
        self.session = ort.InferenceSession(graph, options, providers=list(CPU))
        self.info = info.graph


def _codes(info: StageInfo) -> list[int]:
    return [_TRACED + 2 * layer + half for layer in range(info.first, info.last) for half in (0, 1)]


def _traced_graph(file: Path, info: StageInfo, spec: DecoderSpec) -> bytes:
    model = ir.load(file)
    graph = model.graph
    dtype = graph.outputs[0].type
    normed = spec.norm_placement != "post"
    for layer in range(info.first, info.last):
        for half, role in enumerate(("attention_norm_in", "mlp_norm_in") if normed else ("qkv", "gate_up")):
            value = _read_by(graph, f"layers.{layer}.{role}", file)
            node = ir.node("Identity", [value])
            node.outputs[0].name = f"boundary_{_TRACED + 2 * layer + half}"
            node.outputs[0].type = dtype
            graph.append(node)
            graph.outputs.append(node.outputs[0])
    return bytes(ir.to_proto(model).SerializeToString())


def _read_by(graph: ir.Graph, weight: str, file: Path) -> ir.Value:
    """The stream that the node with this weight reads; one that adds to the stream itself puts the sum out."""
    stored = graph.initializers.get(weight)
    readers = [usage.node for usage in stored.uses()] if stored is not None else []
    if not readers:
        raise BundleError(f"{file.name}: nothing reads the weight {weight}, so its layer cannot be followed")
    node = readers[0]
    value = node.outputs[3] if node.op_type == "SkipSimplifiedLayerNormalization" else node.inputs[0]
    assert value is not None
    return value
