"""The curve of pass costs, and the tree sizes that follow from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit.decoding.budget import Budget
from wavekit.decoding.pass_costs import MEASURED, PassCosts

seconds = st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=len(MEASURED))
chances = st.lists(st.floats(0, 1), max_size=63)


@given(seconds)
def test_measured_sizes_cost_what_they_took_and_never_more_than_longer_passes(measured) -> None:
    costs = PassCosts(measured)
    assert len(costs.seconds) == MEASURED[-1]
    assert (np.diff(costs.seconds) >= 0).all()
    for number, rows in enumerate(MEASURED[: len(measured)]):
        assert costs.of(rows) == pytest.approx(min(measured[number:]))
    assert costs.relative(1) == 1
    assert costs.of(2 * MEASURED[-1]) == pytest.approx(2 * costs.of(MEASURED[-1]))


def test_between_and_beyond_what_was_measured_costs_go_on_straight() -> None:
    costs = PassCosts([1.0, 1.0, 2.0, 2.0, 4.0])  # 1, 2, 3, 4 and 6 rows
    assert costs.of(5) == pytest.approx(3.0)
    assert costs.of(16) == pytest.approx(4.0 + 10 * 1.0)


@pytest.mark.parametrize(("base", "slope"), [(0.002, 0.0005), (0.0001, 0.0), (0.06, 0.01), (0.5, 0.0)])
def test_measuring_finds_the_slope_and_ends_soon(base: float, slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, noise, ran = 0.0, iter([1.0, 1.7, 1.0, 2.5] * 50), list[int]()

    def run(rows: int) -> None:
        nonlocal now
        ran.append(rows)
        now += (base + slope * rows) * (next(noise) if base < 0.01 else 1)

    monkeypatch.setattr("wavekit.decoding.pass_costs.perf_counter", lambda: now)
    costs = PassCosts.measure(run)
    for rows in (2, 4, 8, 64):
        assert costs.relative(rows) == pytest.approx((base + slope * rows) / (base + slope), rel=0.01)
    assert max(ran) >= 4  # as many sizes as a slope needs, where passes are slow
    assert now < max(1.0, 12.1 * (base + 4 * slope))


@pytest.mark.parametrize("begins", [0.0, 0.1, 0.25])
def test_what_other_processes_do_for_a_while_is_no_cost(begins: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run(rows: int) -> None:
        nonlocal now
        now += (0.01 + 0.002 * rows) * (4 if begins <= now < begins + 0.2 else 1)

    monkeypatch.setattr("wavekit.decoding.pass_costs.perf_counter", lambda: now)
    costs = PassCosts.measure(run)
    for rows in (1, 2, 4, 8):
        assert costs.of(rows) == pytest.approx(0.01 + 0.002 * rows)


@given(measured=seconds, chances=chances, spent=st.floats(0, 100), least=st.integers(1, 3))
def test_the_size_of_a_tree_is_the_one_with_the_most_expected_tokens_a_second(measured, chances, spent, least) -> None:
    costs, falling = PassCosts(measured), sorted(chances, reverse=True)
    rates = [
        (1 + sum(falling[:count])) / (spent + costs.of(max(count + 1, least))) for count in range(len(falling) + 1)
    ]
    count, rate = Budget(costs, least_rows=least).best(np.array(falling), spent)
    assert rate == pytest.approx(max(rates))
    assert rates[count] == pytest.approx(rate)


def test_a_second_row_is_free_where_a_pass_has_two_anyway() -> None:
    costs = PassCosts([1.0, 1.5, 2.0, 2.5])
    assert Budget(costs).best(np.array([0.2]))[0] == 0
    assert Budget(costs, least_rows=2).best(np.array([0.2]))[0] == 1


def test_flat_passes_take_wide_trees_and_steep_ones_none() -> None:
    chances = np.linspace(0.3, 0.01, 60)
    assert Budget(PassCosts([1.0] * len(MEASURED))).best(chances)[0] == 60
    assert Budget(PassCosts([1.0, 2.0, 3.0, 4.0])).best(chances)[0] == 0
