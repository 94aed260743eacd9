"""Which tokens count: the rule by which tokens of low next-token entropy are left out.

Tokens whose next token is obvious look alike at every depth and would dilute the statistics. The rule is a quantile of
the entropies (the paper filters; q = 0.5 is ours) or an absolute value in nats.

A quantile over a stream seems to need a second look or storage for every token. Here positions are sampled uniformly
*before* the filter (see `sample`), and the threshold is the quantile of the sample's own entropies: one pass, memory
bounded by the sample, and an unbiased threshold. The price is that of S sampled positions only (1 - q) S are used. An
absolute value keeps whatever share of the sample lies above it.

Knows entropies only.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.errors import TooFewTokensError
from wavekit_engines.errors import MisuseError

LEAST_TOKENS = 4
"""Debiased CKA does not exist for fewer."""


@dataclass(frozen=True)
class FilterRule:
    """Drop tokens under a quantile of the entropies or under an absolute entropy; one of the two."""

    quantile: float | None = 0.5
    nats: float | None = None

    def __post_init__(self) -> None:
        """Refuse a rule that makes no sense."""
        if (self.quantile is None) == (self.nats is None):
            raise MisuseError("filter tokens by a quantile or by an entropy in nats, not by both")
        if self.quantile is not None and not 0.0 <= self.quantile < 1.0:
            raise MisuseError(f"the filter's quantile must be at least 0 and less than 1, got {self.quantile}")
        if self.nats is not None and not (math.isfinite(self.nats) and self.nats >= 0.0):
            raise MisuseError(f"the filter's entropy must be zero or positive, got {self.nats}")

    def threshold(self, entropies: NDArray[np.float64]) -> float:
        """Return the entropy in nats that a token must reach."""
        return self.nats if self.nats is not None else float(np.quantile(entropies, self.quantile or 0.0))


def keep_tokens(entropies: NDArray[np.float64], rule: FilterRule) -> tuple[NDArray[np.int64], float]:
    """Indices of the tokens that count, in order, and the threshold in nats.

    Raises:
        TooFewTokensError: fewer than 4 tokens are left.
    """
    if len(entropies) < LEAST_TOKENS:
        raise TooFewTokensError(
            f"only {len(entropies)} tokens were measured and the statistics need {LEAST_TOKENS}; "
            "give more prompts or longer answers"
        )
    threshold = rule.threshold(entropies)
    kept = np.flatnonzero(entropies >= threshold)
    if len(kept) < LEAST_TOKENS:
        raise TooFewTokensError(
            f"the entropy filter leaves {len(kept)} of {len(entropies)} tokens (threshold {threshold:.3g} nats) and "
            f"the statistics need {LEAST_TOKENS}; filter less or give more prompts"
        )
    return kept, threshold
