"""Times of replays against a walk through every tick, and the search for stages against trying all."""

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from dex_lattice import brute_force, random_trace
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from wavekit_calibration.exits import StageCosts
from wavekit_calibration.simulation import plan as dex_plan
from wavekit_calibration.simulation.baselines import best_selection, exploration, oracle, selection
from wavekit_calibration.simulation.comparison import compare
from wavekit_calibration.simulation.draft_chain import imagined_draft
from wavekit_calibration.simulation.nodes import count_nodes
from wavekit_calibration.simulation.replay import DexStages, replay
from wavekit_calibration.simulation.timing import TickCosts, duration, read_costs, spread, unit_costs
from wavekit_calibration.simulation.trace import ExitTrace
from wavekit_engines.errors import MisuseError

CURVE = ((1, 1.0), (2, 1.25), (4, 2.0), (8, 3.0))


def of_rows(rows: int) -> float:
    """The curve above, by hand; beyond it the last slope."""
    if rows == 0:
        return 0.0
    if rows <= 2:
        return 1.0 + 0.25 * (rows - 1)
    return 1.25 + 0.375 * (rows - 2) if rows <= 4 else 2.0 + 0.25 * (rows - 4)


def random_costs(seed: int, layers: int) -> TickCosts:
    rng = np.random.default_rng(seed)
    return TickCosts(
        StageCosts(tuple(rng.uniform(0.1, 1, layers)), rng.uniform(0, 2)), rng.uniform(0, 2), CURVE, 0.3, 0.2
    )


def dearest(costs: list[float], devices: int) -> float:
    """The lowest load of the busiest device, over every way to cut the stages into runs of neighbours."""
    cuts = combinations(range(1, len(costs)), min(devices, len(costs)) - 1)
    return min(max(sum(costs[a:b]) for a, b in pairwise((0, *cut, len(costs)))) for cut in cuts)


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=7), st.integers(1, 8))
def test_stages_are_spread_so_that_the_busiest_device_has_least(costs: list[float], devices: int) -> None:
    lanes = spread(costs, devices)
    assert list(lanes) == sorted(lanes)
    assert set(lanes) == set(range(max(lanes) + 1))
    assert len(set(lanes)) <= devices
    loads = [sum(cost for cost, lane in zip(costs, lanes, strict=True) if lane == one) for one in set(lanes)]
    assert max(loads) == pytest.approx(dearest(costs, devices))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_a_tick_lasts_as_long_as_its_busiest_device(
    seed: int, stages: int, devices: int, decs: bool, with_draft: bool
) -> None:
    trace = random_trace(seed, [7, 5], 8, 4, 6)
    costs = random_costs(seed, 9)
    depths = (*sorted(np.random.default_rng(seed).choice(range(1, 9), stages - 1, replace=False).tolist()), 9)
    draft = imagined_draft(trace, (0.8, 0.5), seed) if with_draft else None
    played = replay(trace, DexStages(depths, decs), draft)
    found = duration(played, count_nodes(played), costs, devices, 2)

    whole = 0.0
    for walk in brute_force(trace, depths, decs, None, draft):
        whole += len(walk.asked) * 2 * 0.2
        for rows in walk.rows:
            busy = dict.fromkeys(found.device, 0.0)
            for stage, (first, last) in enumerate(pairwise((0, *depths))):
                head = costs.model.head if last == 9 else costs.exit_head
                busy[found.device[stage]] += (sum(costs.model.layers[first:last]) + head) * of_rows(rows[stage])
            whole += max(busy.values()) + 0.3
    assert found.token == pytest.approx(whole / trace.decoded_tokens)
    assert found.speedup == pytest.approx((sum(costs.model.layers) + costs.model.head + 0.3) / found.token)
    assert all(-1e-9 <= share < 1 for share in found.idle)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 4))
