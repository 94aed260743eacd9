"""A decoder in plain numpy, written from the docstrings of `DecoderSpec` and `DecoderWeights` and nothing else.

The reference that shows a spec to be complete: what it computes must equal what transformers computes.
"""

import math

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.decoder_spec import DecoderSpec, LayerSpec
from wavekit_engines.rope import rope_tables
from wavekit_engines.weights import DecoderWeights

Array = NDArray[np.float32]


def logits(spec: DecoderSpec, weights: DecoderWeights, token_ids: list[int]) -> Array:
    """Logits ``[len(token_ids), vocab_size]`` after each token of a sequence."""
    x = weights["embedding"].read()[token_ids] * np.float32(spec.embedding_scale)
    for number, layer in enumerate(spec.layers):
        here = {role: weights.layer(number, role).read() for role in weights.layer_roles()}
        x = _sublayer(spec, here, x, "attention", lambda y, layer=layer, here=here: _attention(spec, layer, here, y))
        x = _sublayer(spec, here, x, "mlp", lambda y, here=here: _mlp(spec, here, y))
    out = _norm(spec, x, weights["final_norm"].read()) @ weights["head"].read().T * np.float32(spec.logit_scale)
    return _softcap(out, spec.logit_softcap)


def _sublayer(spec, here, x, kind, compute):
    y = x
    if spec.norm_placement in ("pre", "sandwich"):
        y = _norm(spec, y, here[f"{kind}_norm_in"])
    y = compute(y)
    if spec.norm_placement in ("post", "sandwich"):
        y = _norm(spec, y, here[f"{kind}_norm_out"])
    return x + np.float32(spec.residual_scale) * y


def _attention(spec: DecoderSpec, layer: LayerSpec, here: dict[str, Array], x: Array) -> Array:
    length, query, kv = len(x), spec.query_size, spec.kv_size
    qkv = x @ here["qkv"].T + here.get("qkv_bias", 0)
    q, k, v = qkv[:, :query], qkv[:, query : query + kv], qkv[:, query + kv :]
    if spec.qk_norm == "full":
        q, k = _norm(spec, q, here["q_norm"]), _norm(spec, k, here["k_norm"])
    q, k, v = (part.reshape(length, -1, spec.head_dim).transpose(1, 0, 2) for part in (q, k, v))
    if spec.qk_norm == "per_head":
        q, k = _norm(spec, q, here["q_norm"]), _norm(spec, k, here["k_norm"])
    if layer.rope is not None:
        rope = spec.ropes[layer.rope]
        cos, sin = rope_tables(rope, length, long=rope.switch_length is not None and length > rope.switch_length)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    group = spec.num_heads // spec.num_kv_heads
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = _softcap(q @ k.transpose(0, 2, 1) * np.float32(spec.attention_scale), spec.attention_softcap)
    distance = np.arange(length)[:, None] - np.arange(length)
    scores = np.where((distance >= 0) & (distance < (layer.window or length)), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ v
    return mixed.transpose(1, 0, 2).reshape(length, query) @ here["output"].T + here.get("output_bias", 0)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _mlp(spec: DecoderSpec, here: dict[str, Array], x: Array) -> Array:
    gate, up = np.split(x @ here["gate_up"].T + here.get("gate_up_bias", 0), 2, axis=1)
    return (_activation(spec, gate) * up).astype(np.float32) @ here["down"].T + here.get("down_bias", 0)


def _activation(spec: DecoderSpec, x: Array) -> Array:
    if spec.activation == "silu":
        return x / (1 + np.exp(-x))
    if spec.activation == "gelu_tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _norm(spec: DecoderSpec, x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(spec.norm_eps)) * weight


def _softcap(x: Array, cap: float | None) -> Array:
    return x if cap is None else (np.tanh(x / cap) * cap).astype(np.float32)
