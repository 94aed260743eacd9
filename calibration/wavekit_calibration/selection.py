"""Which boundaries to tap: ELSI, ELSI-C, exhaustive search, and the rules they are compared with.

ELSI: beam search for the set of m boundaries of largest set entropy (see `entropy`), one boundary added a round,
8 sets kept a round. ELSI-C: the same, with at most one boundary a compartment, so that the set is spread over the
compartments (see `compartments`). Entropies that agree to six decimals are tied, and ties go to the shallower set:
the one that comes first when sorted (ours).

The searches see a scorer, a function from sets to entropies, and nothing else: no matrices, no models.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise

from wavekit_calibration.sets import ROUNDING, BoundarySet, ScoredSet
from wavekit_engines.errors import MisuseError

Scorer = Callable[[Sequence[BoundarySet]], list[float]]


def ranked(sets: Iterable[BoundarySet], scorer: Scorer) -> list[ScoredSet]:
    """Score the sets and sort them, best first, ties shallower first."""
    unique = list(dict.fromkeys(sets))
    scored = [ScoredSet(s, score) for s, score in zip(unique, scorer(unique), strict=True)]
    return sorted(scored, key=lambda s: (-round(s.score, ROUNDING), s.boundaries))


def beam_search(
    candidates: Sequence[int], size: int, scorer: Scorer, beam: int = 8, groups: Sequence[Iterable[int]] | None = None
) -> list[list[ScoredSet]]:
    """Grow sets one boundary a round and keep the ``beam`` best of every round.

    Args:
        candidates: the boundaries to choose from.
        size: boundaries in the final sets.
        scorer: the entropy of sets.
        beam: sets kept a round.
        groups: disjoint groups of boundaries, of which a set takes one boundary each at most; None: no such limit.

    Returns:
        For every size 1..``size``, the sets kept, best first.

    Raises:
        MisuseError: ``size`` is not between 1 and the number of candidates (or groups).
    """
    group_of = {b: g for g, members in enumerate(groups) for b in members} if groups is not None else None
    check_size(size, candidates)
    if groups is not None and size > len(groups):
        raise MisuseError(f"cannot take {size} boundaries from {len(groups)} compartments; ask for fewer")
    rounds: list[list[ScoredSet]] = []
    kept: list[BoundarySet] = [()]
    for _ in range(size):
        grown = [tuple(sorted((*s, b))) for s in kept for b in candidates if _may_join(b, s, group_of)]
        rounds.append(ranked(grown, scorer)[:beam])
        kept = [s.boundaries for s in rounds[-1]]
    return rounds


def _may_join(boundary: int, members: BoundarySet, group_of: dict[int, int] | None) -> bool:
    if boundary in members:
        return False
    return group_of is None or all(group_of[boundary] != group_of[m] for m in members)


def exhaustive_search(candidates: Sequence[int], size: int, scorer: Scorer, keep: int = 8) -> list[ScoredSet]:
    """Return the ``keep`` best of all sets of ``size`` candidates; costs C(len(candidates), size) scores."""
    check_size(size, candidates)
    return ranked(combinations(sorted(candidates), size), scorer)[:keep]


def set_count(candidates: Sequence[int], size: int) -> int:
    """How many sets `exhaustive_search` would score."""
    return math.comb(len(candidates), size)


def check_size(size: int, candidates: Sequence[int]) -> None:
    """Refuse a number of boundaries that cannot be chosen.

    Raises:
        MisuseError: ``size`` is not between 1 and the number of candidates.
    """
    if not 1 <= size <= len(candidates):
        raise MisuseError(
            f"cannot choose {size} boundaries from {len(candidates)} candidates "
            f"({_span(candidates)}); ask for 1 to {len(candidates)}"
        )


def _span(candidates: Sequence[int]) -> str:
    return f"{min(candidates)}..{max(candidates)}" if candidates else "none"


def default_candidates(num_layers: int) -> list[int]:
    """1..N-1 (ours): boundary 0 is the embedding, which a draft head is given anyway; several servers refuse N."""
    return list(range(1, num_layers))


def baseline_sets(num_layers: int) -> dict[str, BoundarySet]:
    """The rules in use: the last boundary but one (EAGLE-2), and EAGLE-3's three, where the model has them."""
    rules = {"last": (num_layers - 1,), "eagle3": (2, num_layers // 2, num_layers - 3)}
    return {name: s for name, s in rules.items() if s[0] > 0 and all(a < b for a, b in pairwise((*s, num_layers)))}


def parse_set(text: str) -> BoundarySet:
    """Read a user's set such as ``5,14,27``; whether a model has these boundaries is for `check_members`.

    Raises:
        MisuseError: not numbers, or a boundary twice.
    """
    try:
        members = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise MisuseError(f"boundaries are numbers with commas between, such as 2,15,27; got {text!r}") from None
    if len(set(members)) != len(members):
        raise MisuseError(f"the set {text} names a boundary twice")
    return members


def check_members(members: BoundarySet, num_layers: int) -> None:
    """Refuse a set that leaves the boundaries 0..N.

    Raises:
        MisuseError: naming the set.
    """
    if members[0] < 0 or members[-1] > num_layers:
        raise MisuseError(f"the set {','.join(map(str, members))} leaves the model's boundaries 0-{num_layers}")
