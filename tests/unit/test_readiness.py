"""Earliest available depth and exits, against definitions written out and brute force."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wavekit_calibration.errors import TooFewTokensError
from wavekit_calibration.exits import StageCosts, best_exits, even_exits, plan_for
from wavekit_calibration.readiness import measure_readiness
from wavekit_engines.errors import MisuseError

agreements = hnp.arrays(np.bool_, st.tuples(st.integers(1, 12), st.integers(3, 8)))


def depth_by_definition(agrees: np.ndarray) -> int:
    return min(k for k in range(len(agrees)) if all(agrees[k:]))


def with_final(agrees: np.ndarray) -> np.ndarray:
    agrees = agrees.copy()
    agrees[:, -1] = True
    return agrees


@given(agreements)
def test_ead_is_where_agreement_begins_to_stay(agrees: np.ndarray) -> None:
    found = measure_readiness(agrees)
    agrees = with_final(agrees)
    assert found.ead.tolist() == [depth_by_definition(row) for row in agrees]
    np.testing.assert_allclose(found.agreement, agrees.mean(axis=0))
    assert found.ready[-1] == 1.0
    assert found.histogram.sum() == len(agrees)
    assert found.oracle_saving == pytest.approx(1 - np.mean(found.ead) / (agrees.shape[1] - 1))
    assert (found.ready <= found.agreement + 1e-12).all()


def test_an_early_agreement_that_is_lost_again_does_not_count() -> None:
    found = measure_readiness(np.array([[True, False, True, True], [True, True, True, True], [False] * 4]))
    assert found.ead.tolist() == [2, 0, 3]


def simulate(agrees: np.ndarray, exits: tuple[int, ...], by_ead: bool) -> float:
    """Ticks a token, counted token by token."""
    ticks = 0
    for row in agrees:
        for j, depth in enumerate(exits):
            if depth >= depth_by_definition(row) if by_ead else row[depth]:
                ticks += j + 1
                break
    return ticks / len(agrees)


@given(agreements, st.integers(2, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_exits_are_the_best_of_all(agrees: np.ndarray, stages: int, seed: int, equal: bool) -> None:
    agrees = with_final(agrees)
    layers = agrees.shape[1] - 1
    stages = min(stages, layers)
    generator = np.random.default_rng(seed)
    costs = StageCosts(tuple([1.0] * layers if equal else generator.uniform(0.5, 3, layers).tolist()), 1.3)
    ready = measure_readiness(agrees).ready

    def time_a_token(exits: tuple[int, ...]) -> float:
        edges = (0, *exits)
        slowest = max(sum(costs.layers[a:b]) for a, b in pairwise(edges)) + costs.head
        return slowest * simulate(agrees, exits, by_ead=True)

    choices = [(*early, layers) for early in combinations(range(1, layers), stages - 1)]
    best = min(time_a_token(exits) for exits in choices)
    found = best_exits(agrees, ready, costs, stages)
    assert time_a_token(found.exits) == pytest.approx(best)
    assert found.ticks * found.tick_cost == pytest.approx(best)
    assert found.gain == pytest.approx((sum(costs.layers) + costs.head) / best)
    assert found.ticks_first_match == pytest.approx(simulate(agrees, found.exits, by_ead=False))
    assert found.ticks_first_match <= found.ticks + 1e-9


def test_tokens_ready_half_way_are_worth_two_stages() -> None:
    """Every token is ready at boundary 4 of 8, heads cost nothing: one tick of half the layers a token."""
    agrees = np.zeros((10, 9), dtype=bool)
    agrees[:, 4:] = True
    found = best_exits(agrees, measure_readiness(agrees).ready, StageCosts((1.0,) * 8, 0.0), 2)
    assert found.exits == (4, 8)
    assert found.ticks == 1.0
    assert found.gain == pytest.approx(2.0)


@pytest.mark.parametrize("stages", range(1, 9))
def test_even_exits_differ_by_one_layer_at_most(stages: int) -> None:
    for layers in range(stages, 40):
        lengths = np.diff((0, *even_exits(layers, stages)))
        assert lengths.sum() == layers
        assert lengths.min() >= 1
        assert lengths.max() - lengths.min() <= 1


def test_one_stage_is_plain_decoding() -> None:
    agrees = np.ones((3, 5), dtype=bool)
    plan = plan_for((4,), agrees, measure_readiness(agrees).ready, StageCosts((1.0,) * 4, 2.0))
    assert (plan.ticks, plan.ticks_first_match, plan.gain) == (1.0, 1.0, 1.0)


def test_misuse_is_one_clear_line() -> None:
    agrees = np.ones((3, 5), dtype=bool)
    ready = measure_readiness(agrees).ready
    with pytest.raises(MisuseError, match="has 4 layers and the layer costs name 3"):
        best_exits(agrees, ready, StageCosts((1.0,) * 3, 1.0), 2)
    with pytest.raises(MisuseError, match="cannot make 5 stages of 4 layers"):
        best_exits(agrees, ready, StageCosts((1.0,) * 4, 1.0), 5)
    with pytest.raises(MisuseError, match="positive"):
        StageCosts((1.0, 0.0), 1.0)
    with pytest.raises(MisuseError, match="zero or positive"):
        StageCosts((1.0,), -1.0)
    with pytest.raises(TooFewTokensError, match="no token"):
        measure_readiness(np.zeros((0, 5), dtype=bool))
