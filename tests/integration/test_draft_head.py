"""The training-time test against drafting step by step, in plain loops written from the formulas."""

import dataclasses

import numpy as np
import pytest
import torch

from wavekit_calibration.training.draft_head import DraftHead
from wavekit_engines.decoder_spec import RopeSpec
from wavekit_engines.draft_spec import DraftSpec

SPEC = DraftSpec(
    boundaries=(1, 2, 4),
    target_layers=5,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=50,
    draft_vocab_size=17,
    max_positions=64,
    norm_eps=1e-5,
    rope=RopeSpec((1.0, 0.3, 0.05)),
)
VARIANTS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "fc_norm joint": {"fc_norm": "joint"},
    "fc_norm each": {"fc_norm": "each"},
    "norm_output": {"norm_output": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "partial rotary": {"rope": RopeSpec((1.0, 0.2), factor=0.7)},
    "gelu": {"activation": "gelu_tanh"},
    "one tap": {"boundaries": (3,)},
}


def random_head(spec: DraftSpec, seed: int = 0) -> DraftHead:
    head = DraftHead(spec, 64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return head.double()


class StepByStep:
    """A head that takes one row at a time and keeps every key it has seen: how a decoder runs it."""

    def __init__(self, spec: DraftSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec, self.w = spec, {name: value.double() for name, value in weights.items()}

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.spec.norm_eps) * weight

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        parts = list(taps.split(self.spec.hidden_size))
        if self.spec.fc_norm == "each":
            parts = [self.norm(part, self.w[f"fc_norm.{i}"]) for i, part in enumerate(parts)]
        joined = torch.cat(parts)
        if self.spec.fc_norm == "joint":
            joined = self.norm(joined, self.w["fc_norm"])
        return self.w["fc"] @ joined

    def linear(self, role: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[role] @ x + self.w.get(f"{role}_bias", torch.zeros(()).double())

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        out, half = x.clone(), len(self.spec.rope.inv_freq)
        for i, frequency in enumerate(self.spec.rope.inv_freq):
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            cos, sin = cos * self.spec.rope.factor, sin * self.spec.rope.factor
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def row(
        self, state: torch.Tensor, embedded: torch.Tensor, position: int, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Append one row to the cache and return its new state."""
        spec = self.spec
        x = torch.cat([self.norm(embedded, self.w["embedding_norm"]), self.norm(state, self.w["hidden_norm"])])
        heads = self.linear("q", x).split(spec.head_dim)
        keys = torch.stack([self.rotate(k, position) for k in self.linear("k", x).split(spec.head_dim)])
        cache.append((keys, torch.stack(self.linear("v", x).split(spec.head_dim))))
        attended = []
        for number, query in enumerate(heads):
            group = number // (spec.num_heads // spec.num_kv_heads)
            q = self.rotate(query, position)
            scores = torch.stack([q @ k[group] for k, _ in cache]) / spec.head_dim**0.5
            attended.append(sum(p * v[group] for p, (_, v) in zip(scores.softmax(0), cache, strict=True)))
        residual = self.norm(state, self.w["hidden_norm"]) if spec.norm_before_residual else state
        x = residual + self.linear("o", torch.cat(attended))
        normed = self.norm(x, self.w["mlp_norm"])
        gate = self.linear("gate", normed)
        gate = torch.nn.functional.silu(gate) if spec.activation == "silu" else torch.nn.functional.gelu(
            gate, approximate="tanh"
        )  # fmt: skip
        x = x + self.linear("down", gate * self.linear("up", normed))
        return self.norm(x, self.w["norm"]) if spec.norm_output else x

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        return self.w["head"] @ (state if self.spec.norm_output else self.norm(state, self.w["norm"]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_ahead_equal_drafting_row_by_row(variant: str) -> None:
    spec = dataclasses.replace(SPEC, **VARIANTS[variant])
    head = random_head(spec)
    length, steps = 7, 4
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(1, length, len(spec.boundaries) * spec.hidden_size, generator=generator).double()
    embedded = torch.randn(1, length + steps, spec.hidden_size, generator=generator).double()
    rows = torch.arange(2, length)[None]
    found = list(head.steps(taps, embedded, rows, steps))
    reference = StepByStep(spec, {name: head.weights[name.replace(".", "_")] for name in spec.weight_shapes()})
    for index, row in enumerate(rows[0].tolist()):
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        for earlier in range(row + 1):
            state = reference.row(reference.fuse(taps[0, earlier]), embedded[0, earlier], earlier, cache)
        for step in range(steps):
            if step > 0:
                state = reference.row(state, embedded[0, row + step], row + step, cache)
            torch.testing.assert_close(found[step][0, index], state, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                head.scores(found[step])[0, index], reference.scores(state), rtol=1e-5, atol=1e-5
            )


def test_padding_and_neighbours_change_nothing() -> None:
    head = random_head(SPEC)
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(2, 9, 36, generator=generator).double()
    embedded = torch.randn(2, 12, 12, generator=generator).double()
    rows = torch.tensor([[3, 4, 5], [1, 2, 0]])
    together = list(head.steps(taps, embedded, rows, 3))
    alone = list(head.steps(taps[:1, :6], embedded[:1, :9], rows[:1], 3))
    for step in range(3):
        torch.testing.assert_close(together[step][0], alone[step][0])
