"""Whether drawn tokens come as often as the model's probabilities say: Pearson's chi-square test.

At a few positions of a text, tokens are drawn with many seeds, as texts are, from the engines' logits, and counted
against probabilities computed here in float64. Seeds are fixed, so the outcome is the same every time. A text that is
written with drafts draws the same tokens (see `lossless`), so this speaks for every way of writing.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit.verification.findings import Check
from wavekit.verification.passes import passes
from wavekit_engines.engine import Array

_SEEDS, _POSITIONS, _MOST_CELLS, _LEAST_EXPECTED = 1000, 3, 20, 5.0
_LEAST_CHANCE = 1e-5
"""A correct sampler fails one of 100,000 such tests."""

_SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 1.2, top-k 20": SamplingParams(temperature=1.2, top_k=20),
}


def check_distribution(decoder: Decoder, text: Sequence[int]) -> list[Check]:
    """Draw at the last few positions of a text, one check for each way to draw."""
    with passes(decoder, len(text)) as one:
        logits = one.logits(one.prompt(text, min(_POSITIONS, len(text))))
    return [_check(name, params, logits) for name, params in _SETTINGS.items()]


def _check(name: str, params: SamplingParams, logits: Array) -> Check:
    chances = []
    for position, row in enumerate(logits):
        expected = _probabilities(row, params)
        counts = np.zeros(len(row), np.int64)
        for seed in range(_SEEDS):
            counts[Sampler(replace(params, seed=seed), len(row)).choose(row, position)] += 1
        if counts[expected == 0].any():
            token = int(np.flatnonzero((expected == 0) & (counts > 0))[0])
            return Check("sampling", name, "FAIL", f"token {token} was drawn, which these settings leave out")
        chances.append(_chance(counts, expected))
    least = min(chances)
    if least < _LEAST_CHANCE:
        return Check(
            "sampling",
            name,
            "FAIL",
            f"tokens are not drawn as often as their probabilities say (chi-square, chance {least:.1g}): the sampler "
            "changes the model's distribution",
        )
    return Check("sampling", name, "pass", f"{_SEEDS} draws at {len(chances)} positions, least chance {least:.2g}")


def _probabilities(logits: Array, params: SamplingParams) -> Array:
    """Float64 [V]; see `SamplingParams`."""
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        kept = int(np.searchsorted(weights[order].cumsum(), params.top_p)) + 1
        weights[order[kept:]] = 0
        weights /= weights.sum()
    probabilities: Array = weights
    return probabilities


def _chance(counts: Array, expected: Array) -> float:
    """How likely counts this far from the expected are: the likeliest tokens a cell each, all others one more."""
    order = np.argsort(-expected)[:_MOST_CELLS]
    order = order[expected[order] * counts.sum() >= _LEAST_EXPECTED]
    observed, wanted = counts[order].astype(np.float64), expected[order] * counts.sum()
    rest = counts.sum() - wanted.sum()
    if rest >= _LEAST_EXPECTED:
        observed, wanted = np.append(observed, counts.sum() - observed.sum()), np.append(wanted, rest)
    if len(wanted) < 2:
        return 1.0
    return _upper_tail(float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1)


def _upper_tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic), by the cube-root approximation of Wilson and Hilferty (1931)."""
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))
