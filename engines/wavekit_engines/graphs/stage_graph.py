"""The two kinds of graph a decoder is cut into: stages of layers, and the head.

A stage runs layers ``first`` to ``last - 1``: from boundary ``first`` (or token ids, where ``first`` is 0) to boundary
``last``, with any boundaries between as extra outputs. The head turns rows of the last boundary into logits; it is a
graph of its own so that exits can use it too and a prompt's inner rows never pay for it.

Names and shapes, B sequences of S new tokens, C cache rows allocated, n rows for the head; T is at least the
number of rows in use, the new ones included, and columns beyond them are not read:

========================  ==========================  =======================================================
``token_ids``             int64 [B, S]                first stage only
``hidden``                float [B, S, H]             other stages
``positions``             int64 [B, S]                rotary positions
``last_rows``             int32 [B]                   the last row in use, of each sequence
``total_rows``            int32 [1]                   T
``mask[_<window>]``       float [B or 1, 1, S, T]     added to the scores of layers with that window
``rope_<kind>_cos|sin``   float [R, rotary_dim / 2]   R >= T
``key|value_<layer>``     float [B, kv, C, head_dim]  bound in place to ``..._out``
``boundary_<k>``          float [B, S, H]             outputs: the last boundary and the tapped ones
========================  ==========================  =======================================================
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.graphs.decoder_layer import LayerWriter, ResidualStream, StageInputs, rms_norm, scaled
from wavekit_engines.graphs.graph_writer import Dim, GraphWriter, WeightFile
from wavekit_engines.graphs.linear import WeightFormat, add_matrix, add_table, add_vector, embed, multiply_table
from wavekit_engines.stages import StageRange
from wavekit_engines.weights import DecoderWeights

EMBEDDING = "embedding"
HEAD = "head"
FINAL_NORM = "final_norm"


def mask_name(window: int | None) -> str:
    """The input that masks layers of this window."""
    return "mask" if window is None else f"mask_{window}"


def head_table(spec: DecoderSpec) -> str:
    """The name of the stored table [V, H] that makes the logits."""
    return EMBEDDING if spec.tied_head else HEAD


def write_vocabulary(file: WeightFile, spec: DecoderSpec, weights: DecoderWeights, form: WeightFormat) -> None:
    """Store the embedding, the head and the final norm; a tied table is stored once."""
    add_table(file, EMBEDDING, weights["embedding"], form)
    if not spec.tied_head:
        add_table(file, HEAD, weights["head"], form)
    add_vector(file, FINAL_NORM, weights["final_norm"], form.compute_dtype)


def write_layers(
    file: WeightFile, spec: DecoderSpec, weights: DecoderWeights, form: WeightFormat, layers: Sequence[int]
) -> None:
    """Store the weights of some layers, one matrix in memory at a time."""
    for index in layers:
        for role in weights.layer_roles():
            name, rows = f"layers.{index}.{role}", weights.layer(index, role)
            if len(rows.shape) == 2:
                add_matrix(file, name, rows, form)
            else:
                add_vector(file, name, rows, form.compute_dtype)


def write_stage_graph(
    path: Path,
    stage: StageRange,
    spec: DecoderSpec,
    files: Sequence[WeightFile],
    form: WeightFormat,
    vocabulary_form: WeightFormat,
) -> None:
    """Write the graph of one stage; its layers' weights, and the embedding for the first, are in ``files`` already."""
    graph = GraphWriter(path.stem, *files)
    dtype = form.compute_dtype
    if stage.first == 0:
        ids = graph.input("token_ids", "int64", ("B", "S"))
        x = embed(graph, ids, EMBEDDING, spec.hidden_size, vocabulary_form)
        if spec.embedding_scale != 1.0:
            x = scaled(graph, x, "embedding_scale", spec.embedding_scale, form)
    else:
        x = graph.input("hidden", dtype, ("B", "S", spec.hidden_size))
    shared = layer_inputs(graph, spec, range(stage.first, stage.last), dtype)
    cache_shape: tuple[Dim, ...] = ("B", spec.num_kv_heads, "C", spec.head_dim)
    stream = ResidualStream(graph, x, spec.norm_eps)
    hidden_shape = ("B", "S", spec.hidden_size)
    caches: list[tuple[str, ir.Value]] = []
    for index in range(stage.first, stage.last):
        if index in stage.outputs:
            graph.output(f"boundary_{index}", stream.value(), dtype, hidden_shape)
        names = (f"key_{index}", f"value_{index}")
        cache = (graph.input(names[0], dtype, cache_shape), graph.input(names[1], dtype, cache_shape))
        layer = LayerWriter(graph, spec, form, index, f"layers.{index}", spec.hidden_size)
        caches += zip(names, layer.write(stream, shared, cache), strict=True)
    graph.output(f"boundary_{stage.last}", stream.value(), dtype, hidden_shape)
    for name, value in caches:
        graph.output(f"{name}_out", value, dtype, cache_shape)
    graph.save(path, {"wavekit.stage": f"{stage.first}:{stage.last}"})