def test_selection_cycle_by_cycle(seed: int, exit_: int, drafted: int) -> None:
    trace = random_trace(seed, [9, 1, 6], 8, 1, 4, right=0.7)
    costs = random_costs(seed, 9)
    right = trace.candidates[:, exit_ - 1, 0] == trace.final
    shallow = sum(costs.model.layers[:exit_])
    time, cycles = 0.0, 0
    for first, end in ((0, 9), (10, 16)):
        written = 1
        while written < end - first:
            guesses = min(drafted, end - first - written - 1)
            good = 0
            while good < guesses and right[first + written + good]:
                good += 1
            deep = sum(costs.model.layers[exit_:]) + costs.model.head
            time += (guesses + 1) * (shallow + 0.3) + guesses * costs.exit_head + deep * of_rows(guesses + 1)
            written += good + 1
            cycles += 1
    found = selection(trace, exit_, drafted, costs)
    assert found.token == pytest.approx(time / 13)
    assert found.accepted == pytest.approx(13 / cycles)
    assert best_selection(trace, (exit_,), costs).token <= found.token


@given(st.integers(0, 2**32 - 1), st.sets(st.integers(1, 11), max_size=5))
def test_exploring_never_costs_more_than_the_resolution(seed: int, early: set[int]) -> None:
    trace = random_trace(seed, [30], 11, 1, 3, right=0.7)
    found = exploration(trace, (*sorted(early), 12))
    assert found.worst_overhead <= found.resolution
    assert 0 <= found.mean_overhead <= found.worst_overhead


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_finer_depths_come_down_to_the_oracle(seed: int) -> None:
    trace = random_trace(seed, [40], 11, 1, 3, right=0.3)
    costs = unit_costs(12)
    exploring = [(12,), (6, 12), (3, 6, 9, 12), tuple(range(1, 13))]
    overheads = [exploration(trace, depths).mean_overhead for depths in exploring]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0
    times = [duration(p, count_nodes(p), costs, None).token for d in exploring for p in [replay(trace, DexStages(d))]]
    assert times == sorted(times, reverse=True)
    floor = oracle(trace, trace.first_depths(), costs)
    assert floor <= oracle(trace, trace.earliest_depths(), costs)
    last = 12 - trace.first_depths()[-1]  # after the last token nothing is proposed
    assert times[-1] == pytest.approx(floor + last / 39)


def test_exits_that_are_wrong_make_no_way_faster_than_plain_decoding() -> None:
    trace = random_trace(0, [60], 11, 1, 50, right=0.0)
    trace = ExitTrace(trace.header, np.full_like(trace.candidates, 99), trace.final, trace.starts)
    found = compare(trace, (4, 8, 12), random_costs(0, 12))
    assert max(way.speedup for way in found.ways[1:]) <= 1.0
    assert found.detail.commits == {"4": 0.0, "8": 0.0, "none": 1.0}
    assert found.detail.peak_live == 4  # wrong, but all the same


def test_one_device_gains_nothing_from_ticks() -> None:
    """Every tick then costs all stages, as long as each has something to run."""
    trace = random_trace(1, [200], 3, 1, 3, right=0.6)
    costs = TickCosts(StageCosts((1.0,) * 4, 0.0), 0.0)
    found = compare(trace, (2, 4), costs, devices=1)
    dex = next(way for way in found.ways if way.name == "depth exploration")
    assert dex.tick_speedup is not None
    assert dex.tick_speedup > 1.2
    assert dex.speedup <= 1.0


def test_a_measured_plain_token_scales_what_runs_alone() -> None:
    trace = random_trace(2, [60], 3, 1, 3, right=0.6)
    slow = TickCosts(StageCosts((1.0,) * 4, 1.0), 1.0)
    fast = TickCosts(StageCosts((1.0,) * 4, 1.0), 1.0, plain=2.5)
    draft = imagined_draft(trace, (0.7,))
    ways = [{way.name: way for way in compare(trace, (2, 4), costs, draft=draft).ways} for costs in (slow, fast)]
    for name in ways[0]:
        ratio = ways[0][name].token / ways[1][name].token
        lanes = name in ("depth exploration", "both") or name.startswith("pipelining")
        assert ratio == pytest.approx(1.0 if lanes else 2.0), name


