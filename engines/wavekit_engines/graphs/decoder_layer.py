"""One decoder layer as ONNX Runtime runs it, for every family: norms where they belong, fused q/k/v and gate/up.

Attention is one `GroupQueryAttention` node that appends to the cache in place (the caller binds one buffer as past and
present), rotates q and k by the given positions, and adds the given mask to the scores. Nothing here assumes that a row
of the cache holds the position of the same number, so trees and lattices run through the same graph.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.graphs.graph_writer import MICROSOFT, GraphWriter
from wavekit_engines.graphs.linear import WeightFormat, multiply

_FUSED_ROTARY_MULTIPLE = 16  # GroupQueryAttention rotates only multiples of this many features


@dataclass(frozen=True)
class StageInputs:
    """What every layer of a stage shares.

    ``masks`` by attention window (None: no window), each [B or 1, 1, S, T], added to the scores: 0 or a large negative
    number. ``rope`` by key of `DecoderSpec.ropes`: cosine and sine tables [R, rotary_dim / 2].
    """

    positions: ir.Value
    last_rows: ir.Value
    total_rows: ir.Value
    masks: dict[int | None, ir.Value]
    rope: dict[str, tuple[ir.Value, ir.Value]]


@dataclass(frozen=True)
class _Heads:
    """What goes into an attention node; ``rope`` holds the tables where the node itself rotates."""

    qkv: tuple[ir.Value, ir.Value | None, ir.Value | None]
    rope: tuple[ir.Value, ir.Value] | None


class ResidualStream:
    """The residual stream, with at most one addition put off until the next norm, which fuses the two."""

    def __init__(self, graph: GraphWriter, value: ir.Value, eps: float) -> None:
        self._graph, self._value, self._eps = graph, value, eps
        self._pending: ir.Value | None = None

    def add(self, update: ir.Value) -> None:
        """Add ``update`` [B, S, H] to the stream."""
        self.value()
        self._pending = update

    def value(self) -> ir.Value:
        """The stream as it stands: the boundary's hidden state [B, S, H]."""
        if self._pending is not None:
            self._value = self._graph.op("Add", self._value, self._pending)
            self._pending = None
        return self._value

    def norm(self, weight: str) -> ir.Value:
        """RMS norm of the stream [B, S, H]."""
        if self._pending is None:
            return rms_norm(self._graph, self._value, weight, self._eps)
        normed, _, _, self._value = self._graph.ops(
            "SkipSimplifiedLayerNormalization",
            self._value,
            self._pending,
            self._graph.stored(weight),
            outputs=4,
            domain=MICROSOFT,
            epsilon=self._eps,
        )
        self._pending = None
        return normed


def rms_norm(graph: GraphWriter, x: ir.Value, weight: str, eps: float) -> ir.Value:
    """RMS norm over the last axis, computed in float32."""
    return graph.op("SimplifiedLayerNormalization", x, graph.stored(weight), axis=-1, epsilon=eps, stash_type=1)