def layer_inputs(graph: GraphWriter, spec: DecoderSpec, indices: range, dtype: str, batch: Dim = "B") -> StageInputs:
    """Declare the inputs that these layers share."""
    layers = [spec.layers[index] for index in indices]
    windows = sorted({layer.window for layer in layers}, key=lambda window: window or 0)
    kinds = sorted({layer.rope for layer in layers if layer.rope is not None})
    return StageInputs(
        positions=graph.input("positions", "int64", (batch, "S")),
        last_rows=graph.input("last_rows", "int32", (batch,)),
        total_rows=graph.input("total_rows", "int32", (1,)),
        masks={window: graph.input(mask_name(window), dtype, ("M", 1, "S", "T")) for window in windows},
        rope={
            kind: (
                graph.input(f"rope_{kind}_cos", dtype, ("R", spec.ropes[kind].rotary_dim // 2)),
                graph.input(f"rope_{kind}_sin", dtype, ("R", spec.ropes[kind].rotary_dim // 2)),
            )
            for kind in kinds
        },
    )


def write_head_graph(path: Path, spec: DecoderSpec, file: WeightFile, form: WeightFormat) -> None:
    """Write the final norm and the head: ``hidden`` float [n, H] in, ``logits`` float32 [n, V] out."""
    graph = GraphWriter(path.stem, file)
    hidden = graph.input("hidden", form.compute_dtype, ("n", spec.hidden_size))
    x = rms_norm(graph, hidden, FINAL_NORM, spec.norm_eps)
    graph.output(
        "logits", scores(graph, x, head_table(spec), spec.vocab_size, spec, form), "float32", ("n", spec.vocab_size)
    )
    graph.save(path, {"wavekit.head": "1"})


def scores(graph: GraphWriter, x: ir.Value, table: str, count: int, spec: DecoderSpec, form: WeightFormat) -> ir.Value:
    """Logits float32 [n, count] of normed rows ``x`` [n, H] over a stored table [count, H] of head rows."""
    logits = multiply_table(graph, x, table, (count, spec.hidden_size), form)
    if form.compute_dtype != "float32":
        logits = graph.op("Cast", logits, to=int(ir.DataType.FLOAT))
    if spec.logit_scale != 1.0:
        logits = _times(graph, logits, "logit_scale", spec.logit_scale)
    if spec.logit_softcap is not None:
        capped = graph.op("Tanh", _times(graph, logits, "softcap_inverse", 1.0 / spec.logit_softcap))
        logits = _times(graph, capped, "softcap", spec.logit_softcap)
    return logits


def best(graph: GraphWriter, scores: ir.Value, top_k: int) -> tuple[ir.Value, ir.Value]:
    """The ``top_k`` highest of scores float32 [n, V], best first: columns int64 [n, k] and their log-probabilities."""
    logprobs = graph.op("LogSoftmax", scores, axis=-1)
    highest, columns = graph.ops("TopK", logprobs, graph.constant("top_k", np.array([top_k])), outputs=2, axis=-1)
    return columns, highest


def _times(graph: GraphWriter, x: ir.Value, name: str, factor: float) -> ir.Value:
    return graph.op("Mul", x, graph.constant(name, np.array(factor, np.float32)))
