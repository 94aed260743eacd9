"""The EAGLE-3 head as a torch module, run the way it is trained: all rows of a text at once, several steps ahead.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): step 0 sees the target's fused states; step k feeds the
head's own state of step k - 1 back, with the embedding one token further on. In decoding, row t of step k would follow
the true rows up to t and the k - 1 drafted ones between; so its query sees the keys of step 0 causally up to t, and of
every later step only its own row. Rotary positions are t + k.

Weights are named as in `DraftSpec.weight_shapes`. Knows no data, no loss and no optimizer.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.rope import rope_tables

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class DraftHead(nn.Module):
    """A draft head; parameters in the order and under the names of `DraftSpec.weight_shapes`."""

    def __init__(self, spec: DraftSpec, longest: int) -> None:
        """Make room for texts of ``longest`` tokens; weights are zeros until `load`."""
        super().__init__()
        self.spec = spec
        # Dots are not allowed in parameter names.
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(torch.zeros(shape)) for name, shape in spec.weight_shapes().items()}
        )
        for part, table in zip(("cos", "sin"), rope_tables(spec.rope, longest, False), strict=True):
            self.register_buffer(part, torch.tensor(table, dtype=torch.float32), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor

    def load(self, draft: Draft) -> None:
        """Take over the weights of a draft of the same spec."""
        with torch.no_grad():
            for name, values in draft.weights.items():
                self.weights[name.replace(".", "_")].copy_(torch.from_numpy(values.copy()))

    def weight_arrays(self) -> dict[str, torch.Tensor]:
        """The weights by role, float32 on the CPU."""
        return {name: self._weight(name).detach().float().cpu() for name in self.spec.weight_shapes()}

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """The fused state [..., H] of tapped states [..., m * H], shallow to deep."""
        if self.spec.fc_norm == "joint":
            taps = self._norm(taps, "fc_norm")
        elif self.spec.fc_norm == "each":
            parts = torch.split(taps, self.spec.hidden_size, dim=-1)
            taps = torch.cat([self._norm(part, f"fc_norm.{tap}") for tap, part in enumerate(parts)], dim=-1)
        return functional.linear(taps, self._weight("fc"))

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        """Scores [..., D] over the draft vocabulary of states as `steps` yields them."""
        normed = state if self.spec.norm_output else self._norm(state, "norm")
        return functional.linear(normed, self._weight("head"))

    def steps(
        self, taps: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor, count: int
    ) -> Iterator[torch.Tensor]:
        """Run ``count`` steps ahead of some rows of each text.

        Args:
            taps: [B, L, m * H]: the target's states of tokens 0..L-1; texts padded on the right.
            embedded: [B, L + count, H]: the target's embeddings of tokens 1..L+count, padded likewise.
            rows: int64 [B, R]: the rows to run ahead of, each in 0..L-1; the others only give keys to step 0.
            count: steps.

        Yields:
            The state [B, R, H] after each step, to be fed back and scored: row t of step k predicts token t + 2 + k.
        """
        fused = self.fuse(taps)
        every = torch.arange(taps.shape[1], device=taps.device).expand(taps.shape[:2])
        length = taps.shape[1]
        first = self._attention_input(fused, embedded[:, :length])
        keys, values = self._keys_values(first, every)
        visible = every[:, None, :] <= rows[:, :, None]
        state = _pick(fused, rows)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(count):
            x = _pick(first, rows) if step == 0 else self._attention_input(state, _pick(embedded, rows + step))
            if step > 0:
                own.append(self._keys_values(x, rows + step))
            query = self._rotated(self._linear(x, "q"), rows + step, self.spec.num_heads)
            attended = _attend(query, keys, values, visible, own)
            residual = self._norm(state, "hidden_norm") if self.spec.norm_before_residual else state
            state = self._finish(residual + self._linear(attended, "o"))
            yield state

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x, "mlp_norm")
        inner = _ACTIVATIONS[self.spec.activation](self._linear(normed, "gate")) * self._linear(normed, "up")
        x = x + self._linear(inner, "down")
        return self._norm(x, "norm") if self.spec.norm_output else x

    def _attention_input(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._norm(embedded, "embedding_norm"), self._norm(state, "hidden_norm")], dim=-1)

    def _keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, kv_heads, rows, head_dim]."""
        heads = self.spec.num_kv_heads
        value = _by_head(self._linear(x, "v"), heads)
        return self._rotated(self._linear(x, "k"), positions, heads), value

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        """Heads [B, heads, rows, head_dim] with their leading features rotated, half-split layout."""
        x = _by_head(x, heads)
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def _linear(self, x: torch.Tensor, role: str) -> torch.Tensor:
        bias = self.weights.get(f"{role}_bias", None)
        return functional.linear(x, self._weight(role), bias)

    def _norm(self, x: torch.Tensor, role: str) -> torch.Tensor:
        """RMS norm, in the weights' float32 under autocast too."""
        weight = self._weight(role)
        return functional.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, self.spec.norm_eps).to(x.dtype)

    def _weight(self, role: str) -> torch.Tensor:
        weight: torch.Tensor = self.weights[role.replace(".", "_")]
        return weight


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Features [B, rows, heads * d] as [B, heads, rows, d]."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def _pick(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows [B, R] of x [B, L, H]: [B, R, H]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention of [B, heads, R, d] over all rows of step 0 that are visible [B, R, L], and its own row of later steps.

    Query heads share key heads in consecutive groups. Returns [B, R, heads * d].
    """
    batch, heads, rows, size = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, rows, size) * size**-0.5
    scores = grouped @ keys[:, :, None].transpose(-1, -2)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    later = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat([scores, *later], dim=-1).softmax(-1)
    attended = weights[..., : keys.shape[2]] @ values[:, :, None]
    for index, (_, value) in enumerate(own, keys.shape[2]):
        attended = attended + weights[..., index, None] * value[:, :, None]
    return attended.reshape(batch, heads, rows, size).transpose(1, 2).flatten(-2)
