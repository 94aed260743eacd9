"""The two halves of a decoder layer in numpy, as `DecoderSpec` says, and what they compute under other assumptions.

Used only once a half is known to compute something else than the checkpoint's: whichever assumption gives what the
engines gave is what is wrong with them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from wavekit_engines.decoder_spec import Activation, DecoderSpec, LayerSpec, RopeSpec
from wavekit_engines.engine import Array
from wavekit_engines.rope import rope_tables

HalfName = Literal["attention", "mlp"]

_BASES = (100.0, 500.0, 1e3, 1e4, 1e5, 1.3e5, 1.5e5, 2.5e5, 3e5, 5e5, 6e5, 1e6, 1.5e6, 2e6, 5e6, 8e6, 1e7)
_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class HalfLayer:
    """One half, with everything that it computes with."""

    name: HalfName
    spec: DecoderSpec
    layer: LayerSpec
    weights: dict[str, Array]
    normed: bool = True
    interleaved: bool = False

    def run(self, x: Array) -> Array:
        """The stream [T, H] after this half, of the stream before it."""
        spec, kind, y = self.spec, self.name, x
        if spec.norm_placement in ("pre", "sandwich") and self.normed:
            y = _norm(y, self.weights[f"{kind}_norm_in"], spec.norm_eps)
        y = self._attention(y) if kind == "attention" else self._mlp(y)
        if spec.norm_placement in ("post", "sandwich") and self.normed:
            y = _norm(y, self.weights[f"{kind}_norm_out"], spec.norm_eps)
        stream: Array = x + np.float32(spec.residual_scale) * y
        return stream

    def _attention(self, x: Array) -> Array:
        spec, weights, length = self.spec, self.weights, len(x)
        packed = x @ weights["qkv"].T + weights.get("qkv_bias", np.float32(0))
        query, key, value = np.split(packed, [spec.query_size, spec.query_size + spec.kv_size], axis=1)
        if spec.qk_norm == "full":
            query, key = (_norm(part, weights[f"{n}_norm"], spec.norm_eps) for part, n in ((query, "q"), (key, "k")))
        q, k, v = (part.reshape(length, -1, spec.head_dim).transpose(1, 0, 2) for part in (query, key, value))
        if spec.qk_norm == "per_head":
            q, k = (_norm(part, weights[f"{n}_norm"], spec.norm_eps) for part, n in ((q, "q"), (k, "k")))
        if self.layer.rope is not None:
            rope = spec.ropes[self.layer.rope]
            tables = rope_tables(rope, length, rope.switch_length is not None and length > rope.switch_length)
            q, k = (_rotated(part, *tables, self.interleaved) for part in (q, k))
        group = spec.num_heads // spec.num_kv_heads
        scores = _capped(q @ np.repeat(k, group, 0).transpose(0, 2, 1) * np.float32(spec.attention_scale),
                         spec.attention_softcap)  # fmt: skip
        distance = np.arange(length)[:, None] - np.arange(length)
        scores = np.where((distance >= 0) & (distance < (self.layer.window or length)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ np.repeat(v, group, 0)
        flat = mixed.transpose(1, 0, 2).reshape(length, -1)
        out: Array = flat @ weights["output"].T + weights.get("output_bias", np.float32(0))
        return out

    def _mlp(self, x: Array) -> Array:
        gate, up = np.split(x @ self.weights["gate_up"].T + self.weights.get("gate_up_bias", np.float32(0)), 2, axis=1)
        inner = (_activated(gate, self.spec.activation) * up).astype(np.float32)
        out: Array = inner @ self.weights["down"].T + self.weights.get("down_bias", np.float32(0))
        return out


def assumptions(half: HalfLayer) -> Iterator[tuple[str, HalfLayer]]:
    """What could be wrong with a half, and the half that has it wrong."""
    spec = half.spec
    for eps in _EPS:
        if not math.isclose(eps, spec.norm_eps, rel_tol=1e-3, abs_tol=1e-15):
            said = f"the norms' epsilon is {eps:g}, the checkpoint's is {spec.norm_eps:g}"
            yield said, replace(half, spec=replace(spec, norm_eps=eps))
    norms = [name for name in half.weights if name.startswith(f"{half.name}_norm")]
    for amount in (1.0, -1.0):
        moved = {name: half.weights[name] + np.float32(amount) for name in norms}
        yield (
            f"norm offset: the norms' weights are {amount:+g} off (1 + w or w)",
            replace(half, weights={**half.weights, **moved}),
        )
    ones = {name: np.ones_like(half.weights[name]) for name in norms}
    yield "the norms' weights are left out", replace(half, weights={**half.weights, **ones})
    yield "the norm is missing", replace(half, normed=False)
    if spec.residual_scale != 1:
        yield "the residual scale is lost", replace(half, spec=replace(spec, residual_scale=1.0))
    biases = [name for name in half.weights if name.endswith("_bias") and _half_of(name) == half.name]
    for name in biases:
        left = {key: value for key, value in half.weights.items() if key != name}
        yield f"the bias of {name.removesuffix('_bias')} is missing", replace(half, weights=left)
    yield from _of_attention(half) if half.name == "attention" else _of_mlp(half)


def _of_attention(half: HalfLayer) -> Iterator[tuple[str, HalfLayer]]:
    spec, layer = half.spec, half.layer
    if spec.qk_norm != "none":
        yield "the q/k norm is missing", replace(half, spec=replace(spec, qk_norm="none"))
    if layer.window is not None:
        yield "the sliding window is off", replace(half, layer=replace(layer, window=None))
        for window in (layer.window - 1, layer.window + 1):
            yield (
                f"the sliding window is {window}, not {layer.window}",
                replace(half, layer=replace(layer, window=window)),
            )
    for scale, what in ((1 / math.sqrt(spec.head_dim), "1/sqrt(head size)"), (1.0, "1")):
        if not math.isclose(scale, spec.attention_scale, rel_tol=1e-4):
            said = f"attention is scaled by {what}, not by {spec.attention_scale:.4g}"
            yield said, replace(half, spec=replace(spec, attention_scale=scale))
    if spec.attention_softcap is not None:
        yield "the attention's soft cap is lost", replace(half, spec=replace(spec, attention_softcap=None))
    if layer.rope is None:
        for kind in spec.ropes:
            yield "the layer has a rotary embedding and should not", replace(half, layer=replace(layer, rope=kind))
        return
    rope = spec.ropes[layer.rope]
    yield "rotary embedding is missing", replace(half, layer=replace(layer, rope=None))
    yield "rotary features are interleaved instead of split in halves", replace(half, interleaved=True)
    for other in set(spec.ropes) - {layer.rope}:
        yield f"rotary base: the layer has that of {other} layers", replace(half, layer=replace(layer, rope=other))
    own = _base(rope)
    for base in _BASES:
        if not math.isclose(base, own, rel_tol=1e-3):
            said = f"rotary base {base:g}, the checkpoint's is {own:g}"
            yield said, _with_rope(half, RopeSpec(_frequencies(base, rope.rotary_dim), 1.0))


def _of_mlp(half: HalfLayer) -> Iterator[tuple[str, HalfLayer]]:
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
    for activation in activations:
        if activation != half.spec.activation:
            said = f"the activation is {activation}, the checkpoint's is {half.spec.activation}"
            yield said, replace(half, spec=replace(half.spec, activation=activation))
    gate, up = np.split(half.weights["gate_up"], 2)
    yield "gate and up are exchanged", replace(half, weights={**half.weights, "gate_up": np.concatenate([up, gate])})


def _with_rope(half: HalfLayer, rope: RopeSpec) -> HalfLayer:
    assert half.layer.rope is not None
    return replace(half, spec=replace(half.spec, ropes={**half.spec.ropes, half.layer.rope: rope}))


def _base(rope: RopeSpec) -> float:
    """Theta, where frequencies are not scaled: the second frequency is theta^(-2 / rotary_dim)."""
    return float(rope.inv_freq[1] ** (-rope.rotary_dim / 2)) if len(rope.inv_freq) > 1 else 1.0


def _frequencies(base: float, dim: int) -> tuple[float, ...]:
    return tuple((1.0 / base ** (np.arange(0, dim, 2) / dim)).tolist())


def _half_of(name: str) -> HalfName:
    return "attention" if name.startswith(("qkv", "output")) else "mlp"


def _norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    return normed


def _rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    half = cos.shape[1]
    a, b = (
        (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    turned = a * cos - b * sin, b * cos + a * sin
    front = np.stack(turned, -1).reshape(*x.shape[:-1], -1) if interleaved else np.concatenate(turned, -1)
    return np.concatenate([front, x[..., 2 * half :]], axis=-1)


def _activated(x: Array, activation: Activation) -> Array:
    if activation == "silu":
        out: Array = x / (1 + np.exp(-x))
    elif activation == "gelu_tanh":
        out = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        out = x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return out


def _capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else (np.tanh(x / cap) * cap).astype(np.float32)
