"""Where stages should end: a search through depths and numbers of stages for measured costs.

Every candidate is replayed on the whole trace and timed, rows and all, without DECS and, where the trace has ranks
for it, with. For each number of stages all sets of depths are tried if they are few. Otherwise dynamic programming
finds, for many limits to what a stage may cost in a tick, the depths with the fewest ticks by EAD, once with one row
in every stage and once with as many as unlike proposals make. The best of them, and of what the best set for one
stage less grows into, are improved by moving one boundary at a time until no move helps. That is good and not proven
best. Ties go to the shallower depths.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.simulation.nodes import NodeCounts, count_nodes
from wavekit_calibration.simulation.replay import DexStages, Replay, replay
from wavekit_calibration.simulation.timing import Duration, TickCosts, duration
from wavekit_calibration.simulation.trace import ExitTrace

EXHAUSTIVE = 500
"""Up to so many sets of depths are all tried."""
_LIMITS = 32
_CLIMBERS = 8
"""Sets that are improved; with 3, eight of 1,000 random traces end more than 5 % above the best, with 8 none."""

_Early = tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """The best stages found for one number of them."""

    stages: DexStages
    replay: Replay
    nodes: NodeCounts
    duration: Duration
    exhaustive: bool
    """Whether every set of depths was tried."""


def plan(
    trace: ExitTrace,
    costs: TickCosts,
    max_stages: int,
    devices: int | None = None,
    told: Callable[[int], None] = lambda stages: None,
) -> list[Planned]:
    """The best stages for K = 2, 3, ... up to ``max_stages`` or one a recorded boundary, in that order.

    Args:
        trace: what exits say.
        costs: of the same model.
        max_stages: the largest K.
        devices: that stages are spread over; None for one a stage.
        told: called with each K before it is searched.
    """
    boundaries = trace.header.boundaries
    tried: dict[_Early, Planned] = {}

    def best_of(sets: Iterable[_Early], keep: int) -> list[_Early]:
        found = set(sets)
        for early in found - set(tried):
            tried[early] = _evaluate(trace, early, costs, devices)
        return sorted(found, key=lambda early: (tried[early].duration.token, early))[:keep]

    plans = list[Planned]()
    for count in range(1, min(max_stages - 1, len(boundaries)) + 1):
        told(count + 1)
        exhaustive = comb(len(boundaries), count) <= EXHAUSTIVE
        if exhaustive:
            best = best_of(combinations(boundaries, count), 1)
        else:
            smaller = plans[-1].stages.depths[:-1] if plans else ()
            grown = {_with(smaller, b) for b in boundaries if b not in smaller}
            begin = best_of(_promising(trace, costs, count) | grown, _CLIMBERS)
            best = best_of([_climb(early, boundaries, best_of) for early in begin], 1)
        found = tried[best[0]]
        plans.append(Planned(found.stages, found.replay, found.nodes, found.duration, exhaustive))
        tried.clear()
    return plans


def _evaluate(trace: ExitTrace, early: _Early, costs: TickCosts, devices: int | None) -> Planned:
    ways = (False, True) if trace.candidates.shape[2] > 1 else (False,)
    found = []
    for decs in ways:
        stages = DexStages((*early, trace.num_layers), decs)
        played = replay(trace, stages)
        nodes = count_nodes(played)
        found.append(Planned(stages, played, nodes, duration(played, nodes, costs, devices), False))
    return min(found, key=lambda one: one.duration.token)


def _promising(trace: ExitTrace, costs: TickCosts, count: int) -> set[_Early]:
    """Early ends for ``count`` + 1 stages that have the fewest ticks by EAD under some limit to a stage's cost."""
    depths = np.array([0, *trace.header.boundaries, trace.num_layers])
    before = np.concatenate([[0.0], np.cumsum(costs.model.layers)])[depths]
    rising = np.triu(np.ones((len(depths), len(depths)), dtype=bool), 1)
    ready = (trace.earliest_depths()[:, None] <= depths).mean(axis=0)
    heads = np.array([costs.exit_head] * count + [costs.model.head])
    most = np.array([*(2 ** (count - 1 - stage) for stage in range(count)), 1])
    found = set[_Early]()
    for rows in (np.ones_like(most), most):
        prices = (before - before[:, None] + heads[:, None, None]) * costs.relative(rows)[:, None, None]
        limits = np.unique(np.round(prices[:, rising], 9))
        for limit in limits[np.linspace(0, len(limits) - 1, _LIMITS).astype(int)]:
            ends = _fewest_ticks(ready, (prices <= limit + 1e-9) & rising)
            if ends is not None:
                found.add(tuple(depths[ends].tolist()))
    return found


def _fewest_ticks(ready: NDArray[np.float64], fits: NDArray[np.bool_]) -> list[int] | None:
    """The early ends with the largest sum of ``ready`` [D] for stages that fit, ``fits`` [K, D, D]."""
    value = np.where(np.arange(len(ready)) == 0, 0.0, -np.inf)
    came_from = []
    for allowed in fits:
        options = np.where(allowed, value[:, None], -np.inf)
        came_from.append(np.argmax(options, axis=0))
        value = options.max(axis=0) + ready
    if not np.isfinite(value[-1]):
        return None
    ends = [len(ready) - 1]
    for origins in reversed(came_from[1:]):
        ends.append(int(origins[ends[-1]]))
    return ends[:0:-1]


def _climb(early: _Early, boundaries: _Early, best_of: Callable[[Iterable[_Early], int], list[_Early]]) -> _Early:
    while True:
        moves = {_with(_without(early, a), b) for a in early for b in boundaries if b not in early}
        best = best_of([early, *sorted(moves)], 1)[0]
        if best == early:
            return early
        early = best


def _with(early: _Early, boundary: int) -> _Early:
    return tuple(sorted((*early, boundary)))


def _without(early: _Early, boundary: int) -> _Early:
    return tuple(b for b in early if b != boundary)
