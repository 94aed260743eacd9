"""The choice of boundaries: all searches on one set of statistics, side by side, with their uncertainty.

Everything ends in one table of sets: what ELSI and ELSI-C chose, the runners-up of the beam, the rules in use and the
user's own sets, each with its entropy, its standard error over the sequences, how often it wins among the sets of the
chosen size, and its difference to the chosen set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.bootstrap import Bootstrap, bootstrap_sets
from wavekit_calibration.compartments import segment
from wavekit_calibration.entropy import PurityScorer
from wavekit_calibration.measure import Progress
from wavekit_calibration.selection import (
    Scorer,
    baseline_sets,
    beam_search,
    check_size,
    default_candidates,
    exhaustive_search,
    ranked,
    set_count,
)
from wavekit_calibration.sets import ROUNDING, BeamCheck, BoundarySet, Lead, ScoredSet, SetRow
from wavekit_calibration.settings import SelectSettings
from wavekit_calibration.statistics import Statistics
from wavekit_engines.errors import MisuseError

CHEAP_SETS = 500
"""Exhaustive search by eigenvalues is made unasked up to so many sets."""
CHEAP_PURITY_SETS = 200_000
"""The same for alpha = 2, where a set costs microseconds."""
_RUNNERS_UP = 4


@dataclass(frozen=True)
class Choice:
    """Which boundaries to tap, and everything the decision rests on."""

    boundaries: BoundarySet
    by_size: tuple[ScoredSet, ...]
    """The best set of every size 1..m."""
    compartments: tuple[tuple[int, int], ...]
    """First and last boundary of each."""
    compartment_similarity: float
    rows: tuple[SetRow, ...]
    """Best score first."""
    check: BeamCheck | None
    bootstrap: Bootstrap | None


def choose(
    statistics: Statistics,
    sequence_of: NDArray[np.int64],
    settings: SelectSettings,
    seed: int,
    progress: Progress,
) -> Choice:
    """Run every search and compare what they find.

    Args:
        statistics: of all boundaries.
        sequence_of: [n], the sequence of each token in the Gram matrices.
        settings: size, method, candidates and so on.
        seed: of the bootstrap.
        progress: told about every round of scoring.

    Raises:
        MisuseError: a size or candidates that this model does not have.
    """
    candidates = candidate_boundaries(settings, len(statistics.entropy) - 1)
    check_size(settings.size, candidates)
    scorer = _reporting(statistics.scorer, progress)
    rounds = beam_search(candidates, settings.size, scorer, settings.beam)
    runs, similarity = segment(statistics.cka[np.ix_(candidates, candidates)], settings.size)
    compartments = tuple((candidates[r.start], candidates[r.stop - 1]) for r in runs)
    spread = beam_search(candidates, settings.size, scorer, settings.beam, [range(a, b + 1) for a, b in compartments])
    chosen = (rounds if settings.method == "elsi" else spread)[-1][0].boundaries
    named = _named_sets(rounds[-1], spread[-1], settings, len(statistics.entropy) - 1)
    scored = ranked(named, scorer)
    bootstrap = bootstrap_sets(
        statistics.grams,
        sequence_of,
        [s.boundaries for s in scored],
        alpha=settings.alpha,
        draws=settings.draws,
        seed=seed,
        progress=lambda done, total: progress("resampling sequences", done, total),
    )
    return Choice(
        boundaries=chosen,
        by_size=tuple(r[0] for r in (rounds if settings.method == "elsi" else spread)),
        compartments=compartments,
        compartment_similarity=similarity,
        rows=_table(scored, named, chosen, bootstrap),
        check=_check_beam(statistics, candidates, settings, named, scorer),
        bootstrap=bootstrap,
    )


def candidate_boundaries(settings: SelectSettings, num_layers: int) -> list[int]:
    """Return the boundaries that may be chosen.

    Raises:
        MisuseError: the user's span leaves 0..N.
    """
    if settings.candidates is None:
        return default_candidates(num_layers)
    first, last = settings.candidates
    if not 0 <= first <= last <= num_layers:
        raise MisuseError(f"candidates {first}-{last} are no span of the model's boundaries 0-{num_layers}")
    return list(range(first, last + 1))


def _reporting(scorer: Scorer, progress: Progress) -> Scorer:
    """Score in small portions and report each, so that progress moves and a time limit is noticed."""

    def score(sets: Sequence[BoundarySet]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(sets), 16):
            scores += scorer(sets[start : start + 16])
            progress("scoring sets", len(scores), len(sets))
        return scores

    return score


def _named_sets(
    beam: list[ScoredSet], spread: list[ScoredSet], settings: SelectSettings, num_layers: int
) -> dict[BoundarySet, tuple[str, ...]]:
    """Every set of the table with all names that lead to it."""
    names: dict[BoundarySet, tuple[str, ...]] = {}

    def add(boundaries: BoundarySet, name: str) -> None:
        names[boundaries] = (*names.get(boundaries, ()), name)

    add(beam[0].boundaries, "ELSI")
    add(spread[0].boundaries, "ELSI-C")
    labels = {"last": "last but one", "eagle3": "EAGLE-3 rule"}
    for rule, boundaries in baseline_sets(num_layers).items():
        add(boundaries, labels[rule])
    for number, boundaries in enumerate(settings.user_sets, 1):
        add(boundaries, f"yours {number}")
    for place, runner_up in enumerate(beam[1 : 1 + _RUNNERS_UP], 2):
        if runner_up.boundaries not in names:
            add(runner_up.boundaries, f"ELSI no. {place}")
    return names


def _table(
    scored: list[ScoredSet],
    names: dict[BoundarySet, tuple[str, ...]],
    chosen: BoundarySet,
    bootstrap: Bootstrap | None,
) -> tuple[SetRow, ...]:
    same_size = [i for i, s in enumerate(scored) if len(s.boundaries) == len(chosen)]
    position = next(i for i, s in enumerate(scored) if s.boundaries == chosen)
    errors = bootstrap.standard_errors() if bootstrap else None
    wins = dict(zip(same_size, bootstrap.wins(same_size), strict=True)) if bootstrap else {}
    rows = []
    for i, s in enumerate(scored):
        lead = None
        if bootstrap is not None and i != position:
            ahead, error = scored[position].score - s.score, bootstrap.difference_error(position, i)
            lead = Lead(ahead, ahead - 1.96 * error, ahead + 1.96 * error)
        rows.append(
            SetRow(
                names[s.boundaries],
                s.boundaries,
                s.score,
                None if errors is None else float(errors[i]),
                float(wins[i]) if i in wins else None,
                lead,
            )
        )
    return tuple(rows)


def _check_beam(
    statistics: Statistics,
    candidates: list[int],
    settings: SelectSettings,
    names: dict[BoundarySet, tuple[str, ...]],
    scorer: Scorer,
) -> BeamCheck | None:
    """Compare the beam with all sets: at the chosen alpha where that is cheap or asked for, else at alpha = 2."""
    count = set_count(candidates, settings.size)
    exact = settings.exhaustive or count <= CHEAP_SETS
    if not exact and count > CHEAP_PURITY_SETS:
        return None
    used: Scorer = scorer if exact and settings.alpha != 2.0 else PurityScorer(statistics.frobenius)
    everything = exhaustive_search(candidates, settings.size, used, keep=count)
    beam = beam_search(candidates, settings.size, used, settings.beam)[-1][0]
    scores = np.round([s.score for s in everything], ROUNDING)
    below = {}
    for boundaries, labels in names.items():
        if len(boundaries) == settings.size:
            own = round(used([boundaries])[0], ROUNDING)
            below[labels[0]] = float(np.mean(scores < own))
    best = everything[0]
    return BeamCheck(
        alpha=settings.alpha if exact else 2.0,
        sets=count,
        best=best.boundaries,
        gap=max(0.0, round(best.score - beam.score, ROUNDING)),
        share_below=below,
    )
