"""A draft head in plain torch, written from the docstring of `draft_spec` and nothing else, without a cache: every row
that ever was is computed again at every step.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from wavekit_engines.draft_spec import Draft

ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


class TorchHead:
    """The head beside a target's embedding table [V, H]."""

    def __init__(self, draft: Draft, embedding: np.ndarray) -> None:
        self.spec = draft.spec
        self.weights = {role: torch.from_numpy(np.array(weight)) for role, weight in draft.weights.items()}
        self.embedding = torch.from_numpy(embedding if draft.embedding is None else draft.embedding)
        self.target_ids = [draft_id + int(offset) for draft_id, offset in enumerate(draft.d2t)]

    def fused(self, taps: np.ndarray) -> np.ndarray:
        """States [P, H] from the target's [P, m * H]."""
        each = torch.from_numpy(taps).split(self.spec.hidden_size, dim=-1)
        if self.spec.fc_norm == "each":
            each = [self._norm(state, f"fc_norm.{tap}") for tap, state in enumerate(each)]
        joined = torch.cat(list(each), -1)
        if self.spec.fc_norm == "joint":
            joined = self._norm(joined, "fc_norm")
        return (joined @ self.weights["fc"].T).numpy()

    def run(
        self, states: np.ndarray, tokens: Sequence[int], positions: Sequence[int], seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What every row feeds back [S, H], and its log-probabilities [S, D].

        ``states`` [S, H] are fused or fed back, ``tokens`` those after each row's own, ``positions`` the rows' own, and
        ``seen`` [S, S] says which rows each attends to.
        """
        spec, h = self.spec, torch.from_numpy(states)
        embedded = self.embedding[list(tokens)] * spec.embedding_scale
        normed = self._norm(h, "hidden_norm")
        x = torch.cat([self._norm(embedded, "embedding_norm"), normed], -1)
        attended = self._linear(self._attention(x, positions, torch.from_numpy(seen)), "o")
        y = (normed if spec.norm_before_residual else h) + attended
        inner = self._norm(y, "mlp_norm")
        gated = ACTIVATIONS[spec.activation](self._linear(inner, "gate")) * self._linear(inner, "up")
        y = y + self._linear(gated, "down")
        out = self._norm(y, "norm")
        logprobs = torch.log_softmax(out @ self.weights["head"].T, -1)
        return (out if spec.norm_output else y).numpy(), logprobs.numpy()

    def _attention(self, x: torch.Tensor, positions: Sequence[int], seen: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        q, k, v = (self._linear(x, part).reshape(len(x), -1, spec.head_dim) for part in "qkv")
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        heads = []
        for head in range(spec.num_heads):
            of = head // (spec.num_heads // spec.num_kv_heads)
            scores = q[:, head] @ k[:, of].T / math.sqrt(spec.head_dim)
            heads.append(torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v[:, of])
        return torch.cat(heads, -1)

    def _rotated(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        rope = self.spec.rope
        angles = torch.tensor(positions)[:, None, None] * torch.tensor(rope.inv_freq)
        cos, sin = angles.cos() * rope.factor, angles.sin() * rope.factor
        half = len(rope.inv_freq)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _linear(self, x: torch.Tensor, role: str) -> torch.Tensor:
        return x @ self.weights[role].T + self.weights.get(f"{role}_bias", torch.zeros(1))

    def _norm(self, x: torch.Tensor, role: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps).sqrt() * self.weights[role]
