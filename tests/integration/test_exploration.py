"""Depth exploration with real engines: the same texts as plain decoding, caches as after a fresh pass.

Random exits are hardly ever right and make the widest lattices; `Informed` exits know what plain decoding wrote and
propose it with a chance, among wrong tokens, so that rows of all ages move through caches, masks and taps.
"""

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_models import draft_of
from engines import exported, slowly
from tiny_models import VOCABULARY, save_tiny

import wavekit
from wavekit import Speculation
from wavekit.decoding.decoder import DecodeStats
from wavekit.decoding.exit_source import ExitSource
from wavekit.decoding.exit_worker import ExitScores
from wavekit.decoding.lattice import Lattice, Node
from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit.decoding.sequence_workers import SequenceWorkers, switches_to_long
from wavekit.decoding.speculator import Speculator
from wavekit.llm import LLM
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.exit_spec import Exits, ExitSpec
from wavekit_engines.families import decoder_spec

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALISED: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "seed": 3, "repetition_penalty": 1.3}
CHOICES: list[dict[str, Any]] = [{}, SAMPLED, PENALISED]
BUNDLES = {
    "two-stages": ("llama-untied", {"split": (2,)}),
    "four-stages": ("llama-tied", {"split": (1, 2, 3)}),
    "window": ("qwen3-window", {"split": (1, 3)}),
    "longrope": ("phi3-longrope", {"split": (2, 3)}),
    "int8": ("gemma3-tied", {"precision": "int8", "split": (2, 4)}),
    "torch-longrope": ("phi3-longrope", {"split": (2, 3)}),
    "torch-int8": ("gemma3-tied", {"precision": "int8", "split": (2, 4)}),
}
IN_TORCH = ["torch-longrope", "torch-int8"]
FLOAT32 = slowly([name for name in BUNDLES if not name.endswith("int8")], IN_TORCH)
WAYS = [
    "exits",
    "draft+exits",
    "draft+lookup+exits",
    Speculation("exits", decs=False),
    Speculation("exits", nodes=4, least_probability=0.001),
    Speculation("draft+exits", depth=3, top_k=2, tokens=6, adaptive=False),
]


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def random_exits(model: Path, boundaries: tuple[int, ...], rank: int = 8) -> Exits:
    spec = decoder_spec(open_checkpoint(str(model)).config)
    shape = ExitSpec(
        boundaries, spec.num_layers, spec.hidden_size, spec.vocab_size, spec.vocab_size, spec.norm_eps, rank
    )
    draw = np.random.default_rng(1)
    weights = {role: draw.normal(0, 0.2, size).astype(np.float32) for role, size in shape.weight_shapes().items()}
    return Exits(shape, weights, np.zeros(spec.vocab_size, np.int64))


@pytest.fixture(scope="module", params=slowly(list(BUNDLES), IN_TORCH))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    name, options = BUNDLES[request.param]
    folder = tmp_path_factory.mktemp("exploration")
    save_tiny(name, folder / "model", seed=4)
    draft = draft_of(open_checkpoint(str(folder / "model")), seed=5)
    exits = random_exits(folder / "model", options["split"])
    precision = options.get("precision", "fp32")
    bundle = exported(
        folder / "model",
        folder / "bundle",
        draft=draft,
        draft_precision=precision,
        exits=exits,
        exit_precision=precision,
        **options,
    )
    engine = "torch" if request.param.startswith("torch") else "onnxruntime"
    return wavekit.load(bundle, threads=1, lanes=2, engine=engine)


class Informed(ExitSource):
    """Exits that propose the token of a known text with a chance, and wrong ones otherwise."""

    def __init__(self, inner: ExitSource, known: Sequence[int], right: float, chain: bool) -> None:
        super().__init__(inner.workers, most_nodes=inner.most_nodes, chain=chain)
        self.known, self.right, self.draw = known, right, random.Random(len(known))

    def expand(
        self, lattice: Lattice, stage: int, nodes: Sequence[Node], scores: ExitScores, ends: frozenset[int], last: int
    ) -> None:
        told = scores.tokens.copy()
        for row, node in enumerate(nodes):
            told[row] = self.draw.sample(range(3, VOCABULARY), told.shape[1])
            if self.draw.random() < self.right:
                told[row, 0] = self.known[node.position + 1]
        super().expand(lattice, stage, nodes, ExitScores(told, scores.logprobs), ends, last)


def explored(
    llm: LLM, prompt: list[int], known: list[int], right: float, choice: dict[str, Any], mode: Any = "exits"
) -> tuple[list[int], DecodeStats]:
    """The text written while exits know what comes."""
    sampler, context = Sampler(SamplingParams(**choice), llm.decoder.spec.vocab_size), [*prompt]

    def choose(logits: np.ndarray, position: int) -> int:
        token = sampler.choose(logits, position, context)
        context.append(token)
        return token

    speculation = Speculation(mode, nodes=16, depth=2, tokens=4, adaptive=False)
    chain = llm.manifest.engine.precision != "fp32"
    make_random = llm.decoder.speculator(speculation)
    assert make_random is not None

    def make(workers: SequenceWorkers) -> Speculator:
        speculator = make_random(workers)
        assert speculator.exits is not None
        exits = Informed(speculator.exits, known, right, chain)
        return Speculator(speculator.sources, most=4, chain=chain, exits=exits)

    stats = DecodeStats()
    ticks = llm.decoder.decode(prompt, choose, len(known) - len(prompt) - 1, stats, make)
    return [token for committed in ticks for token in committed], stats


