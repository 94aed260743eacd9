"""What depth exploration is measured against, on the same trace and costs.

- Single-exit selection (LayerSkip's way): the layers up to one exit write n tokens one after another, then the
  deeper layers check them all, and the token that will follow, in one pass.
- Single-exit pipelining (PPSD's way): K stages in parallel, one of which proposes.
- Oracles: they know each token's depth and compute no deeper, one token after another, and missing cache rows of deeper
  layers cost them nothing. No decoder can. One knows the earliest available depth (EAD), from which on every exit is
  right; the other the first exit that is right, which may lie above. The decoder commits by that one too, so exploring
  every depth comes down to the second.

Exploring depths X instead of knowing the EAD costs ceil_X(EAD) - EAD layers a token, where ceil_X is the next depth
explored: never more than the resolution D(X), the widest gap between neighbours in {0} and X.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.simulation.nodes import count_nodes
from wavekit_calibration.simulation.replay import DexStages, Replay, replay
from wavekit_calibration.simulation.timing import Duration, TickCosts, duration
from wavekit_calibration.simulation.trace import ExitTrace

MOST_DRAFTED = 8


@dataclass(frozen=True)
class Selection:
    """The best of drafting at one exit and checking at the end."""

    exit: int
    """The boundary that drafts."""
    drafted: int
    """Tokens drafted a cycle."""
    accepted: float
    """Tokens committed a cycle, with the one that the check gives."""
    token: float
    """Mean time a token, in the costs' unit."""
    speedup: float


@dataclass(frozen=True)
class Pipelining:
    """The best of K stages with one exit."""

    exit: int
    """The boundary that proposes."""
    replay: Replay
    duration: Duration


@dataclass(frozen=True)
class Exploration:
    """What not knowing the EAD costs, in layers a token; EAD among the recorded boundaries."""

    mean_ead: float
    mean_overhead: float
    """Of ceil_X(EAD) - EAD."""
    worst_overhead: int
    resolution: int
    """D(X), which bounds it."""


def exploration(trace: ExitTrace, depths: tuple[int, ...]) -> Exploration:
    """The overhead of exploring ``depths``, and its bound."""
    depth = trace.earliest_depths()
    explored = np.array(depths)[np.searchsorted(depths, depth)] - depth
    gaps = [last - first for first, last in pairwise((0, *depths))]
    return Exploration(float(depth.mean()), float(explored.mean()), int(explored.max()), max(gaps))


def oracle(trace: ExitTrace, depths: NDArray[np.int64], costs: TickCosts) -> float:
    """Mean time a token if every record's depth, ``depths`` [n], were known."""
    depths, counts = np.unique(depths[~trace.is_first], return_counts=True)
    costs, end = costs.alone, trace.num_layers
    times = [costs.span(0, d) + (costs.model.head if d == end else costs.exit_head) + costs.overhead for d in depths]
    return float(np.dot(times, counts) / counts.sum())


def best_selection(trace: ExitTrace, exits: tuple[int, ...], costs: TickCosts) -> Selection:
    """The best exit of ``exits`` and number of drafted tokens, up to `MOST_DRAFTED`."""
    found = [selection(trace, exit_, n, costs) for exit_ in exits for n in range(1, MOST_DRAFTED + 1)]
    return min(found, key=lambda one: one.token)


def selection(trace: ExitTrace, exit_: int, drafted: int, costs: TickCosts) -> Selection:
    """Draft so many tokens with the exit at a boundary, check, and so on through the trace."""
    right, costs = trace.right(exit_).tolist(), costs.alone
    edges = [*trace.starts.tolist(), len(trace)]
    cycles = np.zeros(drafted + 1, dtype=np.int64)  # by tokens drafted, fewer before a text's end
    for first, end in pairwise(edges):
        node = first + 1
        while node < end:
            length = min(drafted, end - node - 1)
            run = next((k for k in range(length) if not right[node + k]), length)
            cycles[length] += 1
            node += run + 1
    rows = np.arange(1, drafted + 2)
    shallow, deep = costs.span(0, exit_), costs.span(exit_, trace.num_layers) + costs.model.head
    times = rows * (shallow + costs.overhead) + (rows - 1) * costs.exit_head + deep * costs.relative(rows)
    token = float(np.dot(cycles, times)) / trace.decoded_tokens
    return Selection(exit_, drafted, trace.decoded_tokens / int(cycles.sum()), token, costs.plain_token / token)


def best_pipelining(trace: ExitTrace, depths: tuple[int, ...], costs: TickCosts, devices: int | None) -> Pipelining:
    """The best single exit for stages that end at ``depths``."""
    found = []
    for exit_ in range(len(depths) - 1):
        played = replay(trace, DexStages(depths, exits=(exit_,)))
        took = duration(played, count_nodes(played), costs, devices)
        found.append(Pipelining(depths[exit_], played, took))
    return min(found, key=lambda one: one.duration.token)
