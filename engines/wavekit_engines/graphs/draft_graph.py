"""A draft head as one graph: the fused input, one step of the head, the best tokens of the rows asked for.

The arithmetic is that of `draft_spec`. A pass takes S new rows, those with the target's states (taps) before those that
feed the head's own state back, either of which there may be none of. With P rows of the first kind and Q of the second,
S = P + Q, of which n get scores, k tokens each, and the names of `stage_graph` where they mean the same. n is at least
1: ONNX Runtime 1.23 ends the process when it has to choose the best of no rows.

==========================  =========================  =================================================================
``taps``                    float [1, P, m * H]        the target's states at the draft's boundaries, shallow to deep
``hidden``                  float [1, Q, H]            states fed back
``token_ids``               int64 [1, S]               of the token after each row's, in the target's vocabulary
``positions``               int64 [1, S]               rotary positions of the rows' own tokens
``last_rows``               int32 [1]                  the last cache row in use
``total_rows``              int32 [1]                  T
``mask``                    float [1, 1, S, T]         added to the scores
``rope_draft_cos|sin``      float [R, rotary_dim / 2]  R >= T
``key|value_draft``         float [1, kv, C, D]        bound in place to ``..._out``
``head_rows``               int64 [n]                  which of the S rows get scores
``fed_back``                float [1, S, H]            output: the state of each row to feed back
``top_tokens``              int64 [n, k]               output: the best tokens, best first, as the target numbers them
``top_logprobs``            float32 [n, k]             output: their log-probabilities over the draft vocabulary
==========================  =========================  =================================================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from wavekit_engines.decoder_spec import DecoderSpec, LayerSpec
from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.graphs.decoder_layer import LayerWriter, ResidualStream, rms_norm, scaled
from wavekit_engines.graphs.graph_writer import Dim, GraphWriter, WeightFile
from wavekit_engines.graphs.linear import (
    ArrayRows,
    WeightFormat,
    add_matrix,
    add_table,
    add_vector,
    embed,
    multiply,
    multiply_table,
)
from wavekit_engines.graphs.stage_graph import EMBEDDING, best, layer_inputs

_NAME = "draft"
_FUSED = {"qkv": ("q", "k", "v"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""What `LayerWriter` calls the layer's matrices, and which weights of the draft they are made of."""


@dataclass(frozen=True)
class DraftForms:
    """How a draft's weights are stored, and the target's embedding that it reads.

    ``head`` is the form of what reads the target's states and scores the tokens: ``fc``, ``head`` and an embedding of
    the draft's own. All three compute in the same dtype.
    """

    layer: WeightFormat
    head: WeightFormat
    target_embedding: WeightFormat


def write_draft_weights(file: WeightFile, draft: Draft, forms: DraftForms) -> None:
    """Store everything that the graph does not read from the target: the layer's matrices fused, d2t as token ids."""
    spec, weights, dtype = draft.spec, draft.weights, forms.layer.compute_dtype
    add_matrix(file, _named("fc"), ArrayRows(weights["fc"]), forms.head)
    for name, parts in _FUSED.items():
        add_matrix(file, _named(name), ArrayRows(np.concatenate([weights[part] for part in parts])), forms.layer)
        biases = [weights[f"{part}_bias"] for part in parts if f"{part}_bias" in spec.weight_shapes()]
        if biases:
            add_vector(file, _named(f"{name}_bias"), ArrayRows(np.concatenate(biases)), dtype)
    for role in spec.weight_shapes():
        if role.split(".")[0].endswith("norm"):
            add_vector(file, _named(role), ArrayRows(weights[role]), dtype)
    add_table(file, _named("head"), ArrayRows(weights["head"]), forms.head)
    if draft.embedding is not None:
        add_table(file, _named(EMBEDDING), ArrayRows(draft.embedding), forms.head)
    file.add(_named("target_ids"), "int64", draft.d2t.shape, [np.arange(draft.d2t.size) + draft.d2t])


