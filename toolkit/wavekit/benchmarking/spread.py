"""Medians, quartiles and percentiles, by linear interpolation between the sorted values."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles on both sides of it, of ``count`` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are no values."""
        if not values:
            return None
        low, middle, high = (percentile(values, share) for share in (25, 50, 75))
        return cls(middle, low, high, len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie."""
    return float(np.percentile(np.array(values, np.float64), percent))
