"""All ways to decode one trace side by side: plain, depth exploration, a draft, both, and the baselines.

Knows traces and costs; who prints what is found is not known here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.simulation.baselines import Exploration, best_pipelining, best_selection, exploration, oracle
from wavekit_calibration.simulation.nodes import count_nodes
from wavekit_calibration.simulation.replay import DexStages, replay
from wavekit_calibration.simulation.timing import Duration, TickCosts, duration
from wavekit_calibration.simulation.trace import ExitTrace


@dataclass(frozen=True)
class Way:
    """One way to decode. Times are means a token, in the costs' unit."""

    name: str
    token: float
    speedup: float
    """In time, over plain decoding."""
    ticks: float | None = None
    """A token; None for ways that have no ticks."""
    tick_speedup: float | None = None
    """Over the same stages run in turn."""


@dataclass(frozen=True)
class Detail:
    """What happened in depth exploration, or in the hybrid where there is a draft."""

    commits: dict[str, float]
    """The share of tokens by what proposed them: a depth, "draft", or "none" where the last stage had to start anew."""
    peak_live: int
    """The most nodes alive after a tick; 2^K - 1 at most without a draft."""
    explored: float
    """Nodes that ran, a token."""
    wasted: float
    """Those of them that were not committed."""
    rows: tuple[float, ...]
    """Mean rows of each stage's passes, where it ran."""
    duration: Duration


@dataclass(frozen=True)
class Comparison:
    """What a trace, stages and costs promise."""

    tokens: int
    sequences: int
    num_layers: int
    depths: tuple[int, ...]
    decs: bool
    unit: str
    ways: tuple[Way, ...]
    detail: Detail
    exploration: Exploration
    notes: tuple[str, ...]


def compare(
    trace: ExitTrace,
    depths: tuple[int, ...],
    costs: TickCosts,
    decs: bool = True,
    devices: int | None = None,
    draft: NDArray[np.int32] | None = None,
) -> Comparison:
    """Replay a trace in every way.

    Args:
        trace: what exits say.
        depths: where the stages end, the last one N.
        costs: of the same model.
        decs: whether exits pass over tokens that were proposed already.
        devices: that stages are spread over; None for one a stage.
        draft: [n, L], see `ExitTrace.draft`; None for no draft.

    Raises:
        MisuseError: depths or costs do not suit the model.
        TraceError: an exit's depth is not in the trace.
        TooFewTokensError: the trace holds nothing to decode.
    """
    stages = DexStages(depths, decs)
    ways = [Way("plain decoding", costs.plain_token, 1.0)]
    dex, detail = _explored("depth exploration", trace, stages, costs, devices, None)
    if len(depths) > 1:
        ways.append(dex)
    if draft is not None:
        ways.append(_explored("draft", trace, DexStages(depths[-1:]), costs.alone, None, draft)[0])
        hybrid, detail = _explored("both", trace, stages, costs, devices, draft)
        if len(depths) > 1:
            ways.append(hybrid)
    if len(depths) > 1:
        ways += _baselines(trace, depths, costs, devices)
    for name, known in (("EAD", trace.earliest_depths()), ("first right exit", trace.first_depths())):
        token = oracle(trace, known, costs)
        ways.append(Way(f"oracle of the {name}", token, costs.plain_token / token))
    return Comparison(
        tokens=trace.decoded_tokens,
        sequences=len(trace.starts),
        num_layers=trace.num_layers,
        depths=depths,
        decs=decs,
        unit=costs.unit,
        ways=tuple(ways),
        detail=detail,
        exploration=exploration(trace, depths),
        notes=trace.notes,
    )


def _explored(
    name: str,
    trace: ExitTrace,
    stages: DexStages,
    costs: TickCosts,
    devices: int | None,
    draft: NDArray[np.int32] | None,
) -> tuple[Way, Detail]:
    played = replay(trace, stages, draft)
    nodes = count_nodes(played)
    took = duration(played, nodes, costs, devices, 0 if draft is None else draft.shape[1])
    names = [*map(str, stages.depths[:-1]), "none", *(["draft"] if draft is not None else [])]
    shares = played.commits / played.tokens
    passes = (nodes.rows > 0).sum(axis=1)
    detail = Detail(
        commits=dict(zip(names, shares.tolist(), strict=False)),
        peak_live=nodes.peak_live,
        explored=nodes.explored / played.tokens,
        wasted=nodes.wasted / played.tokens,
        rows=tuple((nodes.rows.sum(axis=1) / passes).tolist()),
        duration=took,
    )
    return Way(name, took.token, took.speedup, played.ticks_per_token, played.speedup), detail


def _baselines(trace: ExitTrace, depths: tuple[int, ...], costs: TickCosts, devices: int | None) -> list[Way]:
    pipe = best_pipelining(trace, depths, costs, devices)
    chosen = best_selection(trace, depths[:-1], costs)
    return [
        Way(
            f"pipelining, exit at {pipe.exit}",
            pipe.duration.token,
            pipe.duration.speedup,
            pipe.replay.ticks_per_token,
            pipe.replay.speedup,
        ),
        Way(f"selection, {chosen.drafted} drafted at {chosen.exit}", chosen.token, chosen.speedup),
    ]