def write_draft_graph(path: Path, draft: Draft, files: Sequence[WeightFile], forms: DraftForms, top_k: int) -> None:
    """Write the graph; the draft's weights, and the target's embedding table, are in ``files`` already."""
    spec = draft.spec
    graph, dtype = GraphWriter(path.stem, *files), forms.layer.compute_dtype
    layer = LayerWriter(graph, _one_layer(spec), forms.layer, 0, _NAME, 2 * spec.hidden_size)
    fused = _fused_taps(graph, spec, forms.head)
    fed = graph.input("hidden", dtype, (1, "Q", spec.hidden_size))
    state = graph.op("Concat", fused, fed, axis=1)
    embedding = _embedding(graph, draft, forms)
    shared = layer_inputs(graph, layer.spec, range(1), dtype, batch=1)
    cache_shape: tuple[Dim, ...] = (1, spec.num_kv_heads, "C", spec.head_dim)
    cache = (graph.input("key_draft", dtype, cache_shape), graph.input("value_draft", dtype, cache_shape))
    normed = rms_norm(graph, state, _named("hidden_norm"), spec.norm_eps)
    stream = ResidualStream(graph, normed if spec.norm_before_residual else state, spec.norm_eps)
    embedded = rms_norm(graph, embedding, _named("embedding_norm"), spec.norm_eps)
    attended, keys, values = layer.attention(graph.op("Concat", embedded, normed, axis=-1), shared, cache)
    stream.add(attended)
    stream.add(layer.mlp(stream.norm(_named("mlp_norm"))))
    out = stream.norm(_named("norm"))
    tokens, logprobs = _best(graph, spec, out, forms.head, top_k)
    fed_back = out if spec.norm_output else stream.value()
    graph.output("fed_back", fed_back, dtype, (1, "S", spec.hidden_size))
    graph.output("top_tokens", tokens, "int64", ("n", top_k))
    graph.output("top_logprobs", logprobs, "float32", ("n", top_k))
    graph.output("key_draft_out", keys, dtype, cache_shape)
    graph.output("value_draft_out", values, dtype, cache_shape)
    graph.save(path, {"wavekit.draft": ",".join(map(str, spec.boundaries))})


def _named(role: str) -> str:
    return f"{_NAME}.{role}"


def _one_layer(spec: DraftSpec) -> DecoderSpec:
    """The head's layer as `LayerWriter` takes it; norms are written here, since they are not a decoder layer's."""
    return DecoderSpec(
        family=_NAME,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        norm_eps=spec.norm_eps,
        layers=(LayerSpec(rope=_NAME, window=None),),
        ropes={_NAME: spec.rope},
        attention_scale=1 / math.sqrt(spec.head_dim),
        activation=spec.activation,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        mlp_bias=spec.mlp_bias,
    )


def _fused_taps(graph: GraphWriter, spec: DraftSpec, form: WeightFormat) -> ir.Value:
    count, size = len(spec.boundaries), spec.hidden_size
    taps = graph.input("taps", form.compute_dtype, (1, "P", count * size))
    if spec.fc_norm == "joint":
        taps = rms_norm(graph, taps, _named("fc_norm"), spec.norm_eps)
    elif spec.fc_norm == "each":
        each = graph.ops("Split", taps, outputs=count, axis=-1, num_outputs=count)
        normed = [rms_norm(graph, tap, _named(f"fc_norm.{i}"), spec.norm_eps) for i, tap in enumerate(each)]
        taps = graph.op("Concat", *normed, axis=-1)
    return multiply(graph, taps, _named("fc"), (size, count * size), form)


def _embedding(graph: GraphWriter, draft: Draft, forms: DraftForms) -> ir.Value:
    name, form = (EMBEDDING, forms.target_embedding) if draft.embedding is None else (_named(EMBEDDING), forms.head)
    rows = embed(graph, graph.input("token_ids", "int64", (1, "S")), name, draft.spec.hidden_size, form)
    scale = draft.spec.embedding_scale
    return rows if scale == 1.0 else scaled(graph, rows, "embedding_scale", scale, form)


def _best(
    graph: GraphWriter, spec: DraftSpec, out: ir.Value, form: WeightFormat, top_k: int
) -> tuple[ir.Value, ir.Value]:
    """The best tokens [n, k] of the normed rows asked for, and their log-probabilities."""
    rows = graph.op(
        "Gather", graph.op("Squeeze", out, graph.constant("batch", np.array([0]))), _head_rows(graph), axis=0
    )
    scores = multiply_table(graph, rows, _named("head"), (spec.draft_vocab_size, spec.hidden_size), form)
    if form.compute_dtype != "float32":
        scores = graph.op("Cast", scores, to=int(ir.DataType.FLOAT))
    ids, logprobs = best(graph, scores, top_k)
    return graph.op("Gather", graph.stored(_named("target_ids")), ids, axis=0), logprobs


def _head_rows(graph: GraphWriter) -> ir.Value:
    return graph.input("head_rows", "int64", ("n",))
