"""What each graph of a bundle computes, under the names of its inputs and outputs, for one sequence.

A graph here takes arrays that all have a row for each of something on their first axis: `feed` makes them of the bound
arrays, on the host, and a call computes outputs of the same kind from them, on the device. So a pass can be padded to a
fixed number of rows without a graph knowing it: see `engine`. The names are those of `graphs.stage_graph`,
`graphs.draft_graph` and `graphs.exit_graph`, whose code is not used.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)

from wavekit_engines.bundle import DraftInfo, ExitsInfo, Manifest, StageInfo
from wavekit_engines.decoder_spec import DecoderSpec, LayerSpec
from wavekit_engines.engine import Array
from wavekit_engines.torch_engine.layers import MLP, Attention, Cache, Heads, Layer, Linear, Norm, Pass, Tensor
from wavekit_engines.torch_engine.stored_weights import GraphWeights, StoredWeights

Arrays = Mapping[str, Array]
Tensors = Mapping[str, Tensor]

_ROWS = "rows"
_DRAFT = "draft"


class Graph(Protocol):
    """One graph of a bundle."""

    def feed(self, bound: Arrays) -> dict[str, Array]:
        """What goes to the device, from the arrays bound as inputs."""
        ...

    def __call__(self, fed: Tensors, caches: Mapping[str, Cache]) -> dict[str, Tensor]:
        """The outputs but the caches, which are written in place."""
        ...


class Stage:
    """Layers of the decoder, after the embedding in the first stage."""

    def __init__(self, manifest: Manifest, info: StageInfo, stored: StoredWeights) -> None:
        spec, weights = manifest.decoder, stored.of(info.graph)
        self._embedding = weights.table("embedding", spec.hidden_size) if info.first == 0 else None
        self._scale = spec.embedding_scale
        self._boundaries = info.boundaries
        self._layers = {index: Layer(weights, spec, index) for index in range(info.first, info.last)}
        self._inputs = _PassInputs(spec.layers[info.first : info.last])

    def feed(self, bound: Arrays) -> dict[str, Array]:
        """Token ids or hidden states, and what attention needs."""
        name = "hidden" if self._embedding is None else "token_ids"
        return {name: bound[name][0], **self._inputs.feed(bound)}

    def __call__(self, fed: Tensors, caches: Mapping[str, Cache]) -> dict[str, Tensor]:
        """The boundaries put out, [S, H]."""
        x = fed["hidden"] if self._embedding is None else _embedded(self._embedding, fed["token_ids"], self._scale)
        now, found = self._inputs.on_device(fed), dict[str, Tensor]()
        for index, layer in self._layers.items():
            if index in self._boundaries:
                found[f"boundary_{index}"] = x
            x = layer(x, now, caches[str(index)])
        return {**found, f"boundary_{max(self._layers) + 1}": x}


class _PassInputs:
    """The inputs that all layers of a graph share."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._ropes = sorted({layer.rope for layer in layers if layer.rope is not None})
        self._masks = {layer.window: "mask" if layer.window is None else f"mask_{layer.window}" for layer in layers}

    def feed(self, bound: Arrays) -> dict[str, Array]:
        positions = bound["positions"][0]
        first = int(bound["last_rows"][0]) - len(positions) + 1
        fed: dict[str, Array] = {_ROWS: np.arange(first, first + len(positions))}
        for rope in self._ropes:
            fed |= {f"{rope}_{part}": bound[f"rope_{rope}_{part}"][positions] for part in ("cos", "sin")}
        return fed | {name: bound[name][0, 0] for name in self._masks.values()}

    def on_device(self, fed: Tensors) -> Pass:
        rows, masks = fed[_ROWS], dict[int | None, Tensor]()
        for window, name in self._masks.items():
            given = fed[name]
            earlier = torch.arange(given.shape[1], device=rows.device) <= rows[:, None]
            masks[window] = given.masked_fill(~earlier, -torch.inf)
        return Pass(rows, masks, {rope: (fed[f"{rope}_cos"], fed[f"{rope}_sin"]) for rope in self._ropes})


class Head:
    """The final norm and the head: logits, or with ``best`` only each row's best token.

    The token of a row whose logits are not all finite numbers is -1, as that of a row which is left open.
    """

    def __init__(self, manifest: Manifest, stored: StoredWeights, best: bool) -> None:
        self._spec, weights = manifest.decoder, stored.of(manifest.head)
        self._norm = Norm(weights, "final_norm", self._spec.norm_eps)
        self._table = _head_table(weights, self._spec)
        self._best = best

    def feed(self, bound: Arrays) -> dict[str, Array]:
        """Rows of the last boundary."""
        return {"hidden": bound["hidden"]}

    def __call__(self, fed: Tensors, caches: Mapping[str, Cache]) -> dict[str, Tensor]:
        """Logits float32 [n, V], or tokens int64 [n]."""
        logits = _logits(self._norm(fed["hidden"]), self._table, self._spec)
        if not self._best:
            return {"logits": logits}
        return {"tokens": logits.argmax(-1).masked_fill(~logits.isfinite().all(-1), -1)}


