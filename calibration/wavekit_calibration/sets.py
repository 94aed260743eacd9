"""Sets of boundaries and what is said about them: plain data for searches, results and reports."""

from dataclasses import dataclass

BoundarySet = tuple[int, ...]
"""Boundary numbers, shallow to deep."""

ROUNDING = 6
"""Decimals at which two entropies count as tied; float32 spectra differ from float64 ones near the seventh."""


@dataclass(frozen=True)
class ScoredSet:
    """A set of boundaries and its entropy in nats."""

    boundaries: BoundarySet
    score: float


@dataclass(frozen=True)
class Lead:
    """How far the chosen set's entropy lies above another's, in nats, with a 95 % interval.

    The interval is the difference over all tokens -+ 1.96 standard deviations of the paired difference over resamples.
    """

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class SetRow:
    """One line of the table of sets."""

    names: tuple[str, ...]
    """Every search or rule that leads to this set."""
    boundaries: BoundarySet
    score: float
    standard_error: float | None
    """None where there was only one sequence to resample."""
    wins: float | None
    """Share of the resamples in which it is best of its size; None for another size than the chosen one."""
    lead: Lead | None
    """Of the chosen set over this one; None for the chosen set itself."""


@dataclass(frozen=True)
class BeamCheck:
    """The beam against exhaustive search over all sets of the size."""

    alpha: float
    sets: int
    best: BoundarySet
    gap: float
    """Best score of all minus the beam's best, in nats; 0 when the beam finds the best set."""
    share_below: dict[str, float]
    """For named sets of the size: the share of all sets that score lower."""
