"""ELSI, ELSI-C and their checks on hidden states whose structure is known."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavekit_calibration.bootstrap import bootstrap_sets, draw_counts
from wavekit_calibration.choose import Choice, choose
from wavekit_calibration.compartments import segment
from wavekit_calibration.entropy import PurityScorer, SpectrumScorer, gram, normalise_rows
from wavekit_calibration.selection import (
    baseline_sets,
    beam_search,
    default_candidates,
    exhaustive_search,
    parse_set,
    ranked,
)
from wavekit_calibration.settings import SelectSettings
from wavekit_calibration.statistics import Statistics, compute_statistics
from wavekit_calibration.verdict import verdict
from wavekit_engines.errors import MisuseError


def silent(what: str, done: int, total: int) -> None:
    pass


def statistics_of(states: list[np.ndarray], alpha: float = 1.0) -> Statistics:
    grams = torch.stack([gram(normalise_rows(torch.from_numpy(z.astype(np.float32)))) for z in states])
    return compute_statistics(grams, alpha, silent)


def planted(runs: tuple[int, ...], widths: tuple[int, ...], tokens: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Boundaries in runs; all of a run hold the same information, rotated, and runs share nothing."""
    generator = np.random.default_rng(seed)
    states = []
    for length, width in zip(runs, widths, strict=True):
        z = generator.normal(size=(tokens, width))
        states += [z @ np.linalg.qr(generator.normal(size=(width, width)))[0] * (1 + i) for i in range(length)]
    return states


def chosen(states: list[np.ndarray], settings: SelectSettings, seed: int = 0) -> Choice:
    sequences = np.arange(len(states[0])) // 6
    settings = replace(settings, draws=25)
    return choose(statistics_of(states, settings.alpha), sequences, settings, seed, silent)


def random_walk() -> list[np.ndarray]:
    """Neighbours share most of what they hold, as in a residual stream."""
    generator = np.random.default_rng(2)
    walk = [generator.normal(size=(40, 16))]
    for k in range(9):
        walk.append(walk[-1] + generator.normal(size=(40, 16)) * np.linspace(0.1, 1 + k / 3, 16))
    return walk


EVERY = (0, 11)


def test_elsi_takes_one_boundary_from_every_run_and_the_shallowest_of_equals() -> None:
    states = planted((4, 3, 5), (20, 20, 20))
    choice = chosen(states, SelectSettings(size=3, candidates=EVERY, exhaustive=True))
    assert choice.boundaries == (0, 4, 7)
    assert choice.compartments == ((0, 3), (4, 6), (7, 11))
    assert choice.compartment_similarity == pytest.approx(1.0, abs=1e-3)
    assert choice.check is not None
    assert choice.check.gap == 0
    assert choice.check.best == (0, 4, 7)


def test_elsi_finds_the_informative_run_where_elsi_c_spreads() -> None:
    """Two different rich boundaries lie in one compartment: only ELSI may take both."""
    generator = np.random.default_rng(1)
    poor = generator.normal(size=(60, 2))
    shared, extra = generator.normal(size=(60, 12)), generator.normal(size=(2, 60, 12))
    rich = [np.concatenate([shared, extra[i]], axis=1) for i in range(2)]
    states = [poor, poor * 2, poor * 3, *rich]
    settings = {"size": 2, "candidates": (0, 4)}
    elsi = chosen(states, SelectSettings(method="elsi", **settings))
    spread = chosen(states, SelectSettings(method="elsi-c", **settings))
    assert elsi.compartments == ((0, 2), (3, 4))
    assert elsi.boundaries == (3, 4)
    assert spread.boundaries[0] == 0
    assert spread.boundaries[1] in (3, 4)
    names = {row.boundaries: row.names for row in elsi.rows}
    assert names[elsi.boundaries] == ("ELSI",)
    assert "ELSI-C" in names[spread.boundaries]