def test_an_imagined_draft_is_right_as_often_as_asked() -> None:
    trace = random_trace(3, [20000], 1, 1, 50)
    draft = imagined_draft(trace, (0.8, 0.6, 0.5), seed=1)
    right = np.stack([draft[:-3, m] == trace.final[m : len(trace) - 3 + m] for m in range(3)], axis=1)
    assert right[:, 0].mean() == pytest.approx(0.8, abs=0.02)
    assert right[right[:, 0], 1].mean() == pytest.approx(0.6, abs=0.02)
    assert right[right[:, :2].all(axis=1), 2].mean() == pytest.approx(0.5, abs=0.02)
    assert not (right[:, 2] & ~right[:, 0]).any()


@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([1, 3]))
def test_the_search_finds_what_trying_all_sets_finds(seed: int, devices: int, ranks: int) -> None:
    trace = random_trace(seed, [25, 25], 7, ranks, 5, right=0.5)
    costs = random_costs(seed, 8)
    everything = dex_plan.plan(trace, costs, 4, devices)
    assert all(one.exhaustive for one in everything)
    for one in everything:
        best = min(
            duration(p, count_nodes(p), costs, devices).token
            for early in combinations(range(1, 8), one.stages.count - 1)
            for decs in (False, True)
            for p in [replay(trace, DexStages((*early, 8), decs))]
        )
        assert one.duration.token == pytest.approx(best)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dex_plan, "EXHAUSTIVE", 0)
        searched = dex_plan.plan(trace, costs, 4, devices)
    for one, best in zip(searched, everything, strict=True):
        assert best.duration.token <= one.duration.token <= 1.05 * best.duration.token


def test_there_are_no_more_stages_than_recorded_exits_allow() -> None:
    trace = random_trace(0, [20], 2, 1, 4)
    assert [one.stages.depths for one in dex_plan.plan(trace, unit_costs(3), 9)][-1] == (1, 2, 3)


def test_costs_by_stage_are_shared_by_its_layers(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"stages": [[2, 3], [5, 6]], "head": 1, "rows": [[1, 1], [3, 2]]}')
    costs = read_costs(file, 5)
    assert costs.model == StageCosts((1.5, 1.5, 2.0, 2.0, 2.0), 1.0)
    assert costs.exit_head == 1.0
    assert costs.plain_token == 10.0
    assert costs.relative(np.array([0, 1, 2, 3, 5])).tolist() == [0.0, 1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1", "no JSON"),
        ("[]", "holds no costs"),
        ('{"layers": [1, 1]}', "holds no costs"),
        ('{"layers": [1, 1], "stages": [[2, 1]], "head": 1}', "holds no costs"),
        ('{"layers": [1, 1], "head": 1, "haed": 1}', "unknown entries: haed"),
        ('{"layers": [1, 0], "head": 1}', "positive"),
        ('{"layers": [1, 1], "head": -1}', "zero or positive"),
        ('{"layers": 2, "head": 1}', "not iterable"),
        ('{"layers": [1, 1], "head": 1, "rows": [[2, 1]]}', "rows must rise"),
        ('{"layers": [1, 1], "head": 1, "rows": [[1, 1], [2, 0.5]]}', "rows must rise"),
        ('{"layers": [1, 1], "head": 1, "rows": [[1, 1], [1e400, 2]]}', "infinity"),
        ('{"layers": [1, 1], "head": 1, "overhead": -0.5}', "overhead"),
        ('{"layers": [1, 1], "head": 1, "plain": NaN}', "plain"),
        ('{"stages": [[2, 1], [2, 1]], "head": 1}', "stages must rise"),
        ('{"layers": [1, 1, 1], "head": 1}', "the model has 2 layers"),
    ],
)
def test_costs_that_are_none(content: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(MisuseError, match=part):
        read_costs(file, 2)
