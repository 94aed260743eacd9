"""Statistics of benchmarks against numbers worked out by hand, and the order of turns."""

import pytest

from wavekit.benchmarking.quiet import is_disturbed
from wavekit.benchmarking.runs import Run, Written, alternated, first_difference, gaps_of
from wavekit.benchmarking.spread import Spread, percentile
from wavekit.benchmarking.summary import Difference, Gaps, Parts, differences, summarize


def run(way: str, prompt: str, turn: int, written: Written, of: str = "set") -> Run:
    return Run(way, of, prompt, 10, turn, written)


def test_quartiles_and_percentiles_lie_between_sorted_values() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.75, 3.25, 4)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert Spread.of([]) is None
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)


def test_tokens_of_one_group_reach_a_reader_at_once() -> None:
    assert [*gaps_of([1.0, 1.5, 3.0], [1, 3, 2])] == [0.5, 0.0, 0.0, 1.5, 0.0]


def test_everybody_is_first_in_turn() -> None:
    order = [(turn, prompt, way) for turn, prompt, way in alternated("xy", "abc", 2)]
    assert [way for _, _, way in order] == [*"abc", *"bca", *"bca", *"cab"]
    assert [prompt for _, prompt, _ in order] == [*"xxxyyyxxxyyy"]


def test_a_summary_is_what_one_works_out_by_hand() -> None:
    plain = [
        run("plain", "p", 0, Written((1, 2, 3, 4, 5), 0.5, 4.0, 0.0, (1, 1, 1, 1), (1.0,) * 4, 8, 0.0, 3.0, 1.0)),
        run("plain", "q", 0, Written((1, 2, 3), 0.5, 2.0, 0.0, (1, 1), (1.0,) * 2, 4, 0.0, 1.5, 0.5)),
    ]
    mine = [
        run("draft", "p", 0, Written((1, 2, 3, 4, 5), 0.1, 2.0, 0.5, (3, 1), (1.0, 0.0, 0.0, 1.0), 4, 0.5, 1.0, 0.5)),
        run("draft", "q", 0, Written((1, 2, 3), 0.3, 0.5, None, (2,), (0.5, 0.0), 2, 0.1, 0.3, 0.1)),
    ]
    found = summarize(mine, plain)
    assert found.tokens_per_second == Spread(3.0, 2.5, 3.5, 2)  # 2 and 4 tokens a second
    assert found.speed == Spread(3.0, 2.5, 3.5, 2)  # plain: 1 and 1
    assert found.first_token == Spread(200.0, 150.0, 250.0, 2)
    assert found.gaps == Gaps(250.0, 1000.0, 1000.0)  # of 0, 0, 0, 0.5, 1 and 1 s
    assert found.tau == 2.0  # 6 tokens in 3 passes
    assert found.acceptance == pytest.approx((2 / 3, 1 / 3))
    assert found.ticks == 1.0
    assert found.parts == Parts(pytest.approx(100.0), pytest.approx(1300 / 6), pytest.approx(100.0))
    assert (found.runs, found.disturbed) == (2, 1)
    assert (found.prompt_tokens, found.new_tokens) == (Spread(10.0, 10.0, 10.0, 2), Spread(4.0, 3.5, 4.5, 2))
    assert summarize(plain, plain).tau == 1.0


def test_a_text_of_one_token_has_no_speed_and_an_unknown_one_no_tau() -> None:
    one = [run("plain", "p", 0, Written((1,), 0.5, 0.0, None))]
    found = summarize(one, one)
    assert (found.tokens_per_second, found.speed, found.tau, found.parts) == (None, None, None, None)


def test_texts_are_compared_with_plain_ones() -> None:
    plain = [run("plain", "p", 0, Written((1, 2, 3), 0, 1, None)), run("plain", "p", 1, Written((1, 9, 3), 0, 1, None))]
    assert differences(plain, plain, True) == [Difference("set", "p", 1)]
    shorter = [run("draft", "p", 0, Written((1, 2), 0, 1, None))]
    assert differences(shorter, plain[:1], True) == [Difference("set", "p", 2)]
    assert differences(shorter, plain[:1], False) == []
    assert first_difference([1, 2], [1, 3]) == 1


def test_others_that_keep_a_core_busy_disturb() -> None:
    assert [is_disturbed(cores) for cores in (None, 0.1, 0.2)] == [False, False, True]
