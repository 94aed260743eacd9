"""The search for the fastest setting, on times that were made up: what is slower than plain decoding never wins."""

import random
from collections.abc import Sequence

import pytest
from fake_times import FakeTimes
from hypothesis import given
from hypothesis import strategies as st

from wavekit.decoding.speculation import Speculation
from wavekit.profiles import Setting
from wavekit.tuning.candidates import described, thread_settings
from wavekit.tuning.search import TIE, Search

PLAIN = Setting(2, 1, Speculation("off"))


def settings(count: int) -> list[Setting]:
    return [Setting(2, 1, Speculation("draft", tokens=number + 1)) for number in range(count)]


def decided(costs: Sequence[float], noise: float = 0.0, seed: int = 0, until: float = 1e9) -> Setting | None:
    """What is chosen where plain decoding takes 1 and the others ``costs``, give or take."""
    table = {PLAIN: 1.0, **dict(zip(settings(len(costs)), costs, strict=True))}
    draw = random.Random(seed)
    source = FakeTimes(lambda setting, prompt, _: table[setting] * (1 + prompt) * (1 + noise * draw.random()))
    search = Search(source, source.clock)
    found = search.halve("modes", PLAIN, settings(len(costs)), until)
    chosen = search.decide(PLAIN, [trial.setting for trial in found[:3]], until)
    return chosen.setting if chosen is not None else None


def test_the_fastest_is_chosen() -> None:
    assert decided([1.2, 0.7, 0.9, 0.5, 0.8, 0.6]) == settings(4)[3]


@given(st.lists(st.floats(1 / TIE, 3.0), min_size=1, max_size=9))
def test_what_is_not_faster_than_plain_decoding_is_never_chosen(costs: list[float]) -> None:
    assert decided(costs) is None


@given(st.lists(st.floats(1.6, 3.0), min_size=1, max_size=6), st.integers(0, 1000))
def test_nor_is_it_when_times_are_noisy(costs: list[float], seed: int) -> None:
    assert decided(costs, noise=0.5, seed=seed) is None


def test_a_mode_that_only_began_well_is_not_chosen() -> None:
    fast = settings(1)[0]
    source = FakeTimes(lambda setting, _, before: 1.0 if setting == PLAIN else 0.5 if before < 8 else 1.3)
    search = Search(source, source.clock)
    assert [trial.setting for trial in search.halve("modes", PLAIN, [fast], 1e9)] == [fast]
    for _ in range(2):
        search._one_turn(PLAIN, search.trials)
    assert search.decide(PLAIN, [fast], 1e9) is None
    assert search.trials[-1].outcome == "no gain"


def test_one_slow_round_is_doubt_enough() -> None:
    source = FakeTimes(lambda setting, _, before: 1.0 if setting == PLAIN else 0.9 if before < 16 else 1.1, prompts=4)
    assert Search(source, source.clock).decide(PLAIN, settings(1), 1e9) is None


def test_what_writes_another_text_is_thrown_out_however_fast() -> None:
    good, wrong = settings(2)
    source = FakeTimes(lambda setting, *_: {PLAIN: 1.0, good: 0.8, wrong: 0.1}[setting])
    source.other_text = {wrong}
    search = Search(source, source.clock)
    found = search.halve("modes", PLAIN, [good, wrong], 1e9)
    assert [trial.setting for trial in found] == [good]
    assert [trial.outcome for trial in search.trials] == ["measured", "another text"]
    chosen = search.decide(PLAIN, [wrong, good], 1e9)
    assert chosen is not None
    assert chosen.setting == good


def test_halving_spends_its_time_on_the_better_ones() -> None:
    many = settings(8)
    source = FakeTimes(lambda setting, *_: 1.0 if setting == PLAIN else 1 + many.index(setting), prompts=16)
    Search(source, source.clock).halve("modes", PLAIN, many, 1e9)
    texts = [sum(setting == asked for asked, _ in source.asked) for setting in (PLAIN, *many)]
    assert texts == [2 + 4 + 8 + 16, 30, 14, 6, 6, 2, 2, 2, 2]
    assert source.kept == [PLAIN, many[0]]


def test_everybody_is_first_in_turn_and_sees_the_same_prompts() -> None:
    one, two = settings(2)
    source = FakeTimes(lambda *_: 1.0, prompts=3)
    Search(source, source.clock).halve("modes", PLAIN, [one, two], 1e9)
    firsts = [setting for setting, _ in source.asked[:6:3]]
    assert firsts == [PLAIN, one]
    assert [prompt for _, prompt in source.asked[:6]] == [0, 0, 0, 1, 1, 1]


def test_time_that_runs_out_leaves_plain_decoding_or_a_decision_on_every_prompt() -> None:
    assert decided([0.5, 0.6], until=0.0) is None
    source = FakeTimes(lambda setting, *_: 1.0 if setting == PLAIN else 0.5, prompts=6)
    chosen = Search(source, source.clock).decide(PLAIN, settings(1), 0.0)
    assert chosen is not None
    assert (len(chosen.pairs), chosen.total, chosen.outcome) == (6, 2.0, "chosen")


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [2, 1]), (4, [4, 3, 2, 1]), (16, [16, 8, 4, 2, 1])])
def test_threads_are_tried_down_to_one(cores: int, counts: list[int]) -> None:
    assert [setting.threads for setting in thread_settings(cores)] == counts


def test_a_setting_is_told_in_words() -> None:
    speculation = Speculation("draft+exits", depth=2, exits=(4, 8), least_probability=0.2, decs=False)
    assert described(Setting(1, 2, speculation)) == (
        "draft+exits, depth 2, least probability 0.2, exits 4,8, no decs, 2 lanes x 1 thread"
    )
    assert described(PLAIN) == "plain, 2 threads"