class Exit:
    """An early exit: see `exit_spec`."""

    def __init__(self, manifest: Manifest, info: ExitsInfo, boundary: int, stored: StoredWeights) -> None:
        spec, self._target, self._top_k = info.spec, manifest.decoder, info.top_k
        weights = stored.of(info.graphs[spec.boundaries.index(boundary)])
        name = f"exits.{boundary}"
        self._adapter: tuple[Norm, Linear, Linear] | None = None
        if spec.rank:
            inner, outer = Linear(weights, f"{name}.A", spec.hidden_size), Linear(weights, f"{name}.B", spec.rank)
            self._adapter = Norm(weights, f"{name}.norm", spec.norm_eps), inner, outer
        self._norm = Norm(weights, "final_norm", self._target.norm_eps)
        own = weights.has("exits.head")
        self._table = weights.table("exits.head", spec.hidden_size) if own else _head_table(weights, self._target)
        self._ids = weights.vector("exits.target_ids") if weights.has("exits.target_ids") else None

    def feed(self, bound: Arrays) -> dict[str, Array]:
        """Rows of the exit's boundary."""
        return {"hidden": bound["hidden"]}

    def __call__(self, fed: Tensors, caches: Mapping[str, Cache]) -> dict[str, Tensor]:
        """The best tokens and their log-probabilities, [n, k]."""
        x = fed["hidden"]
        if self._adapter is not None:
            norm, inner, outer = self._adapter
            x = x + outer(F.silu(inner(norm(x))))
        return _best(_logits(self._norm(x), self._table, self._target), self._top_k, self._ids)


class DraftHead:
    """A draft head: see `draft_spec`."""

    def __init__(self, manifest: Manifest, info: DraftInfo, stored: StoredWeights) -> None:
        spec, weights = info.spec, stored.of(info.graph)
        self._spec, self._top_k = spec, info.top_k
        width, eps, taps = spec.hidden_size, spec.norm_eps, len(spec.boundaries)

        def norm(role: str) -> Norm:
            return Norm(weights, f"draft.{role}", eps)

        own = weights.has("draft.embedding")
        self._embedding = weights.table("draft.embedding" if own else "embedding", width)
        self._fc = Linear(weights, "draft.fc", taps * width)
        self._joint_norm = norm("fc_norm") if spec.fc_norm == "joint" else None
        self._tap_norms = [norm(f"fc_norm.{tap}") for tap in range(taps)] if spec.fc_norm == "each" else None
        self._embedding_norm, self._hidden_norm = norm("embedding_norm"), norm("hidden_norm")
        self._mlp_norm, self._norm = norm("mlp_norm"), norm("norm")
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5)
        layer = LayerSpec(rope=_DRAFT, window=None)
        self._attention = Attention(weights, "draft", 2 * width, heads, layer)
        self._mlp = MLP(weights, "draft", spec)
        self._table, self._ids = weights.table("draft.head", width), weights.vector("draft.target_ids")
        self._inputs = _PassInputs([layer])

    def feed(self, bound: Arrays) -> dict[str, Array]:
        """Taps [P, m * H], states fed back [Q, H], and for all P + Q rows what goes with them."""
        given = {name: bound[name][0] for name in ("taps", "hidden", "token_ids")}
        return {**given, "head_rows": bound["head_rows"], **self._inputs.feed(bound)}

    def __call__(self, fed: Tensors, caches: Mapping[str, Cache]) -> dict[str, Tensor]:
        """States to feed back [S, H]; the best tokens of the rows asked for and their log-probabilities, [n, k]."""
        state = torch.cat([self._fc(self._normed_taps(fed["taps"])), fed["hidden"]])
        normed = self._hidden_norm(state)
        embedded = self._embedding_norm(_embedded(self._embedding, fed["token_ids"], self._spec.embedding_scale))
        y = normed if self._spec.norm_before_residual else state
        y = y + self._attention(torch.cat([embedded, normed], -1), self._inputs.on_device(fed), caches[_DRAFT])
        y = y + self._mlp(self._mlp_norm(y))
        out = self._norm(y)
        scores = F.linear(out[fed["head_rows"]], self._table).float()
        return {"fed_back": out if self._spec.norm_output else y, **_best(scores, self._top_k, self._ids)}

    def _normed_taps(self, taps: Tensor) -> Tensor:
        if self._joint_norm is not None:
            return self._joint_norm(taps)
        if self._tap_norms is None:
            return taps
        parts = torch.split(taps, self._spec.hidden_size, -1)
        return torch.cat([norm(part) for norm, part in zip(self._tap_norms, parts, strict=True)], -1)


def _embedded(table: Tensor, token_ids: Tensor, scale: float) -> Tensor:
    rows = table[token_ids]
    return rows if scale == 1.0 else rows * scale


def _head_table(weights: GraphWeights, spec: DecoderSpec) -> Tensor:
    return weights.table("embedding" if spec.tied_head else "head", spec.hidden_size)


def _logits(x: Tensor, table: Tensor, spec: DecoderSpec) -> Tensor:
    """Logits float32 [n, rows of the table] of normed rows."""
    logits = F.linear(x, table).float() * spec.logit_scale
    return logits if spec.logit_softcap is None else torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap


def _best(scores: Tensor, top_k: int, ids: Tensor | None) -> dict[str, Tensor]:
    """The best columns of scores float32 [n, V] as tokens, best first, and their log-probabilities."""
    logprobs, tokens = torch.log_softmax(scores, -1).topk(top_k, -1)
    return {"top_tokens": tokens if ids is None else ids[tokens], "top_logprobs": logprobs}
