"""Replays of exit traces against a lattice walked through node by node."""

import numpy as np
import pytest
from dex_lattice import DRAFT, FALLBACK, Walk, brute_force, random_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit_calibration.errors import TooFewTokensError, TraceError
from wavekit_calibration.simulation.nodes import count_nodes
from wavekit_calibration.simulation.replay import DexStages, Replay, replay
from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader
from wavekit_engines.errors import MisuseError


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExitTrace, DexStages]:
    stages = draw(st.integers(1, 8))
    longest = 12 if stages < 6 else 8
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=3).filter(lambda found: max(found) > 1))
    boundaries = draw(st.integers(max(stages - 1, 1), 9))
    vocabulary = draw(st.integers(1, 10))
    trace = random_trace(
        draw(st.integers(0, 2**32 - 1)),
        lengths,
        boundaries,
        draw(st.integers(1, 8)),
        vocabulary,
        draw(st.sampled_from([0.0, 0.0, 0.3])),
        draw(st.sampled_from([0.0, 0.3, 0.6, 0.9])),
    )
    early = draw(st.sets(st.integers(1, boundaries), min_size=stages - 1, max_size=stages - 1))
    exits = draw(st.none() | st.sets(st.integers(0, stages - 2), max_size=stages - 1)) if stages > 1 else None
    chosen = None if exits is None else tuple(sorted(exits))
    return trace, DexStages((*sorted(early), boundaries + 1), draw(st.booleans()), chosen)


def random_draft(trace: ExitTrace, seed: int, length: int, right: float) -> np.ndarray:
    """Chains that are right for a while, then anything, and sometimes short."""
    rng = np.random.default_rng(seed)
    n = len(trace)
    draft = rng.integers(0, 4, (n, length)).astype(np.int32)
    ahead = np.minimum(np.arange(n)[:, None] + np.arange(length), n - 1)
    draft = np.where(rng.random((n, length)) < right, trace.final[ahead], draft)
    draft[np.arange(length) >= rng.integers(0, 2 * length + 1, n)[:, None]] = -1
    return draft.astype(np.int32)


def compare(trace: ExitTrace, found: Replay, walks: list[Walk]) -> None:
    stages = found.stages.count
    counts = count_nodes(found)
    assert [token for walk in walks for token in walk.text] == trace.final.tolist()
    assert found.ticks == sum(walk.ticks for walk in walks)
    offsets = np.cumsum([0, *(walk.ticks for walk in walks)]).tolist()
    walked = [tick + offset for walk, offset in zip(walks, offsets, strict=False) for tick in walk.commit_ticks]
    assert (found.starts + stages - 1).tolist() == walked
    names = {FALLBACK: stages - 1, DRAFT: stages}
    assert found.origins.tolist() == [names.get(origin, origin) for walk in walks for origin in walk.origins]
    assert counts.rows.T.tolist() == [row for walk in walks for row in walk.rows]
    assert counts.live.tolist() == [live for walk in walks for live in walk.live]
    assert counts.explored == sum(walk.explored for walk in walks)
    asked = found.drafted.asked.tolist() if found.drafted is not None else []
    assert asked == [t + offset for walk, offset in zip(walks, offsets, strict=False) for t in walk.asked]


@settings(max_examples=1000, deadline=None)
@given(cases())
def test_exits_alone_tick_for_tick_and_node_for_node(case: tuple[ExitTrace, DexStages]) -> None:
    trace, stages = case
    found = replay(trace, stages)
    compare(trace, found, brute_force(trace, stages.depths, stages.decs, set(stages.proposing)))
    assert count_nodes(found).peak_live <= 2**stages.count - 1
    assert found.ticks == (found.origins + 1).sum()
    assert found.speedup == pytest.approx(stages.count / np.mean(found.origins + 1))


@settings(max_examples=1000, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_the_hybrid_tick_for_tick_and_node_for_node(
    case: tuple[ExitTrace, DexStages], seed: int, length: int, right: float
) -> None:
    trace, stages = case
    draft = random_draft(trace, seed, length, right)
    walks = brute_force(trace, stages.depths, stages.decs, set(stages.proposing), draft)
    compare(trace, replay(trace, stages, draft), walks)


@pytest.mark.parametrize("stages", range(1, 9))
def test_live_nodes_reach_two_to_the_stages_less_one(stages: int) -> None:
    n = 3 * stages
    candidates = np.arange(1, max(stages, 2), dtype=np.int32)  # no two exits agree, and none is right
    candidates = np.broadcast_to(candidates[None, :, None], (n, len(candidates), 1))
    boundaries = candidates.shape[1]
    header = TraceHeader(boundaries + 1, tuple(range(1, boundaries + 1)))
    trace = ExitTrace(header, candidates, np.zeros(n, np.int32), np.zeros(1, np.int64))
    depths = (*range(1, stages), boundaries + 1)
    for decs in (False, True):
        counts = count_nodes(replay(trace, DexStages(depths, decs)))
        assert counts.peak_live == 2**stages - 1
        assert counts.rows[:, stages - 1].sum() == 2 ** (stages - 1)


@given(cases())
def test_with_every_depth_explored_a_token_takes_its_first_right_depth(case: tuple[ExitTrace, DexStages]) -> None:
    trace, _ = case
    every = (*trace.header.boundaries, trace.num_layers)
    found = replay(trace, DexStages(every))
    agrees = np.concatenate([trace.candidates[:, :, 0] == trace.final[:, None], np.ones((len(trace), 1), bool)], axis=1)
    first = np.array(every)[np.argmax(agrees, axis=1)]
    first[trace.is_last] = trace.num_layers
    assert found.ticks == first[~trace.is_first].sum()


@given(cases(), st.integers(0, 2**32 - 1))
def test_a_silent_draft_changes_nothing(case: tuple[ExitTrace, DexStages], length: int) -> None:
    trace, stages = case
    silent = np.full((len(trace), 1 + length % 3), -1, dtype=np.int32)
    found, plain = replay(trace, stages, silent), replay(trace, stages)
    assert (found.ticks, found.origins.tolist()) == (plain.ticks, plain.origins.tolist())
    assert (count_nodes(found).rows == count_nodes(plain).rows).all()
    assert (count_nodes(found).live == count_nodes(plain).live).all()


def test_one_stage_with_a_perfect_draft_commits_all_it_drafts_and_one_more() -> None:
    trace = random_trace(0, [22], 1, 1, 5)
    ahead = np.minimum(np.arange(22)[:, None] + np.arange(4), 21)
    found = replay(trace, DexStages((2,)), trace.final[ahead])
    assert found.ticks == 5  # 21 tokens, 5 a tick
    assert found.commits.tolist() == [5, 16]


@pytest.mark.parametrize("depths", [(), (3, 2, 10), (0, 10), (2, 2, 10), (2, 5), (2, 11)])
def test_impossible_depths_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(MisuseError, match="must rise"):
        replay(random_trace(0, [4], 9, 1, 5), DexStages(depths))


def test_depths_that_were_not_recorded_are_refused() -> None:
    trace = random_trace(0, [4], 9, 1, 5)
    header = TraceHeader(20, (2, 4, 6, 8, 10, 12, 14, 16, 18))
    with pytest.raises(TraceError, match="no exit was recorded at boundary 5, only at 2, 4"):
        replay(ExitTrace(header, trace.candidates, trace.final, trace.starts), DexStages((5, 20)))


def test_nothing_to_decode_is_refused() -> None:
    with pytest.raises(TooFewTokensError, match="nothing to decode"):
        replay(random_trace(0, [1, 1], 3, 1, 5), DexStages((2, 4)))