@dataclass(frozen=True)
class LayerWriter:
    """Writes layer ``index`` of ``spec`` into a graph; its weights are named ``<name>.<role>``."""

    graph: GraphWriter
    spec: DecoderSpec
    form: WeightFormat
    index: int
    name: str
    input_size: int
    """Features that q, k and v take; the hidden size in a decoder."""

    def write(self, stream: ResidualStream, shared: StageInputs, cache: tuple[ir.Value, ir.Value]) -> list[ir.Value]:
        """Advance the stream by one layer and return the new key and value cache."""
        placement, eps = self.spec.norm_placement, self.spec.norm_eps
        before, after = placement != "post", placement != "pre"
        x = stream.norm(self._name("attention_norm_in")) if before else stream.value()
        attended, keys, values = self.attention(x, shared, cache)
        if after:
            attended = rms_norm(self.graph, attended, self._name("attention_norm_out"), eps)
        stream.add(self._scaled(attended))
        x = stream.norm(self._name("mlp_norm_in")) if before else stream.value()
        update = self.mlp(x)
        if after:
            update = rms_norm(self.graph, update, self._name("mlp_norm_out"), eps)
        stream.add(self._scaled(update))
        return [keys, values]

    def _name(self, role: str) -> str:
        return f"{self.name}.{role}"

    def _scaled(self, update: ir.Value) -> ir.Value:
        scale = self.spec.residual_scale
        return update if scale == 1.0 else scaled(self.graph, update, "residual_scale", scale, self.form)

    def _linear(self, x: ir.Value, role: str, shape: tuple[int, int], bias: bool) -> ir.Value:
        name = self._name(role)
        return multiply(self.graph, x, name, shape, self.form, f"{name}_bias" if bias else None)

    def attention(
        self, x: ir.Value, shared: StageInputs, cache: tuple[ir.Value, ir.Value]
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """What ``x`` [B, S, input_size] attends to, projected to [B, S, H], and the new key and value cache."""
        spec, layer = self.spec, self.spec.layers[self.index]
        packed = self._linear(x, "qkv", (spec.query_size + 2 * spec.kv_size, self.input_size), spec.qkv_bias)
        heads = self._heads(packed, shared)
        attended, keys, values = self.graph.ops(
            "GroupQueryAttention",
            *heads.qkv,
            *cache,
            shared.last_rows,
            shared.total_rows,
            *(heads.rope or (None, None)),
            shared.positions,
            shared.masks[layer.window],
            outputs=3,
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            do_rotary=int(heads.rope is not None),
            scale=float(spec.attention_scale),
            softcap=float(spec.attention_softcap or 0.0),
        )
        attended = self._linear(attended, "output", (spec.hidden_size, spec.query_size), spec.output_bias)
        return attended, keys, values

    def _heads(self, packed: ir.Value, shared: StageInputs) -> _Heads:
        """What the attention node takes: packed q/k/v, unless something happens to q and k first."""
        spec, layer = self.spec, self.spec.layers[self.index]
        tables = shared.rope[layer.rope] if layer.rope is not None else None
        fused = layer.rope is None or spec.ropes[layer.rope].rotary_dim % _FUSED_ROTARY_MULTIPLE == 0
        if spec.qk_norm == "none" and fused:
            return _Heads((packed, None, None), tables)
        query, key, value = self._split_qkv(packed)
        if spec.qk_norm != "none":
            query, key = self._qk_norm(query, "q_norm", spec.num_heads), self._qk_norm(key, "k_norm", spec.num_kv_heads)
        if tables is None or fused:
            return _Heads((query, key, value), tables)
        query = self._rotated(query, spec.num_heads, shared.positions, tables)
        key = self._rotated(key, spec.num_kv_heads, shared.positions, tables)
        return _Heads((query, key, value), None)

    def _split_qkv(self, packed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        spec, graph = self.spec, self.graph
        sizes = graph.constant("qkv_sizes", np.array([spec.query_size, spec.kv_size, spec.kv_size], np.int64))
        query, key, value = graph.ops("Split", packed, sizes, outputs=3, axis=-1)
        return query, key, value

    def _qk_norm(self, x: ir.Value, role: str, heads: int) -> ir.Value:
        graph, spec = self.graph, self.spec
        if spec.qk_norm == "full":
            return rms_norm(graph, x, self._name(role), spec.norm_eps)
        by_head = graph.constant(f"{role}_heads", np.array([0, 0, heads, spec.head_dim], np.int64))
        normed = rms_norm(graph, graph.op("Reshape", x, by_head), self._name(role), spec.norm_eps)
        return graph.op("Reshape", normed, graph.constant("flat_heads", np.array([0, 0, -1], np.int64)))

    def _rotated(self, x: ir.Value, heads: int, positions: ir.Value, tables: tuple[ir.Value, ir.Value]) -> ir.Value:
        rope = self.spec.layers[self.index].rope
        assert rope is not None
        return self.graph.op(
            "RotaryEmbedding",
            x,
            positions,
            *tables,
            domain=MICROSOFT,
            num_heads=heads,
            rotary_embedding_dim=self.spec.ropes[rope].rotary_dim,
        )

    def mlp(self, x: ir.Value) -> ir.Value:
        """The gated MLP of ``x`` [B, S, H]: [B, S, H]."""
        spec, graph = self.spec, self.graph
        both = self._linear(x, "gate_up", (2 * spec.intermediate_size, spec.hidden_size), spec.mlp_bias)
        gate, up = graph.ops("Split", both, outputs=2, axis=-1, num_outputs=2)
        if spec.activation == "silu":
            gate = graph.op("QuickGelu", gate, domain=MICROSOFT, alpha=1.0)  # x * sigmoid(1.0 * x)
        else:
            gate = graph.op("Gelu", gate, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
        inner = graph.op("Mul", gate, up)
        return self._linear(inner, "down", (spec.hidden_size, spec.intermediate_size), spec.mlp_bias)


def scaled(graph: GraphWriter, x: ir.Value, name: str, factor: float, form: WeightFormat) -> ir.Value:
    """X times a constant."""
    return graph.op("Mul", x, graph.constant(name, np.array(factor, form.compute_dtype)))
