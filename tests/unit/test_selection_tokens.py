"""Which positions are sampled, and which of them pass the entropy filter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_calibration.errors import TooFewTokensError
from wavekit_calibration.sample import sample_positions
from wavekit_calibration.token_filter import FilterRule, keep_tokens
from wavekit_engines.errors import MisuseError

ranges = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=20)


@given(ranges, st.integers(1, 40), st.integers(0, 3))
def test_a_sample_is_a_bounded_set_of_eligible_positions(spans: list[tuple[int, int]], size: int, seed: int) -> None:
    eligible = [(s, p) for s, (a, b) in enumerate(spans) for p in range(a, b)]
    sample = sample_positions(spans, size, seed)
    places = list(zip(sample.sequence.tolist(), sample.position.tolist(), strict=True))
    assert len(places) == min(size, len(eligible))
    assert len(set(places)) == len(places)
    assert set(places) <= set(eligible)
    assert places == sorted(places)
    assert sample.eligible == len(eligible)
    assert sorted(sample.order.tolist()) == list(range(len(places)))


def test_a_smaller_sample_is_part_of_a_larger_one_in_the_order_drawn() -> None:
    spans = [(0, 50)] * 10
    large, small = sample_positions(spans, 100, 1), sample_positions(spans, 30, 1)
    first = sorted((int(large.sequence[i]), int(large.position[i])) for i in large.order[:30])
    assert first == list(zip(small.sequence.tolist(), small.position.tolist(), strict=True))


def test_every_position_is_equally_likely() -> None:
    counts = np.zeros(40)
    for seed in range(400):
        sample = sample_positions([(0, 25), (3, 18)], 10, seed)
        np.add.at(counts, np.where(sample.sequence == 0, sample.position, 25 + sample.position - 3), 1)
    assert counts.sum() == 4000
    assert abs(counts - 100).max() < 5 * np.sqrt(100 * 0.75)


def test_the_quantile_keeps_the_uncertain_half() -> None:
    entropies = np.random.default_rng(0).permutation(np.arange(100.0))
    kept, threshold = keep_tokens(entropies, FilterRule(quantile=0.5))
    assert sorted(entropies[kept]) == list(range(50, 100))
    assert threshold == pytest.approx(49.5)
    assert len(keep_tokens(entropies, FilterRule(quantile=0.0))[0]) == 100


def test_an_absolute_entropy_keeps_what_reaches_it() -> None:
    kept, threshold = keep_tokens(np.array([0.1, 2.0, 1.0, 3.0, 1.5, 0.9]), FilterRule(quantile=None, nats=1.0))
    assert kept.tolist() == [1, 2, 3, 4]
    assert threshold == 1.0


def test_too_few_tokens_are_refused_with_their_number() -> None:
    with pytest.raises(TooFewTokensError, match="only 3 tokens were measured"):
        keep_tokens(np.zeros(3), FilterRule())
    with pytest.raises(TooFewTokensError, match=r"leaves 1 of 10 tokens .* filter less"):
        keep_tokens(np.arange(10.0), FilterRule(quantile=None, nats=8.5))


@pytest.mark.parametrize(
    ("quantile", "nats"), [(None, None), (0.5, 1.0), (1.0, None), (-0.1, None), (None, -1.0), (None, float("nan"))]
)
def test_a_rule_that_makes_no_sense_is_refused(quantile: float | None, nats: float | None) -> None:
    with pytest.raises(MisuseError):
        FilterRule(quantile, nats)
