"""From ticks to time: what stages cost, which of them share a device, and how long a replay takes.

A pass of a stage costs its layers, plus an exit's head or, at the last stage, the model's head; it reads the stage's
weights once however many rows it has, and a measured curve says what more rows cost. Stages that share a device run one
after another, devices run at the same time, a tick lasts as long as the busiest of them plus an overhead. A stage
with no node to run costs nothing. A draft is run before the tick that needs it, step by step.

Costs are in any one unit. Measure them as they will be: all lanes running, with the threads each will have. Ways that
run one pass at a time have the whole machine to themselves; what that gives plain decoding, it gives them. Without
costs everything is counted in layers: each costs 1, heads and rows beyond the first nothing, one device a stage.
"""

import json
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.exits import StageCosts
from wavekit_calibration.simulation.nodes import NodeCounts
from wavekit_calibration.simulation.replay import DexStages, Replay
from wavekit_engines.errors import MisuseError

_KEYS = ("layers", "stages", "head", "exit_head", "rows", "overhead", "draft", "plain", "unit")
_HELP = 'write {"layers": [one number each], "head": number}, see docs/dex.md'


@dataclass(frozen=True)
class TickCosts:
    """What ticks cost, in ``unit``."""

    model: StageCosts
    """A pass of one row: every layer, and the model's head."""
    exit_head: float
    """The head of an early exit, with its adapter."""
    rows: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """A pass of so many rows relative to one row; between them interpolated, beyond them the last slope goes on."""
    overhead: float = 0.0
    """Of every tick, and of every pass of the ways that have no ticks."""
    draft: float = 0.0
    """One step of the draft head."""
    plain: float | None = None
    """A plain token on the whole machine, where it was measured; else all layers, the head and the overhead."""
    unit: str = "ms"

    @property
    def plain_token(self) -> float:
        """What a token costs in plain decoding."""
        return self.model.plain + self.overhead if self.plain is None else self.plain

    @property
    def alone(self) -> "TickCosts":
        """Of passes that run one at a time, on the whole machine: all of them as much faster as plain decoding is."""
        scale = self.plain_token / (self.model.plain + self.overhead)
        return replace(
            self,
            model=StageCosts(tuple(cost * scale for cost in self.model.layers), self.model.head * scale),
            exit_head=self.exit_head * scale,
            overhead=self.overhead * scale,
            draft=self.draft * scale,
            plain=None,
        )

    def relative(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of passes relative to one row, by their rows; 0 where there are none."""
        sizes, costs = (np.array(column, dtype=np.float64) for column in zip(*self.rows, strict=True))
        slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        beyond = np.maximum(rows - sizes[-1], 0.0) * slope
        found: NDArray[np.float64] = np.where(rows > 0, np.interp(rows, sizes, costs) + beyond, 0.0)
        return found

    def span(self, first: int, last: int) -> float:
        """Cost of the layers between two boundaries, one row."""
        return sum(self.model.layers[first:last])

    def by_stage(self, stages: DexStages) -> NDArray[np.float64]:
        """[K]: a pass of one row of each stage, with its head."""
        heads = [self.exit_head if stage in stages.proposing else 0.0 for stage in range(stages.count)]
        heads[-1] = self.model.head
        spans = [self.span(first, last) for first, last in pairwise((0, *stages.depths))]
        return np.array([span + head for span, head in zip(spans, heads, strict=True)])


@dataclass(frozen=True)
class Duration:
    """How long a replay takes, in the costs' unit."""

    token: float
    """Mean time a token."""
    speedup: float
    """Over plain decoding."""
    stages: tuple[float, ...]
    """Mean time a token that each stage is running."""
    device: tuple[int, ...]
    """The device of each stage."""
    idle: tuple[float, ...]
    """The share of the time that each device waits."""


def unit_costs(num_layers: int) -> TickCosts:
    """Every layer costs 1, all else nothing."""
    return TickCosts(StageCosts((1.0,) * num_layers, 0.0), 0.0, unit="layers")


def duration(
    replay: Replay, nodes: NodeCounts, costs: TickCosts, devices: int | None, draft_steps: int = 0
) -> Duration:
    """How long a replay takes.

    Args:
        replay: the replay.
        nodes: of the same replay.
        costs: of the same model.
        devices: devices that stages are spread over; None for one each.
        draft_steps: how far a draft looks ahead each time it is asked.
    """
    stages = replay.stages
    costs.model.check_layers(stages.depths[-1])
    single = costs.by_stage(stages)
    device = spread(single.tolist(), devices or stages.count)
    by_stage = costs.relative(nodes.rows) * single[:, None]
    by_device = np.zeros((max(device) + 1, replay.ticks))
    for stage, lane in enumerate(device):
        by_device[lane] += by_stage[stage]
    asked = len(replay.drafted.asked) if replay.drafted is not None else 0
    whole = float((by_device.max(axis=0) + costs.overhead).sum()) + asked * draft_steps * costs.draft
    token = whole / replay.tokens
    return Duration(
        token=token,
        speedup=costs.plain_token / token,
        stages=tuple((by_stage.sum(axis=1) / replay.tokens).tolist()),
        device=device,
        idle=tuple((1.0 - by_device.sum(axis=1) / whole).tolist()),
    )


def spread(costs: list[float], devices: int) -> tuple[int, ...]:
    """The device of each stage: neighbours stay together, and the dearest device is as cheap as that allows.

    Where several ways are as good, the first devices take as many stages as they may.
    """
    sums = [0.0, *accumulate(costs)]
    loads = sorted({high - low for high in sums for low in sums if high > low})
    for limit in loads:
        lanes, lane, load = list[int](), 0, 0.0
        for cost in costs:
            if lanes and load + cost > limit * (1 + 1e-12):
                lane, load = lane + 1, 0.0
            lanes.append(lane)
            load += cost
        if lane < devices and max(costs) <= limit * (1 + 1e-12):
            return tuple(lanes)
    raise AssertionError("all stages on one device always fit the largest load")


def read_costs(file: Path, num_layers: int) -> TickCosts:
    """Read measured costs, JSON: ``{"layers": [...], "head": h}``, as `wavekit calibrate --layer-costs` takes them.

    Instead of ``layers``, ``stages`` may list ``[boundary, cost]`` of measured stages, shallow to deep: the layers of a
    stage then share its cost. Optional: ``exit_head`` (as ``head``), ``rows`` ([[rows, relative cost], ...]),
    ``overhead``, ``draft``, ``plain`` and ``unit``, see `TickCosts`.

    Raises:
        MisuseError: unreadable, or not costs of a model with so many layers.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise MisuseError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise MisuseError(f"{file} is no JSON; {_HELP}") from None
    if not isinstance(content, dict) or ("layers" in content) == ("stages" in content) or "head" not in content:
        raise MisuseError(f"{file} holds no costs; {_HELP}")
    if unknown := set(content) - set(_KEYS):
        raise MisuseError(f"{file} has unknown entries: {', '.join(sorted(unknown))}; known are {', '.join(_KEYS)}")
    try:
        costs = _costs(content)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise MisuseError(f"{file}: {error}; {_HELP}") from None
    costs.model.check_layers(num_layers)
    return costs


def _costs(content: dict[str, Any]) -> TickCosts:
    head = float(content["head"])
    layers = [float(cost) for cost in content["layers"]] if "layers" in content else _shared(content["stages"])
    rows = tuple((int(size), float(cost)) for size, cost in content.get("rows", [[1, 1.0]]))
    sizes, curve = [size for size, _ in rows], [cost for _, cost in rows]
    if sizes[:1] != [1] or sizes != sorted(set(sizes)) or curve[0] != 1.0 or curve != sorted(curve):
        raise ValueError("rows must rise from [1, 1.0], and their costs must not fall")
    return TickCosts(
        StageCosts(tuple(layers), head),
        exit_head=_cost(content, "exit_head", head),
        rows=rows,
        overhead=_cost(content, "overhead", 0.0),
        draft=_cost(content, "draft", 0.0),
        plain=_cost(content, "plain", 0.0) or None,
        unit=str(content.get("unit", "ms")),
    )


def _cost(content: dict[str, Any], name: str, default: float) -> float:
    cost = float(content.get(name, default))
    if not (np.isfinite(cost) and cost >= 0):
        raise ValueError(f"{name} must be zero or a positive number")
    return cost


def _shared(stages: list[tuple[int, float]]) -> list[float]:
    layers = list[float]()
    for boundary, cost in stages:
        count = int(boundary) - len(layers)
        if count < 1:
            raise ValueError("stages must rise: [boundary, cost], shallow to deep")
        layers += [float(cost) / count] * count
    return layers
