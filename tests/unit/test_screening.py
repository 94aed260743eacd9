"""The 8-bit copy of a vocabulary table never strays further from it than it says."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit_engines.screening import COARSENESS, DIGIT, HALF, RESIDUE, STEPS, Screen, rounding_bound


@dataclass
class Table:
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.array[start:stop]


def screened(table: np.ndarray) -> tuple[Screen, np.ndarray]:
    screen = Screen(Table(table))
    return screen, np.concatenate(list(screen.values()))


def _spread(screen: Screen) -> np.ndarray:
    return 1 / screen.inverse.astype(np.float64)


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, width = draw(st.integers(1, 300)), draw(st.sampled_from((1, 5, 64, 200)))
    rows = rng.standard_normal((count, width)) + draw(st.sampled_from((0, 1, 100))) * rng.standard_normal(width)
    rows *= 10.0 ** rng.uniform(-12, draw(st.sampled_from((-12, 12))), (count, 1))
    rows *= 10.0 ** rng.uniform(0, draw(st.sampled_from((0, 4))), width)
    rows[rng.random((count, width)) < draw(st.sampled_from((0, 0, 0.9)))] = 0
    return rows.astype(np.float32)


@given(tables(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_logit_is_further_from_its_approximation_than_the_bound(table: np.ndarray, seed: int) -> None:
    screen, values = screened(table)
    x = np.random.default_rng(seed).standard_normal(table.shape[1])
    errors = table.astype(np.float64) - screen.mean / _spread(screen)
    kept = values * screen.scales[:, None].astype(np.float64)
    for direction in (x, errors[seed % len(table)]):  # the second is as bad as rounding errors can be
        y = direction / _spread(screen)
        true, approximate = errors @ direction, kept @ y
        assert (np.abs(true - approximate) <= screen.errors * np.linalg.norm(y)).all()


@given(tables())
@settings(max_examples=40, deadline=None)
def test_neither_a_rounding_error_nor_what_it_is_weighed_against_is_longer_than_the_bound(table: np.ndarray) -> None:
    screen, values = screened(table)
    spread = _spread(screen)
    kept = values * screen.scales[:, None].astype(np.float64)
    lost = (table.astype(np.float64) - screen.mean / spread) * spread - kept
    assert (np.linalg.norm(lost, axis=1) <= screen.errors).all()
    assert (np.linalg.norm(kept, axis=1) <= COARSENESS * screen.errors).all()


@given(tables(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_two_float32_sums_of_a_logit_differ_by_no_more_than_the_noise(table: np.ndarray, seed: int) -> None:
    screen, _ = screened(table)
    x = np.random.default_rng(seed).standard_normal(table.shape[1]).astype(np.float32)
    forwards, backwards = (np.cumsum(table[:, ::step] * x[::step], axis=1, dtype=np.float32)[:, -1] for step in (1, -1))
    length = np.linalg.norm(x * screen.inverse.astype(np.float64))
    assert (np.abs(forwards.astype(np.float64) - backwards) <= screen.noise * length).all()


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50))
def test_two_digits_hold_a_row_to_half_a_step(row: list[float]) -> None:
    y = np.array(row, np.float32)
    largest = np.maximum(np.abs(y).max(), np.float32(1e-12))
    whole = np.rint(y * (np.float32(STEPS) / largest))
    high = np.rint(whole * np.float32(1 / DIGIT))
    low = whole - high * DIGIT
    assert max(np.abs(high).max(), np.abs(low).max()) <= HALF
    left = y.astype(np.float64) - (DIGIT * high + low) * (float(largest) / STEPS)
    assert np.abs(left).max() <= RESIDUE * float(largest) / STEPS


def test_ordinary_rows_are_told_apart_at_eight_bits() -> None:
    """The error of a row of noise is about 0.9 % of its length: rounding to 1 / 127 of its largest entry."""
    table = np.random.default_rng(0).standard_normal((500, 576)).astype(np.float32)
    screen, _ = screened(table)
    assert np.median(screen.errors / np.linalg.norm(table, axis=1)) == pytest.approx(0.009, rel=0.15)
    assert np.median(screen.noise / np.linalg.norm(table, axis=1)) == pytest.approx(2 * rounding_bound(576), rel=0.01)


def test_features_of_very_different_spread_cost_no_precision() -> None:
    table = np.random.default_rng(0).standard_normal((500, 576)).astype(np.float32)
    loud = table * np.where(np.arange(576) % 7, 1, 256).astype(np.float32) + np.float32(50)
    plain, (screen, _) = screened(table)[0], screened(loud)
    typical = np.median(screen.errors - 2 * rounding_bound(576) * np.linalg.norm(loud / screen.inverse, axis=1))
    assert typical < 1.3 * np.median(plain.errors)


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_a_table_beyond_float32_says_so(value: float) -> None:
    table = np.full((40, 8), value, np.float32)
    table[::2] *= -1
    screen, _ = screened(table)
    assert screen.largest == np.inf
