"""Whatever is proposed, a text is the one that plain decoding writes; only how many passes it takes may differ."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_target import SWITCH, VOCABULARY, FakeTarget, World, fake_decoder, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit.decoding.budget import Budget
from wavekit.decoding.decoder import DecodeStats
from wavekit.decoding.lattice import LATTICE_ROWS
from wavekit.decoding.pass_costs import PassCosts
from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit.decoding.sources import ANCHOR, Candidates
from wavekit.decoding.speculation import MOST_TOKENS, Silence
from wavekit.decoding.speculator import Speculator


@dataclass
class Oracle:
    """A source that knows what comes, and proposes ``depth`` tokens of it; a wrong one, where it is told to lie."""

    world: World
    depth: int
    lies: bool = False
    learned: list[list[int]] = field(default_factory=list)

    def follow(self, text: Sequence[int]) -> None:
        pass

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        parent, path = ANCHOR, tuple(text)
        for _ in range(min(self.depth, candidates.depth)):
            token = (self.world.next(path) + self.lies) % VOCABULARY
            parent, path = candidates.add(parent, token, 1.0), (*path, token)
        return None

    def skip(self, text: Sequence[int]) -> None:
        pass

    def learn(self, committed: Sequence[int]) -> None:
        self.learned.append(list(committed))


@dataclass
class Gambler:
    """A source that proposes any tree, by numbers that a test draws; often right, since it knows what comes."""

    world: World
    numbers: Sequence[int]
    at: int = 0

    def follow(self, text: Sequence[int]) -> None:
        pass

    def draw(self, below: int) -> int:
        self.at += 1
        return self.numbers[self.at % len(self.numbers)] % below

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        paths: list[tuple[int, tuple[int, ...], float]] = [(ANCHOR, tuple(text), 1.0)]
        for _ in range(self.draw(12)):
            parent, path, chance = paths[self.draw(len(paths))]
            if len(path) - len(text) < candidates.depth:
                token = self.world.next(path) if self.draw(2) else self.draw(VOCABULARY)
                chance *= (1 + self.draw(4)) / 4
                paths.append((candidates.add(parent, token, chance), (*path, token), chance))
        return None

    def skip(self, text: Sequence[int]) -> None:
        pass

    def learn(self, committed: Sequence[int]) -> None:
        assert committed


def written(decoder, prompt, count, sources, stats=None, **options) -> list[int]:
    budget = options.pop("budget", None)
    chain = decoder.manifest.engine.precision != "fp32"
    make = None if sources is None else lambda workers: Speculator(sources, budget, chain=chain)
    ticks = decoder.decode(prompt, greedy, count, stats, make, **options)
    return [token for tokens in ticks for token in tokens]


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
numbers = st.lists(st.integers(0, 1000), min_size=1, max_size=200)


@settings(max_examples=300)
@given(
    stages=st.integers(1, 4),
    precision=st.sampled_from(["fp32", "int4"]),
    prompt=prompts,
    count=st.integers(1, 40),
    salt=st.integers(0, 99),
    draws=st.lists(numbers, min_size=1, max_size=3),
    weighed=st.booleans(),
)
def test_any_trees_leave_the_text_of_plain_decoding(stages, precision, prompt, count, salt, draws, weighed) -> None:
    world = World(salt)
    target = FakeTarget(world, stages)
    decoder, stats = fake_decoder(target, precision=precision), DecodeStats()
    sources = [Gambler(world, numbers) for numbers in draws]
    budget = Budget(PassCosts([1.0, 1.1, 1.2, 1.4])) if weighed else None
    assert written(decoder, prompt, count, sources, stats, budget=budget) == world.plain(prompt, count)
    assert stats.ticks == stages * stats.passes
    counts = stats.speculation
    assert stats.passes + sum(counts.accepted_at) == count - 1
    assert sum(counts.silent.values()) + (counts.proposed_at[0] if counts.proposed_at else 0) == stats.passes
    assert min(target.rows[1:], default=2) >= (2 if precision == "int4" else 1)


@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize("depth", [0, 1, 3, 7])
def test_what_is_known_to_come_is_committed_at_once(stages: int, depth: int) -> None:
    world, stats = World(3), DecodeStats()
    source = Oracle(world, depth)
    decoder = fake_decoder(FakeTarget(world, stages))
    assert written(decoder, [1, 2], 40, [source], stats) == world.plain([1, 2], 40)
    assert stats.passes == -(-39 // (depth + 1))
    assert stats.ticks == stages * stats.passes
    # The source is told all of it but the first token, which the prompt's pass gave.
    assert [token for tokens in source.learned for token in tokens] == world.plain([1, 2], 40)[1:]


@pytest.mark.parametrize("stages", range(1, 5))
def test_lies_save_nothing_and_change_nothing(stages: int) -> None:
    world, stats = World(3), DecodeStats()
    decoder = fake_decoder(FakeTarget(world, stages))
    assert written(decoder, [1, 2], 30, [Oracle(world, 5, lies=True)], stats) == world.plain([1, 2], 30)
    assert stats.passes == 29
    assert sum(stats.speculation.accepted_at) == 0


def test_one_source_may_be_wrong_where_another_is_right() -> None:
    world, stats = World(3), DecodeStats()
    sources = [Oracle(world, 5, lies=True), Oracle(world, 3)]
    assert written(fake_decoder(FakeTarget(world, 2)), [4], 41, sources, stats) == world.plain([4], 41)
    assert stats.passes == 10


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("count", range(1, 12))
def test_a_text_ends_at_its_limit_inside_an_accepted_run(stages: int, count: int) -> None:
    world = World(5)
    target = FakeTarget(world, stages)
    assert written(fake_decoder(target), [1], count, [Oracle(world, 5)]) == world.plain([1], count)
    assert sum(target.rows) <= count  # nothing is run that could not be committed


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("context", range(10, 17))
def test_a_text_ends_with_the_context_inside_an_accepted_run(stages: int, context: int) -> None:
    world = World(6)
    decoder = fake_decoder(FakeTarget(world, stages, context))
    assert written(decoder, [1, 2, 3], 100, [Oracle(world, 5)]) == world.plain([1, 2, 3], context - 3)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("end", range(8))
def test_nothing_is_committed_after_a_stop_token_inside_a_run(stages: int, end: int) -> None:
    world, asked = World(8), list[int]()
    text = world.plain([2], 30)
    stop = text[end]

    def choose(logits: np.ndarray, position: int) -> int:
        asked.append(position)
        return greedy(logits, position)

    decoder = fake_decoder(FakeTarget(world, stages))
    ticks = decoder.decode([2], choose, 30, None, lambda workers: Speculator([Oracle(world, 5)]), frozenset({stop}))
    found = [token for tokens in ticks for token in tokens]
    assert found == text[: text.index(stop) + 1]
    assert asked == list(range(1, len(found) + 1))


@pytest.mark.parametrize("stages", [1, 3])
def test_no_pass_is_larger_than_its_buffers(stages: int) -> None:
    class Flood(Gambler):
        def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
            level = [ANCHOR]
            for _ in range(min(4, candidates.depth)):
                level = [candidates.add(parent, token, 0.5) for parent in level for token in range(VOCABULARY)]
            return None

    world = World(9)
    target = FakeTarget(world, stages)
    assert written(fake_decoder(target), [1], 20, [Flood(world, [1])]) == world.plain([1], 20)
    assert max(target.rows) == LATTICE_ROWS == MOST_TOKENS + 1


@given(prompt=prompts, salt=st.integers(0, 99), draws=numbers, stages=st.integers(1, 3), depth=st.integers(1, 9))
def test_a_text_that_outgrows_its_rotary_tables_is_that_of_plain_decoding(prompt, salt, draws, stages, depth) -> None:
    world = World(salt, switch=SWITCH)
    decoder = fake_decoder(FakeTarget(world, stages))
    for source in (Gambler(world, draws), Oracle(world, depth)):
        assert written(decoder, prompt, 40, [source]) == world.plain(prompt, 40)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_no_pass_of_reduced_precision_has_one_row_and_no_row_sees_the_second(precision: str, stages: int) -> None:
    world = World(1)
    target = FakeTarget(world, stages)
    decoder = fake_decoder(target, precision=precision)
    for depth in (0, 3):
        assert written(decoder, [1, 3, 0], 30, [Oracle(world, depth)]) == world.plain([1, 3, 0], 30)
    assert min(target.rows) == 2
    target.rows.clear()
    assert written(decoder, [1, 3, 0], 30, None) == world.plain([1, 3, 0], 30)
    assert max(target.rows[1:]) == 1  # nothing was proposed, and nothing can be in this bundle


def test_workers_that_speculated_decode_plainly_afterwards() -> None:
    world = World(1)
    decoder = fake_decoder(FakeTarget(world, 2), precision="int8")
    for sources in ([Oracle(world, 4)], None, [Oracle(world, 2)], None):
        assert written(decoder, [1, 3], 25, sources) == world.plain([1, 3], 25)


def test_sampled_tokens_follow_the_distribution_of_the_target() -> None:
    """Chi-square of 2,000 texts of three tokens against the target's own probabilities, at fixed seeds.

    The 216 texts leave at most 215 degrees of freedom; such a sum exceeds 298 once in 10,000 times.
    """
    world, texts, counted = World(3), 2000, np.zeros((VOCABULARY,) * 3)
    expected = np.zeros_like(counted)
    for text in np.ndindex(expected.shape):
        chance = 1.0
        for length in range(3):
            weights = np.exp(world.logits((1, *text[:length]), False)[:VOCABULARY].astype(np.float64))
            chance *= weights[text[length]] / weights.sum()
        expected[text] = texts * chance
    decoder = fake_decoder(FakeTarget(world, 1))
    saved = 0
    for seed in range(texts):
        sampler, stats = Sampler(SamplingParams(temperature=1.0, seed=seed), VOCABULARY + 1), DecodeStats()
        source = Gambler(world, [7, 1, seed, 0, 3, seed // 7, 1, 5, 2])
        ticks = decoder.decode([1], sampler.choose, 3, stats, lambda workers, source=source: Speculator([source]))
        counted[tuple(token for tokens in ticks for token in tokens)] += 1
        saved += 2 - stats.passes
    assert saved > texts / 10
    often = expected >= 1
    squares = (counted - expected)[often] ** 2 / expected[often]
    rest, rarely = expected[~often].sum(), counted[~often].sum()
    assert squares.sum() + (rarely - rest) ** 2 / rest < 298