@pytest.mark.parametrize("alpha", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_beam_finds_what_exhaustive_search_finds(alpha: float, size: int) -> None:
    scorer = statistics_of(random_walk(), alpha).scorer
    best = exhaustive_search(range(10), size, scorer)[0]
    assert beam_search(range(10), size, scorer)[-1][0] == best


def test_the_beam_stays_close_where_neighbours_are_nearly_equal() -> None:
    scorer = statistics_of(random_walk()).scorer
    best = exhaustive_search(range(10), 4, scorer)[0].score
    assert best - 0.01 < beam_search(range(10), 4, scorer)[-1][0].score <= best


def test_where_the_beam_misses_the_best_set_the_gap_is_reported() -> None:
    """The best single boundary holds half of each of two others, which are best together."""
    u, v = np.random.default_rng(6).normal(size=(2, 80, 14))
    states = [np.concatenate([u[:, :9], v[:, :9]], axis=1), u, v]
    settings = SelectSettings(size=2, candidates=(0, 2))
    narrow, wide = (chosen(states, replace(settings, beam=beam)) for beam in (1, 8))
    assert 0 in narrow.boundaries
    assert wide.boundaries == (1, 2)
    assert narrow.check is not None
    assert wide.check is not None
    assert wide.check.gap == 0
    assert narrow.check.best == (1, 2)
    assert narrow.check.gap == pytest.approx(wide.by_size[-1].score - narrow.by_size[-1].score, abs=2e-6)


def test_scores_equal_to_six_decimals_are_tied_and_the_shallower_set_wins() -> None:
    sets = [(3,), (1,), (2,)]
    order = ranked(sets, lambda s: [1.0 + 1e-8 * b[0] for b in s])
    assert [s.boundaries for s in order] == [(1,), (2,), (3,)]


def test_both_paths_choose_the_same_sets_at_order_two() -> None:
    statistics = statistics_of(planted((3, 3, 3), (5, 9, 14), seed=5), 2.0)
    fast = exhaustive_search(range(9), 3, PurityScorer(statistics.frobenius))
    slow = exhaustive_search(range(9), 3, statistics.scorer)
    assert [s.boundaries for s in fast] == [s.boundaries for s in slow]
    assert [s.score for s in fast] == pytest.approx([s.score for s in slow], abs=1e-6)


@given(st.integers(2, 8), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_compartments_are_the_best_of_all_cuts(size: int, count: int, seed: int) -> None:
    count = min(count, size)
    raw = np.random.default_rng(seed).uniform(-1, 1, size=(size, size))
    similarity = (raw + raw.T) / 2

    def objective(edges: tuple[int, ...]) -> float:
        return sum(similarity[a:b, a:b].sum() / (b - a) for a, b in pairwise(edges)) / size

    runs, found = segment(similarity, count)
    best = max(objective((0, *cut, size)) for cut in combinations(range(1, size), count - 1))
    assert found == pytest.approx(best, abs=1e-7)
    assert objective((0, *(r.stop for r in runs))) == pytest.approx(best, abs=1e-7)
    assert [i for r in runs for i in r] == list(range(size))


def test_baselines_are_the_rules_in_use() -> None:
    assert baseline_sets(30) == {"last": (29,), "eagle3": (2, 15, 27)}
    assert baseline_sets(36) == {"last": (35,), "eagle3": (2, 18, 33)}
    assert baseline_sets(5) == {"last": (4,)}  # 2, 2, 2 is no set
    assert baseline_sets(1) == {}
    assert default_candidates(4) == [1, 2, 3]


def test_every_set_stands_in_the_table_once_with_all_its_names() -> None:
    states = planted((4, 3, 5), (20, 20, 20))
    choice = chosen(states, SelectSettings(candidates=EVERY, user_sets=((0, 4, 7), (1, 2, 3))))
    rows = {row.boundaries: row for row in choice.rows}
    assert len(rows) == len(choice.rows)
    assert rows[(0, 4, 7)].names == ("ELSI", "ELSI-C", "yours 1")
    assert rows[(1, 2, 3)].names == ("yours 2",)
    assert rows[(2, 5, 8)].names[0] == "EAGLE-3 rule"
    assert rows[(10,)].names == ("last but one",)
    scores = [round(row.score, 6) for row in choice.rows]
    assert scores == sorted(scores, reverse=True)


def test_bootstrap_counts_a_sequence_as_often_as_it_is_drawn() -> None:
    """Against the direct way: repeat the tokens and compute the entropy of the larger set."""
    generator = np.random.default_rng(3)
    sequences = np.array([0, 0, 1, 1, 1, 2, 2, 3])
    rows = [normalise_rows(torch.from_numpy(generator.normal(size=(8, 5)))) for _ in range(2)]
    stack = torch.stack([gram(r) for r in rows])
    counts = draw_counts(4, 6, seed=7)
    for alpha in (1.0, 2.0, 0.5):
        found = bootstrap_sets(stack, sequences, [(0,), (0, 1)], alpha=alpha, draws=6, seed=7)
        assert found is not None
        for draw, count in enumerate(counts):
            tokens = [t for s, times in enumerate(count) for _ in range(times) for t in np.flatnonzero(sequences == s)]
            repeated = torch.stack([gram(r[tokens]) for r in rows])
            expected = SpectrumScorer(repeated, alpha)([(0,), (0, 1)])
            assert found.scores[draw] == pytest.approx(expected, abs=1e-6)


def test_one_sequence_cannot_be_resampled() -> None:
    states = planted((2, 2), (11, 2), tokens=12)
    choice = choose(
        statistics_of(states), np.zeros(12, dtype=np.int64), SelectSettings(size=1, candidates=(0, 3)), 0, silent
    )
    assert choice.bootstrap is None
    assert {row.standard_error for row in choice.rows} == {None}
    assert "one sequence cannot tell" in verdict(choice)


def test_a_clear_difference_and_noise_are_told_apart() -> None:
    """EAGLE-3's rule on 12 boundaries is 2, 6, 9: first it misses the rich run, then all boundaries are alike."""
    generator = np.random.default_rng(4)
    poor = generator.normal(size=(60, 3))
    rich = [generator.normal(size=(60, 25)) for _ in range(3)]
    states = [poor] * 3 + rich + [poor] * 7
    assert "better than the EAGLE-3 rule beyond the noise" in verdict(chosen(states, SelectSettings()))
    alike = [poor + generator.normal(size=(60, 3)) * 1e-3 for _ in range(13)]
    assert "within noise of the chosen set" in verdict(chosen(alike, SelectSettings()))


def test_wins_are_shares_among_the_sets_of_the_chosen_size() -> None:
    states = planted((4, 3, 5), (20, 20, 20))
    choice = chosen(states, SelectSettings(candidates=EVERY))
    assert sum(row.wins for row in choice.rows if row.wins is not None) == pytest.approx(1.0)
    assert all((row.wins is None) == (len(row.boundaries) != 3) for row in choice.rows)
    assert next(row for row in choice.rows if row.boundaries == choice.boundaries).lead is None


def test_the_same_seed_gives_the_same_choice() -> None:
    states = planted((4, 3, 5), (6, 9, 20))
    first, second = (chosen(states, SelectSettings(candidates=EVERY), seed=5) for _ in range(2))
    assert first.rows == second.rows


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: beam_search([1, 2], 3, lambda s: [0.0] * len(s)),
            r"cannot choose 3 boundaries from 2 .* ask for 1 to 2",
        ),
        (lambda: chosen(planted((3,), (4,), 12), SelectSettings(candidates=(0, 9))), r"0-9 are no span .* 0-2"),
        (lambda: segment(np.eye(3), 4), "cannot cut 3 boundaries into 4"),
        (lambda: parse_set("2,x"), "numbers with commas"),
        (lambda: parse_set("2,2"), "twice"),
        (lambda: SelectSettings(alpha=0.0), "alpha must be a positive"),
        (lambda: SelectSettings(size=0), "--size must be at least 1"),
        (lambda: SelectSettings(layer_costs=(1.0,)), "the layers and the head"),
    ],
)
def test_misuse_is_one_clear_line(call: object, line: str) -> None:
    with pytest.raises(MisuseError, match=line):
        call()  # type: ignore[operator]
