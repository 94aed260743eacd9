"""Which depths are worth an exit: the stage ends of a depth-explored (DEX) decoder with K stages.

Stages that end at d_0 < d_1 < ... < d_{K-1} = N run at once, one lane each; a tick lasts as long as the slowest stage.
A token whose earliest available depth lies at or before d_j, and after d_{j-1}, is committed j + 1 ticks after the last
one. So

    ticks a token   E[j + 1] = K - sum over j < K-1 of P(EAD <= d_j)
    tick            T = max over stages of (its layers' cost + the cost of one head)
    time a token    T * E[j + 1], in the costs' unit

and plain decoding takes all layers and one head a token. For every T that some stage can have, dynamic programming
finds the exits with the fewest expected ticks whose stages all fit in T; the best product wins, ties going to the
shorter tick, then to shallower exits. With adapters on the exits real agreement is higher than the logit lens's, so
these numbers say where exits pay and are no forecast of speed; on one device shared by all stages a tick costs the sum
of the stages and nothing is gained.

The EAD counts a token as ready only from where it stays ready. The decoder commits at the first exit that gives
the final token, whatever deeper exits say, so it needs ``ticks_first_match`` <= E[j + 1] ticks.

Knows agreement matrices and costs only.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import MisuseError


@dataclass(frozen=True)
class StageCosts:
    """What a pass costs, in any one unit (layers, milliseconds)."""

    layers: tuple[float, ...]
    """Cost of each decoder layer."""
    head: float
    """Cost of final norm and head, paid by every stage that ends in an exit."""

    def __post_init__(self) -> None:
        """Refuse costs that are not positive numbers."""
        if not self.layers or not all(np.isfinite(c) and c > 0 for c in self.layers):
            raise MisuseError("every layer's cost must be a positive number")
        if not (np.isfinite(self.head) and self.head >= 0):
            raise MisuseError(f"the head's cost must be zero or positive, got {self.head}")

    @property
    def plain(self) -> float:
        """Cost of one plain decoding step."""
        return sum(self.layers) + self.head

    def check_layers(self, num_layers: int) -> None:
        """Refuse costs that belong to another model.

        Raises:
            MisuseError: there is not one cost a layer.
        """
        if len(self.layers) != num_layers:
            raise MisuseError(f"the model has {num_layers} layers and the layer costs name {len(self.layers)}")

    def tick(self, exits: tuple[int, ...]) -> float:
        """Cost of the slowest stage of the given stage ends."""
        edges = (0, *exits)
        return max(sum(self.layers[a:b]) for a, b in pairwise(edges)) + self.head


@dataclass(frozen=True)
class ExitPlan:
    """Stage ends for K stages and what they promise."""

    exits: tuple[int, ...]
    """d_0 .. d_{K-1} = N, boundaries."""
    ticks: float
    """Expected ticks a token, by EAD."""
    ticks_first_match: float
    """Expected ticks a token when the first agreeing exit commits."""
    tick_cost: float
    """T, in the costs' unit."""
    plain_cost: float
    """A plain step, in the same unit."""

    @property
    def gain(self) -> float:
        """Plain cost over time a token by EAD, one lane a stage; above 1 is a gain."""
        return self.plain_cost / (self.tick_cost * self.ticks)


def plan_for(
    exits: tuple[int, ...], agrees: NDArray[np.bool_], ready: NDArray[np.float64], costs: StageCosts
) -> ExitPlan:
    """Evaluate given stage ends (the last one N) on agreement [T, N + 1] and readiness [N + 1]."""
    early = list(exits[:-1])
    ticks = len(exits) - float(ready[early].sum())
    hit = np.concatenate([agrees[:, early], np.ones((len(agrees), 1), dtype=bool)], axis=1)
    first_match = 1.0 + float(np.argmax(hit, axis=1).mean())
    return ExitPlan(exits, ticks, first_match, costs.tick(exits), costs.plain)


def even_exits(num_layers: int, stages: int) -> tuple[int, ...]:
    """Stage ends that divide the layers as evenly as whole layers allow."""
    return tuple(round(num_layers * (j + 1) / stages) for j in range(stages))


def best_exits(agrees: NDArray[np.bool_], ready: NDArray[np.float64], costs: StageCosts, stages: int) -> ExitPlan:
    """Find the stage ends that minimise expected time a token, exactly.

    Args:
        agrees: [T, N + 1], see `readiness`.
        ready: [N + 1], P(EAD <= k).
        costs: of N layers and the head.
        stages: K, between 1 and N.

    Raises:
        MisuseError: more stages than layers, or costs for another number of layers.
    """
    num_layers = len(ready) - 1
    costs.check_layers(num_layers)
    if not 1 <= stages <= num_layers:
        raise MisuseError(f"cannot make {stages} stages of {num_layers} layers")
    before = np.concatenate([[0.0], np.cumsum(costs.layers)])
    spans = before[None, :] - before[:, None]
    best: tuple[float, float, tuple[int, ...]] | None = None
    for limit in np.unique(np.round(spans[spans > 0], 9)):
        exits = _fewest_ticks(ready, spans <= limit + 1e-9, stages)
        if exits is None:
            continue
        tick = costs.tick(exits)
        key = (round(tick * (stages - float(ready[list(exits[:-1])].sum())), 9), tick, exits)
        best = key if best is None else min(best, key)
    assert best is not None  # the largest limit always allows one layer a stage
    return plan_for(best[2], agrees, ready, costs)


def _fewest_ticks(ready: NDArray[np.float64], fits: NDArray[np.bool_], stages: int) -> tuple[int, ...] | None:
    """Return the stage ends with the largest sum of ``ready`` over the early exits, every stage within ``fits``."""
    size = len(ready)
    shallower = np.triu(np.ones((size, size), dtype=bool), 1)
    value = np.full(size, -np.inf)
    value[0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    for stage in range(stages):
        options = np.where(fits & shallower, value[:, None], -np.inf)
        came_from.append(np.argmax(options, axis=0))
        value = options.max(axis=0) + (ready if stage < stages - 1 else 0.0)
    if not np.isfinite(value[-1]):
        return None
    exits = [size - 1]
    for origins in reversed(came_from[1:]):
        exits.append(int(origins[exits[-1]]))
    return tuple(reversed(exits))
