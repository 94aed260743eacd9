"""Drafting with an imaginary head that checks every pairing (see `fake_target`) and knows as much as a test wants."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from fake_target import SWITCH, VOCABULARY, FakeDraft, FakeExits, FakeTarget, Text, World, fake_decoder, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit.decoding import sequence_workers
from wavekit.decoding.budget import Budget
from wavekit.decoding.decoder import DecodeStats
from wavekit.decoding.draft_source import MOST_PENDING, PATIENCE, DraftSource
from wavekit.decoding.lookup import LookupSource
from wavekit.decoding.pass_costs import PassCosts
from wavekit.decoding.sequence_workers import SequenceWorkers
from wavekit.decoding.speculation import Speculation
from wavekit.decoding.speculator import Speculator

CHEAP = Budget(PassCosts([1.0, 1.05, 1.1, 1.15]), PassCosts([0.05, 0.05, 0.05, 0.05]))
STEEP = Budget(PassCosts([1.0, 2.0, 3.0, 4.0]), PassCosts([0.5, 0.6, 0.7, 0.8]))

Guess = Callable[[Text], list[tuple[int, float]]]


def knowing(world: World, rank: int, sure: float = 0.8) -> Guess:
    """A head whose guess number ``rank``, of three, is right; beyond the last, none is."""

    def guess(text: Text) -> list[tuple[int, float]]:
        right = world.next(text)
        tokens = [(right + 1) % VOCABULARY, (right + 2) % VOCABULARY, (right + 3) % VOCABULARY]
        if rank < 3:
            tokens[rank] = right
        return list(zip(tokens, (sure, (1 - sure) / 2, (1 - sure) / 3), strict=True))

    return guess


def gambling(world: World, salt: int) -> Guess:
    def guess(text: Text) -> list[tuple[int, float]]:
        draw = random.Random(f"{salt} {text}")
        tokens = draw.sample(range(VOCABULARY), 3)
        if draw.random() < 0.6 and world.next(text) not in tokens:
            tokens[draw.randrange(3)] = world.next(text)
        chances = sorted((draw.random() / 3 + 1e-3 for _ in range(3)), reverse=True)
        return list(zip(tokens, chances, strict=True))

    return guess


def drafted(decoder, prompt, count, stats=None, *, depth=5, top_k=3, tokens=20, budget=None, lookup=False) -> list[int]:
    def make(workers: SequenceWorkers) -> Speculator:
        source = DraftSource(*workers.draft(), depth, top_k, tokens, budget)
        chain = decoder.manifest.engine.precision != "fp32"
        return Speculator([*([LookupSource(8)] if lookup else []), source], budget, tokens, chain)

    return [token for tokens in decoder.decode(prompt, greedy, count, stats, make) for token in tokens]


@settings(max_examples=150)
@given(
    stages=st.integers(1, 4),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
    count=st.integers(1, 40),
    salt=st.integers(0, 50),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 25)),
    budget=st.sampled_from([None, CHEAP, STEEP]),
    precision=st.sampled_from(["fp32", "int4"]),
    lookup=st.booleans(),
    data=st.data(),
)
def test_any_draft_leaves_the_text_of_plain_decoding(
    stages, prompt, count, salt, shape, budget, precision, lookup, data
) -> None:
    world = World(salt, data.draw(st.sampled_from([None, SWITCH])))
    taps = data.draw(st.sets(st.integers(0, stages), min_size=1))
    target = FakeTarget(world, stages)
    draft = FakeDraft(target, tuple(sorted(taps)), gambling(world, salt), max_positions=data.draw(st.integers(1, 64)))
    depth, top_k, tokens = shape
    text = drafted(
        fake_decoder(target, draft, precision),
        prompt,
        count,
        depth=depth,
        top_k=1 if precision == "int4" else top_k,
        tokens=tokens,
        budget=budget,
        lookup=lookup,
    )
    assert text == world.plain(prompt, count)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("salt", range(6))
def test_deep_trees_with_many_branches_see_their_own_ancestors(salt: int, stages: int) -> None:
    world = World(salt)
    target = FakeTarget(world, stages)
    decoder = fake_decoder(target, FakeDraft(target, (1,), gambling(world, salt)))
    assert drafted(decoder, [1, 2], 30, depth=6, tokens=60) == world.plain([1, 2], 30)


@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_a_head_that_is_right_saves_all_the_passes_it_can(stages: int, depth: int) -> None:
    world, stats = World(2), DecodeStats()
    target = FakeTarget(world, stages)
    draft = FakeDraft(target, (0, stages), knowing(world, 0))
    assert drafted(fake_decoder(target, draft), [1, 2, 3], 50, stats, depth=depth) == world.plain([1, 2, 3], 50)
    assert stats.passes == -(-49 // (depth + 1))
    assert stats.ticks == stages * stats.passes


@pytest.mark.parametrize("rank", [1, 2])
def test_a_tree_helps_where_the_right_token_is_not_the_first_guess(rank: int) -> None:
    world = World(2)
    target = FakeTarget(world, 1)
    decoder = fake_decoder(target, FakeDraft(target, (1,), knowing(world, rank, sure=0.4)))
    chain, tree = DecodeStats(), DecodeStats()
    for stats, top_k in ((chain, 1), (tree, 3)):
        assert drafted(decoder, [1, 2, 3], 41, stats, top_k=top_k) == world.plain([1, 2, 3], 41)
    assert chain.passes == 40
    assert tree.passes <= 20


def test_a_head_that_is_wrong_saves_nothing() -> None:
    world, stats = World(2), DecodeStats()
    target = FakeTarget(world, 2)
    draft = FakeDraft(target, (1, 2), knowing(world, 3))
    assert drafted(fake_decoder(target, draft), [1], 30, stats) == world.plain([1], 30)
    assert (stats.passes, sum(stats.speculation.accepted_at)) == (29, 0)


@pytest.mark.parametrize("chunk", [1, 2, 7, 30])
def test_a_prompt_in_chunks_feeds_the_head_every_pair_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceWorkers.prefill, "__defaults__", (chunk, SequenceWorkers.prefill.__defaults__[1]))
    world = World(4)
    target = FakeTarget(world, 3)
    draft = FakeDraft(target, (0, 2, 3), knowing(world, 0))
    prompt = [token % VOCABULARY for token in range(30)]
    assert drafted(fake_decoder(target, draft), prompt, 10, depth=4) == world.plain(prompt, 10)
    # 29 pairs of the prompt, one that the first token completed, four or five of every pass after it.
    assert sum(fed for fed, _ in draft.steps) == 29 + 1 + 5


def test_committed_tokens_are_fed_in_one_pass_and_grown_rows_are_dropped() -> None:
    world = World(4)
    target = FakeTarget(world, 1)
    draft = FakeDraft(target, (1,), knowing(world, 0))
    drafted(fake_decoder(target, draft), [1, 2, 3], 17, depth=3, top_k=2)
    assert draft.steps[0] == (2, 0)
    trees = [draft.steps[1 + tree * 3 : 4 + tree * 3] for tree in range(4)]
    assert trees == [[(1, 0), (0, 2), (0, 2)]] + [[(4, 0), (0, 2), (0, 2)]] * 3


def test_a_head_that_does_not_pay_is_tried_now_and_then() -> None:
    world, stats = World(2), DecodeStats()
    target = FakeTarget(world, 1, context=400)
    draft = FakeDraft(target, (1,), knowing(world, 3))
    assert drafted(fake_decoder(target, draft), [1], 300, stats, budget=STEEP) == world.plain([1], 300)
    feeds = [fed for fed, _ in draft.steps if fed]
    assert PATIENCE + 1 in feeds
    assert 300 // (PATIENCE + 1) - 1 <= len(feeds) <= 30
    assert stats.speculation.silent["does not pay"] > 200
    assert sum(feeds) >= 300 - PATIENCE - 2


def test_a_head_that_comes_to_pay_is_used_again() -> None:
    world, stats = World(2), DecodeStats()
    target = FakeTarget(world, 1, context=400)
    wrong, right = knowing(world, 3), knowing(world, 0, sure=0.95)
    draft = FakeDraft(target, (1,), lambda text: right(text) if len(text) > 100 else wrong(text))
    budget = Budget(PassCosts([1.0, 1.1, 1.2, 1.3]), PassCosts([0.1] * 4))
    assert drafted(fake_decoder(target, draft), [1], 390, stats, budget=budget) == world.plain([1], 390)
    assert stats.passes < 100 + 290 / 2


def test_pairs_do_not_pile_up_while_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavekit.decoding.draft_source.PATIENCE", 10**9)
    world, most = World(2), MOST_PENDING
    target = FakeTarget(world, 1, context=1000)
    draft = FakeDraft(target, (1,), knowing(world, 3))
    budget = Budget(PassCosts([1.0, 9.0, 18.0, 27.0]), PassCosts([9.0] * 4))
    assert drafted(fake_decoder(target, draft), [1], 900, budget=budget) == world.plain([1], 900)
    assert {fed for fed, _ in draft.steps} == {most}


def test_beyond_its_context_the_head_is_left_alone() -> None:
    world, stats = World(2), DecodeStats()
    target = FakeTarget(world, 1, context=100)
    draft = FakeDraft(target, (1,), knowing(world, 0), max_positions=38)
    assert drafted(fake_decoder(target, draft), [1], 80, stats, depth=4) == world.plain([1], 80)
    # Seven passes of five tokens, one of four that ends with pair 37, and the rest without a draft.
    assert stats.passes == 7 + 1 + 40
    assert stats.speculation.silent == {"beyond the draft's context": 39, "end of text": 1}
    assert draft.last_position == 37


@pytest.mark.parametrize(("sure", "budget", "least", "most"), [(0.99, CHEAP, 4, 5.1), (0.55, STEEP, 0, 1.0)])
def test_trees_are_as_large_as_they_pay(sure: float, budget: Budget, least: float, most: float) -> None:
    world, stats = World(7), DecodeStats()
    target = FakeTarget(world, 1, context=200)
    draft = FakeDraft(target, (1,), knowing(world, 0, sure))
    assert drafted(fake_decoder(target, draft), [1], 150, stats, budget=budget) == world.plain([1], 150)
    a_pass = stats.speculation.proposed / stats.passes
    assert least <= a_pass <= most


def test_a_failing_head_spoils_nothing_for_the_next_text() -> None:
    world = World(2)
    target = FakeTarget(world, 1)

    def guess(text: Text) -> list[tuple[int, float]]:
        if len(text) == 20 and broken:
            raise ZeroDivisionError
        return knowing(world, 0)(text)

    broken = True
    decoder = fake_decoder(target, FakeDraft(target, (1,), guess))
    with pytest.raises(ZeroDivisionError):
        drafted(decoder, [1], 50)
    broken = False
    assert drafted(decoder, [1], 50) == world.plain([1], 50)
    assert np.array_equal(drafted(decoder, [2, 3], 40), world.plain([2, 3], 40))


@pytest.mark.parametrize("max_positions", [300, 1000])
def test_a_draft_drafts_again_after_exits_have_left_it_nothing_to_propose(
    max_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_workers, "PREFILL_CHUNK", 8)  # less room for rows that nobody has read
    world, stats = World(3), DecodeStats()
    target = FakeTarget(world, 2, context=500)

    def exit_guess(text: Text, stage: int) -> list[tuple[int, float]]:
        wrong = len(text) > 400
        return [((world.next(text) + wrong) % VOCABULARY, 0.9)]

    draft = FakeDraft(target, (0, 2), knowing(world, 0), max_positions=max_positions)
    decoder = fake_decoder(target, draft, "int4", FakeExits(target, (0,), exit_guess, top_k=1))
    make = decoder.speculator(Speculation("draft+exits", adaptive=False))
    text = [token for tokens in decoder.decode([1, 2, 3], greedy, 450, stats, make) for token in tokens]
    assert text == world.plain([1, 2, 3], 450)
    assert stats.speculation.silent["proposed already"] > 300
    assert (sum(stats.speculation.accepted_at) > 40) == (max_positions == 1000)
