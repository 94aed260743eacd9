"""Depth exploration: whatever exits say, a text is that of plain decoding, in exactly the ticks that the rules give."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import fake_target
import numpy as np
import pytest
from dex_lattice import DRAFT, FALLBACK, Walk, brute_force
from fake_target import SWITCH, VOCABULARY, FakeExits, FakeTarget, Ranked, Text, World, fake_decoder, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit.decoding.decoder import Decoder, DecodeStats
from wavekit.decoding.lattice import NOBODY, SPECULATED
from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit.decoding.sources import ANCHOR, Candidates
from wavekit.decoding.speculation import Silence, Speculation
from wavekit.decoding.speculator import Speculator
from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader
from wavekit_engines.errors import WavekitError

LIMIT = 256


@dataclass
class Exits:
    """What exits say by position: the right token with a chance, else any; the same whatever came before."""

    world: World
    prompt: list[int]
    count: int
    stages: int
    right: float
    seed: int
    ranks: int = 3

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.text = self.world.plain(self.prompt, self.count)
        self.table: list[list[list[int]]] = []
        for token in self.text:
            by_stage = []
            for _ in range(self.stages - 1):
                order = draw.sample(range(VOCABULARY), VOCABULARY)
                if draw.random() < self.right:
                    order.remove(token)
                    order.insert(0, token)
                by_stage.append(order[: self.ranks])
            self.table.append(by_stage)

    def guess(self, text: Text, stage: int) -> Ranked:
        at = min(len(text) - len(self.prompt), self.count - 1)
        return [(token, 0.5 / (1 + rank)) for rank, token in enumerate(self.table[at][stage])]

    def trace(self, draft: np.ndarray | None = None) -> ExitTrace:
        header = TraceHeader(self.stages, tuple(range(1, self.stages)))
        candidates = np.array(self.table, np.int32).reshape(self.count, self.stages - 1, self.ranks)
        return ExitTrace(header, candidates, np.array(self.text, np.int32), np.zeros(1, np.int64), draft)


@dataclass
class Drafts:
    """A source that proposes a chain by position."""

    prompt: int
    chains: np.ndarray

    def follow(self, text: Sequence[int]) -> None:
        pass

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        parent = ANCHOR
        for token in self.chains[len(text) - self.prompt][: candidates.depth].tolist():
            if token < 0:
                break
            parent = candidates.add(parent, token, 1.0)
        return None

    def skip(self, text: Sequence[int]) -> None:
        pass

    def learn(self, committed: Sequence[int]) -> None:
        assert committed


def decoder_with(exits: Exits, target: FakeTarget, lanes: int = 1, precision: str = "fp32") -> Decoder:
    fake = FakeExits(target, tuple(range(exits.stages - 1)), exits.guess, exits.ranks)
    return fake_decoder(target, None, precision, fake if exits.stages > 1 else None, lanes)


def explored(
    decoder: Decoder, exits: Exits, speculation: Speculation, drafts: Drafts | None = None
) -> tuple[list[int], DecodeStats]:
    stats = DecodeStats()
    make = decoder.speculator(speculation)
    assert make is not None

    def with_drafts(workers) -> Speculator:
        speculator = make(workers)
        speculator.sources = [drafts] if drafts is not None else []
        return speculator

    ticks = decoder.decode(exits.prompt, greedy, exits.count, stats, with_drafts, nodes=speculation.nodes)
    return [token for tokens in ticks for token in tokens], stats


def matches(stats: DecodeStats, walk: Walk, stages: int) -> None:
    """Ticks, commits by origin and nodes are those of the model."""
    assert stats.ticks == walk.ticks
    names = {FALLBACK: NOBODY, DRAFT: SPECULATED}
    assert stats.exploration.commits == {
        origin: [names.get(by, by) for by in walk.origins].count(origin)
        for origin in {names.get(by, by) for by in walk.origins}
    }


cases = {
    "stages": st.integers(2, 8),
    "right": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    "count": st.integers(1, 20),
    "prompt": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5),
    "seed": st.integers(0, 9999),
    "decs": st.booleans(),
}


@settings(max_examples=200)
@given(**cases)
def test_exits_alone_tick_for_tick(stages, right, count, prompt, seed, decs) -> None:
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    target = FakeTarget(exits.world, stages)
    found, stats = explored(decoder_with(exits, target), exits, Speculation("exits", decs=decs, nodes=LIMIT))
    assert found == exits.text
    walk = brute_force(exits.trace(), tuple(range(1, stages + 1)), decs)[0]
    matches(stats, walk, stages)
    assert stats.exploration.explored == walk.explored
    assert stats.exploration.peak_nodes == max(walk.live, default=0) <= 2**stages - 1
    if count > 1:
        assert target.rows[1:] == [rows[0] for rows in walk.rows if rows[0]]
    # A commit costs one tick more than the number of the stage whose exit proposed it, or all of them.
    commits = stats.exploration.commits
    costs = sum(n * (by + 1 if by >= 0 else stages) for by, n in commits.items())
    last = walk.origins[-1] if count > 1 else 0
    assert stats.ticks == costs + (stages - (last + 1 if last >= 0 else stages) if count > 1 else 0)


@settings(max_examples=200)
@given(**cases, length=st.integers(1, 5), drafted_right=st.sampled_from([0.0, 0.5, 1.0]), alone=st.booleans())
def test_the_hybrid_tick_for_tick(stages, right, count, prompt, seed, decs, length, drafted_right, alone) -> None:
    stages = 1 if alone else min(stages, 6)
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    draw = random.Random(seed + 1)
    chains = np.full((count, length), -1, np.int32)
    for at in range(count):
        for step in range(min(length, count - at)):
            honest = draw.random() < drafted_right
            chains[at, step] = exits.text[at + step] if honest else draw.randrange(VOCABULARY)
    mode = "lookup" if alone else "lookup+exits"
    decoder = decoder_with(exits, FakeTarget(exits.world, stages))
    speculation = Speculation(mode, decs=decs, nodes=LIMIT, adaptive=False)
    found, stats = explored(decoder, exits, speculation, Drafts(len(prompt), chains))
    assert found == exits.text
    walk = brute_force(exits.trace(chains), tuple(range(1, stages + 1)), decs, draft=chains)[0]
    if stats.exploration.peak_nodes < LIMIT - length:
        matches(stats, walk, stages)


@pytest.mark.parametrize("stages", range(2, 9))
def test_exits_that_all_disagree_fill_the_lattice(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_target, "VOCABULARY", 9)
    monkeypatch.setattr(fake_target, "POISON", 9)
    exits = Exits(World(4), [1, 2], 20, stages, 0.0, 5)
    for at, token in enumerate(exits.text):
        wrong = [other for other in range(9) if other != token]
        exits.table[at] = [[other] for other in wrong[: stages - 1]]
    exits.ranks = 1
    found, stats = explored(
        decoder_with(exits, FakeTarget(exits.world, stages)), exits, Speculation("exits", nodes=LIMIT)
    )
    assert found == exits.text
    assert stats.exploration.peak_nodes == 2**stages - 1
    assert stats.ticks == stages * 19
    assert stats.exploration.commits == {NOBODY: 19}


@given(**cases, nodes=st.integers(2, 12), least=st.sampled_from([0.0, 0.2, 0.4]))
def test_limits_cost_ticks_and_change_nothing(stages, right, count, prompt, seed, decs, nodes, least) -> None:
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages))
    found, stats = explored(decoder, exits, Speculation("exits", decs=decs, nodes=nodes, least_probability=least))
    assert found == exits.text
    assert stats.exploration.peak_nodes <= nodes
    assert count - 1 <= stats.ticks <= stages * (count - 1)


@given(**cases, lanes=st.integers(2, 4))
def test_stages_on_lanes_of_their_own_write_the_same(stages, right, count, prompt, seed, decs, lanes) -> None:
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages), lanes)
    found, stats = explored(decoder, exits, Speculation("exits", decs=decs, nodes=LIMIT))
    decoder.close()
    assert found == exits.text
    matches(stats, brute_force(exits.trace(), tuple(range(1, stages + 1)), decs)[0], stages)


@given(**cases)
def test_reduced_precision_explores_chains_only(stages, right, count, prompt, seed, decs) -> None:
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    target = FakeTarget(exits.world, stages)
    decoder = decoder_with(exits, target, precision="int4")
    found, stats = explored(decoder, exits, Speculation("exits", decs=decs))
    assert found == exits.text
    assert stats.exploration.peak_nodes <= stages + 1  # one of them proposed just now
    assert min(target.rows[1:], default=2) >= 2


@given(**cases, exit_=st.integers(0, 6))
def test_one_exit_alone_is_pipelining(stages, right, count, prompt, seed, decs, exit_) -> None:
    exit_ = exit_ % (stages - 1)
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages))
    found, stats = explored(decoder, exits, Speculation("exits", exits=(exit_ + 1,), decs=decs))
    assert found == exits.text
    assert stats.exploration.peak_nodes <= stages // (exit_ + 1) + 1
    matches(stats, brute_force(exits.trace(), tuple(range(1, stages + 1)), decs, {exit_})[0], stages)


@given(**cases, exit_=st.integers(0, 6), drafted=st.integers(1, 6))
def test_selection_drafts_with_one_exit_and_checks_in_one_pass(
    stages, right, count, prompt, seed, decs, exit_, drafted
) -> None:
    exit_ = exit_ % (stages - 1)
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages))
    speculation = Speculation("exits", exits=(exit_ + 1,), nodes=drafted + 1, selection=True, decs=decs)
    found, stats = explored(decoder, exits, speculation)
    assert found == exits.text
    # Each round: the first stages for the anchor and every drafted token, in turn, then the others once.
    ticks, at = 0, 1
    while at < count:
        length = min(drafted, count - 1 - at)
        run = 0
        while run < length and exits.table[at + run][exit_][0] == exits.text[at + run]:
            run += 1
        ticks += (length + 1) * (exit_ + 1) + stages - exit_ - 1
        at += run + 1
    assert stats.ticks == ticks


@given(**cases, end=st.integers(0, 12))
def test_a_stop_token_ends_a_text_inside_the_lattice(stages, right, count, prompt, seed, decs, end) -> None:
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    stop = exits.text[min(end, count - 1)]
    decoder, asked = decoder_with(exits, FakeTarget(exits.world, stages)), list[int]()

    def choose(logits: np.ndarray, position: int) -> int:
        asked.append(position)
        return greedy(logits, position)

    make = decoder.speculator(Speculation("exits", decs=decs))
    ticks = decoder.decode(prompt, choose, count, None, make, frozenset({stop}))
    found = [token for tokens in ticks for token in tokens]
    assert found == exits.text[: exits.text.index(stop) + 1]
    assert asked == list(range(len(prompt), len(prompt) + len(found)))


@given(**cases)
def test_a_text_ends_with_the_context(stages, right, count, prompt, seed, decs) -> None:
    context = len(prompt) + min(count, 9)
    exits = Exits(World(seed % 50), prompt, 40, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages, context))
    found, _ = explored(decoder, exits, Speculation("exits", decs=decs))
    assert found == exits.text[: context - len(prompt)]


@given(**cases)
def test_a_text_that_outgrows_its_rotary_tables(stages, right, count, prompt, seed, decs) -> None:
    exits = Exits(World(seed % 50, switch=SWITCH), prompt, 40, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages))
    assert explored(decoder, exits, Speculation("exits", decs=decs))[0] == exits.text


@given(**cases, temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_sampled_texts_are_those_of_plain_decoding(stages, right, count, prompt, seed, decs, temperature) -> None:
    exits = Exits(World(seed % 50), prompt, count, stages, right, seed)
    decoder = decoder_with(exits, FakeTarget(exits.world, stages))
    texts = []
    for speculation in (Speculation("off"), Speculation("exits", decs=decs)):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), VOCABULARY + 1)
        ticks = decoder.decode(prompt, sampler.choose, count, None, decoder.speculator(speculation))
        texts.append([token for tokens in ticks for token in tokens])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_that_fails_ends_its_text_and_nothing_else(lanes: int, stage: int) -> None:
    exits = Exits(World(3), [1, 2], 40, 4, 0.5, 1)
    target = FakeTarget(exits.world, 4)
    failing: dict[int, str] = {}

    class Fragile(FakeTarget):
        def stage(self, number: int) -> fake_target.FakeEngine:
            healthy = target.stage(number)

            def work(inputs, outputs) -> None:
                if number in failing and inputs["last_rows"][0] > 20:
                    raise WavekitError(failing[number])
                healthy.work(inputs, outputs)

            return fake_target.FakeEngine(work)

    decoder = decoder_with(exits, Fragile(exits.world, 4), lanes)
    assert explored(decoder, exits, Speculation("exits"))[0] == exits.text
    failing[stage] = f"stage_{stage}.onnx failed in ONNX Runtime: out of memory"
    with pytest.raises(WavekitError, match=f"stage_{stage}.onnx failed"):
        explored(decoder, exits, Speculation("exits"))
    failing.clear()
    assert explored(decoder, exits, Speculation("exits"))[0] == exits.text
    threads = threading.active_count()
    for _ in range(20):
        explored(decoder, exits, Speculation("exits"))
    assert threading.active_count() == threads
    decoder.close()