@pytest.mark.parametrize("choice", CHOICES, ids=["greedy", "sampled", "penalised"])
def test_exploring_never_changes_a_text(choice: dict[str, Any], llm: LLM) -> None:
    prompt = tokens(0, 30)
    options = {"max_new_tokens": 40, "stop_token_ids": (), **choice}
    plain = llm.generate(prompt, speculate="off", **options)
    stages = len(llm.manifest.stages)
    # Where the text outgrows its rotary tables, one tick runs all of it again.
    restarted = any(rope.switch_length is not None for rope in llm.decoder.spec.ropes.values())
    assert plain.exploration.ticks == stages * 39 - (stages - 1) * restarted
    assert plain.exploration.wasted == 0
    for way in WAYS:
        result = llm.generate(prompt, speculate=way, **options)
        assert result.token_ids == plain.token_ids, way
        assert result.exploration.ticks <= plain.exploration.ticks
        assert sum(result.exploration.commits.values()) == 39


def test_exits_alone_never_change_a_text_in_4_bits(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path / "model", seed=4)
    exits = random_exits(tmp_path / "model", (2,))
    bundle = exported(tmp_path / "model", tmp_path / "bundle", precision="int4", split=(2,), exits=exits)
    llm = wavekit.load(bundle, threads=1)
    for seed in range(4):
        prompt = tokens(seed, 20)
        plain, at_once = (
            llm.generate(prompt, max_new_tokens=60, stop_token_ids=(), speculate=way) for way in ("off", "exits")
        )
        assert at_once.token_ids == plain.token_ids


@pytest.mark.parametrize("mode", ["exits", "draft+exits"])
@pytest.mark.parametrize("choice", CHOICES, ids=["greedy", "sampled", "penalised"])
def test_what_exits_foresee_is_committed_early_and_rightly(choice: dict[str, Any], mode: str, llm: LLM) -> None:
    for seed, length in enumerate((1, 25)):
        prompt = tokens(seed, length)
        plain = llm.generate(prompt, max_new_tokens=50, stop_token_ids=(), speculate="off", **choice)
        known = [*prompt, *plain.token_ids, 3]
        for right in (0.4, 0.9):
            found, stats = explored(llm, prompt, known, right, choice, mode)
            assert found == list(plain.token_ids)
            if mode == "exits" or llm.manifest.engine.precision == "fp32":
                assert stats.ticks < plain.exploration.ticks
            else:  # of two proposals one alone is run, and the random draft comes first
                assert stats.ticks <= plain.exploration.ticks


@pytest.mark.parametrize("llm", FLOAT32, indirect=True)
@pytest.mark.parametrize("mode", ["exits", "draft+exits"])
@pytest.mark.parametrize("count", [2, 30, 61])
def test_caches_are_those_of_the_committed_text_alone(count: int, mode: str, llm: LLM) -> None:
    prompt, used = tokens(2, 20), list[SequenceWorkers]()
    plain = list(llm.generate(prompt, max_new_tokens=count, stop_token_ids=(), speculate="off").token_ids)
    known = [*prompt, *plain, 3]
    make_random = llm.decoder.speculator(Speculation(mode, nodes=16, adaptive=False))  # type: ignore[arg-type]
    assert make_random is not None

    def make(workers: SequenceWorkers) -> Speculator:
        used.append(workers)
        speculator = make_random(workers)
        assert speculator.exits is not None
        return Speculator(speculator.sources, most=4, exits=Informed(speculator.exits, known, 0.5, False))

    ticks = llm.decoder.decode(prompt, None, count, None, make)
    assert [token for committed in ticks for token in committed] == plain
    found = [worker._cache.array.copy() for worker in used[0].stages]
    text = [*prompt, *plain][:-1]
    with llm.decoder.workers.lent(len(text)) as workers:
        workers.reset(switches_to_long(llm.decoder.spec, len(text) - 1))
        for _ in workers.prefill(text):
            pass
        for stage, cache in zip(workers.stages, found, strict=True):
            fresh = stage._cache.array[..., : len(text), :]
            assert cache.shape[-2] >= len(text)
            np.testing.assert_allclose(cache[..., : len(text), :], fresh, atol=1e-4 * np.abs(fresh).max())


def test_texts_of_several_threads_share_the_lanes(llm: LLM) -> None:
    prompts = [tokens(seed, 10 + seed) for seed in range(4)]
    alone = [llm.generate(prompt, max_new_tokens=30, speculate="off").token_ids for prompt in prompts]
    found: dict[int, Any] = {}

    def write(number: int) -> None:
        found[number] = llm.generate(prompts[number], max_new_tokens=30, speculate="draft+exits").token_ids

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == alone


@pytest.mark.parametrize("llm", ["four-stages"], indirect=True)
def test_hundreds_of_texts_leave_no_threads_and_no_memory_behind(llm: LLM) -> None:
    def write(count: int) -> None:
        for seed in range(count):
            llm.generate(tokens(seed, 5), max_new_tokens=6, speculate="draft+exits", temperature=0.8, seed=seed)

    write(20)
    threads, before = threading.active_count(), _resident()
    write(200)
    assert threading.active_count() == threads
    assert _resident() - before < 4 << 20


def _resident() -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
