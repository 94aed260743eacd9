"""The parts that decoders, drafts and exits are made of, for the rows of one sequence.

Rows are [S, features]. Norms, soft caps and their sums are computed in float32, products in the dtype of their weights.
Which row sees which is said by masks; nothing here assumes that a cache row holds the position of the same number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from wavekit_engines.decoder_spec import Activation, DecoderSpec, LayerSpec
from wavekit_engines.draft_spec import DraftSpec
from wavekit_engines.torch_engine.stored_weights import GraphWeights

Tensor = torch.Tensor
Cache = tuple[Tensor, Tensor]
"""Keys and values of a layer, [kv_heads, capacity, head_dim]."""

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Pass:
    """What all layers of a pass share.

    ``rows`` int64 [S]: the cache rows that new rows go to. ``masks`` by window, [S, T]: added to the scores of the
    first T cache rows. ``rope`` by kind: cosines and sines of each row's position, [S, rotary_dim / 2].
    """

    rows: Tensor
    masks: Mapping[int | None, Tensor]
    rope: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Heads:
    """The shape of an attention, and how its scores are made."""

    count: int
    kv_count: int
    size: int
    scale: float
    softcap: float | None = None


class Norm:
    """RMS norm over the last axis."""

    def __init__(self, weights: GraphWeights, name: str, eps: float) -> None:
        self._weight, self._eps = weights.vector(name).float(), eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normed rows."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * inverse * self._weight).to(x.dtype)


class Linear:
    """A product with a stored matrix, and its bias if it has one."""

    def __init__(self, weights: GraphWeights, name: str, width: int) -> None:
        self._matrix = weights.matrix(name, width)
        self._bias = weights.vector(f"{name}_bias") if weights.has(f"{name}_bias") else None

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [S, width] times the matrix."""
        return F.linear(x, self._matrix, self._bias)


class Attention:
    """Projections, rotation, the cache and what rows attend to."""

    def __init__(self, weights: GraphWeights, name: str, width: int, heads: Heads, layer: LayerSpec) -> None:
        self._heads, self._layer = heads, layer
        self._qkv = Linear(weights, f"{name}.qkv", width)
        self._output = Linear(weights, f"{name}.output", heads.count * heads.size)
        self._norms: tuple[Norm, Norm] | None = None
        self._norms_by_head = False

    def with_norms(self, query: Norm, key: Norm, by_head: bool) -> "Attention":
        """Norm q and k, over each head or over all of them at once."""
        self._norms, self._norms_by_head = (query, key), by_head
        return self

    def __call__(self, x: Tensor, now: Pass, cache: Cache) -> Tensor:
        """What rows ``x`` attend to, [S, H]; their keys and values are put into the cache."""
        heads = self._heads
        sizes = [heads.count * heads.size, heads.kv_count * heads.size, heads.kv_count * heads.size]
        query, key, value = torch.split(self._qkv(x), sizes, -1)
        if self._norms is not None:
            query, key = (
                norm(_apart(part, heads)).flatten(1) if self._norms_by_head else norm(part)
                for norm, part in zip(self._norms, (query, key), strict=True)
            )
        query, key, value = (_apart(part, heads) for part in (query, key, value))
        if self._layer.rope is not None:
            cosines, sines = now.rope[self._layer.rope]
            query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
        for rows, new in zip(cache, (key, value), strict=True):
            rows.index_copy_(1, now.rows, new.transpose(0, 1))
        return self._output(attended(query, cache, now.masks[self._layer.window], heads))


def _apart(x: Tensor, heads: Heads) -> Tensor:
    """Features [S, heads * D] as [S, heads, D]."""
    return x.reshape(len(x), -1, heads.size)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The leading features of heads [S, heads, D] turned, the halves of them being the two coordinates."""
    half = cosines.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], -1)


def attended(query: Tensor, cache: Cache, mask: Tensor, heads: Heads) -> Tensor:
    """What queries [S, heads, D] find in the cache rows that a mask [S, T] covers, [S, heads * D].

    The queries that share a key/value head are rows of one attention, so that keys and values are not repeated.
    """
    count, group = len(query), heads.count // heads.kv_count
    keys, values = (rows[None, :, : mask.shape[1]] for rows in cache)
    query = query.reshape(count, heads.kv_count, group, heads.size).permute(1, 2, 0, 3).flatten(1, 2)[None]
    mask = mask.expand(group, -1, -1).flatten(0, 1)[None, None]
    if heads.softcap is None:
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=heads.scale)
    else:
        scores = (query.float() @ keys.float().transpose(-1, -2)) * (heads.scale / heads.softcap)
        shares = torch.softmax(torch.tanh(scores) * heads.softcap + mask.float(), -1)
        found = (shares @ values.float()).to(query.dtype)
    return found.reshape(heads.kv_count, group, count, heads.size).permute(2, 0, 1, 3).flatten(1)


class MLP:
    """The gated MLP."""

    def __init__(self, weights: GraphWeights, name: str, spec: DecoderSpec | DraftSpec) -> None:
        self._gate_up = Linear(weights, f"{name}.gate_up", spec.hidden_size)
        self._down = Linear(weights, f"{name}.down", spec.intermediate_size)
        self._activation = ACTIVATIONS[spec.activation]

    def __call__(self, x: Tensor) -> Tensor:
        """What rows [S, H] become."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(self._activation(gate) * up)


class Layer:
    """One layer of a decoder."""

    def __init__(self, weights: GraphWeights, spec: DecoderSpec, index: int) -> None:
        name = f"layers.{index}"
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale, spec.attention_softcap)
        self._scale = spec.residual_scale
        self._attention = Attention(weights, name, spec.hidden_size, heads, spec.layers[index])
        if spec.qk_norm != "none":
            query, key = (Norm(weights, f"{name}.{part}_norm", spec.norm_eps) for part in "qk")
            self._attention.with_norms(query, key, spec.qk_norm == "per_head")
        self._mlp = MLP(weights, name, spec)
        self._before = spec.norm_placement in ("pre", "sandwich")
        self._after = spec.norm_placement in ("post", "sandwich")
        places = ["in"] * self._before + ["out"] * self._after
        self._norms = {
            f"{part}_{place}": Norm(weights, f"{name}.{part}_norm_{place}", spec.norm_eps)
            for part in ("attention", "mlp")
            for place in places
        }

    def __call__(self, x: Tensor, now: Pass, cache: Cache) -> Tensor:
        """The residual stream [S, H] after this layer."""
        x = x + self._update(x, "attention", lambda y: self._attention(y, now, cache))
        return x + self._update(x, "mlp", self._mlp)

    def _update(self, x: Tensor, part: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
        y = compute(self._norms[f"{part}_in"](x) if self._before else x)
        y = self._norms[f"{part}_out"](y) if self._after else y
        return y if self._scale == 1.0 else y * self._scale
