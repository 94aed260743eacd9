"""Speculation with real engines: the same texts as plain decoding, from random heads and from a source that knows.

A random head is hardly ever right, so it shows that wrong drafts do no harm; `Informed` proposes what plain decoding
wrote, hidden among wrong tokens, so that accepted rows move through caches, masks and taps.
"""

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import assert_one_line, save_text_model, wavekit_here
from draft_models import draft_of
from engines import exported, slowly
from tiny_models import VOCABULARY, save_tiny

import wavekit
from wavekit import Speculation
from wavekit.decoding.draft_worker import DraftWorker
from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit.decoding.sequence_workers import SequenceWorkers, switches_to_long
from wavekit.decoding.sources import ANCHOR, Candidates
from wavekit.decoding.speculation import Silence
from wavekit.decoding.speculator import Speculator
from wavekit.llm import LLM
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALISED: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "seed": 3, "repetition_penalty": 1.3}
CHOICES: list[dict[str, Any]] = [{}, SAMPLED, PENALISED, {"repetition_penalty": 1.2}]
WAYS: list[Any] = [
    "draft",
    "lookup",
    "draft+lookup",
    Speculation("draft", adaptive=False),
    Speculation("draft", depth=4, top_k=1, adaptive=False),
    Speculation("draft+lookup", depth=3, top_k=4, tokens=30, adaptive=False),
    Speculation("lookup", depth=5, adaptive=False),
]
BUNDLES = {
    "fp32": ("llama-untied", {}),
    "fp32-staged": ("llama-untied", {"split": (1, 3)}),
    "fp32-window": ("qwen3-window", {"split": (2,)}),
    "fp32-longrope": ("phi3-longrope", {}),
    "fp16": ("llama-tied", {"precision": "fp16"}),
    "int4": ("llama-tied", {"precision": "int4"}),
    "int8-staged": ("gemma3-tied", {"precision": "int8", "split": (2,)}),
    "torch-window": ("qwen3-window", {"split": (2,)}),
    "torch-fp16": ("llama-tied", {"precision": "fp16"}),
}
IN_TORCH = ["torch-window", "torch-fp16"]
ROUNDED = slowly(["int4", "int8-staged", "fp16", "torch-fp16"], IN_TORCH)
FLOAT32 = slowly([name for name in BUNDLES if name not in ROUNDED and name != "torch-fp16"], IN_TORCH)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


@pytest.fixture(scope="module", params=slowly(list(BUNDLES), IN_TORCH))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with a random head; its texts are long enough to repeat themselves at times."""
    name, options = BUNDLES[request.param]
    options = {"draft_precision": options.get("precision", "fp32"), **options}
    folder = tmp_path_factory.mktemp("speculation")
    save_tiny(name, folder / "model", seed=4)
    draft = draft_of(open_checkpoint(str(folder / "model")), seed=5)
    engine = "torch" if request.param.startswith("torch") else "onnxruntime"
    return wavekit.load(exported(folder / "model", folder / "bundle", draft=draft, **options), threads=1, engine=engine)


@dataclass
class Informed:
    """Proposes the next tokens of a known text, each among a few wrong siblings, in an order that a seed draws."""

    known: Sequence[int]
    depth: int
    width: int
    draw: random.Random

    def follow(self, text: Sequence[int]) -> None:
        pass

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        parent = ANCHOR
        coming = self.known[len(text) : len(text) + min(self.depth, candidates.depth)]
        for token in coming[: self.draw.randint(1, self.depth)]:
            siblings = [token, *(self.draw.randrange(3, VOCABULARY) for _ in range(self.width))]
            self.draw.shuffle(siblings)
            numbers = {sibling: candidates.add(parent, sibling, 1.0) for sibling in siblings}
            parent = numbers[token]
        return None

    def skip(self, text: Sequence[int]) -> None:
        pass

    def learn(self, committed: Sequence[int]) -> None:
        pass


def informed(llm: LLM, known: list[int], prompt: list[int], width: int, choice: dict[str, Any]) -> list[int]:
    """The text written after ``prompt`` when a source knows it already."""
    sampler, context = Sampler(SamplingParams(**choice), llm.decoder.spec.vocab_size), [*prompt]

    def choose(logits: np.ndarray, position: int) -> int:
        token = sampler.choose(logits, position, context)
        context.append(token)
        return token

    def make(workers: SequenceWorkers) -> Speculator:
        return Speculator([Informed(known, 6, width, random.Random(len(prompt)))])

    ticks = llm.decoder.decode(prompt, choose, len(known) - len(prompt), None, make)
    return [token for committed in ticks for token in committed]


@pytest.mark.parametrize("choice", CHOICES, ids=["greedy", "sampled", "penalised", "penalised-greedy"])
def test_speculation_never_changes_a_text(choice: dict[str, Any], llm: LLM) -> None:
    prompt = tokens(0, 40)
    options = {"max_new_tokens": 80, "stop_token_ids": (), **choice}
    plain = llm.generate(prompt, speculate="off", **options)
    assert plain.speculation.tau == 1.0
    for way in WAYS:
        result = llm.generate(prompt, speculate=way, **options)
        assert result.token_ids == plain.token_ids, way
        assert result.speculation.passes <= plain.speculation.passes == 79


def assert_known_texts_come_out(llm: LLM, width: int, choice: dict[str, Any]) -> None:
    for seed, length in enumerate((1, 20, 60)):
        prompt = tokens(seed, length)
        plain = llm.generate(prompt, max_new_tokens=70, stop_token_ids=(), speculate="off", **choice).token_ids
        assert informed(llm, [*prompt, *plain], prompt, width, choice) == list(plain)


@pytest.mark.parametrize("choice", CHOICES[:3], ids=["greedy", "sampled", "penalised"])
def test_accepted_rows_of_a_chain_leave_the_text_of_plain_decoding(choice: dict[str, Any], llm: LLM) -> None:
    assert_known_texts_come_out(llm, 0, choice)


@pytest.mark.parametrize("llm", FLOAT32, indirect=True)
@pytest.mark.parametrize("choice", CHOICES[:3], ids=["greedy", "sampled", "penalised"])
def test_accepted_rows_of_a_tree_leave_the_text_of_plain_decoding(choice: dict[str, Any], llm: LLM) -> None:
    assert_known_texts_come_out(llm, 3, choice)


def test_a_text_goes_on_to_the_end_of_the_context(llm: LLM) -> None:
    prompt, context = tokens(1, 150), llm.decoder.spec.max_positions
    plain = llm.generate(prompt, max_new_tokens=500, stop_token_ids=(), speculate="off").token_ids
    assert len(plain) == context - 150
    assert llm.generate(prompt, max_new_tokens=500, stop_token_ids=(), speculate=WAYS[3]).token_ids == plain
    assert informed(llm, [*prompt, *plain], prompt, 0, {}) == list(plain)


def fresh_cache(llm: LLM, text: list[int]) -> np.ndarray:
    """The head's cache after all pairs of a text were fed from one pass of the target."""
    with llm.decoder.workers.lent(len(text), 2) as workers:
        worker, taps = workers.draft()
        workers.reset(switches_to_long(llm.decoder.spec, len(text)), len(text))
        for _ in workers.prefill(text):
            pass
        worker.feed([rows.read(0, len(text) - 1) for rows in taps], text[1:])
        return worker.cache.copy()


@pytest.mark.parametrize("llm", FLOAT32, indirect=True)
@pytest.mark.parametrize("count", [1, 2, 57])
def test_the_heads_cache_is_that_of_the_committed_text_alone(count: int, llm: LLM) -> None:
    prompt, used = tokens(2, 45), list[DraftWorker]()
    plain = list(llm.generate(prompt, max_new_tokens=count, stop_token_ids=(), speculate="off").token_ids)
    known = prompt + plain
    make_draft = llm.decoder.speculator(Speculation("draft", depth=4, top_k=3, tokens=20, adaptive=False))
    assert make_draft is not None

    def make(workers: SequenceWorkers) -> Speculator:
        used.append(workers.draft()[0])
        drafting = make_draft(workers).sources
        return Speculator([*drafting, Informed(known, 5, 2, random.Random(count))])

    ticks = llm.decoder.decode(prompt, lambda logits, _: int(logits.argmax()), count, None, make)
    assert [token for committed in ticks for token in committed] == plain
    (worker,) = used
    worker.forget_grown()
    assert len(prompt) - 1 <= worker.fed <= len(known) - 1
    cache = worker.cache.copy()
    expected = fresh_cache(llm, known[: worker.fed + 1])
    if count == 57:
        assert worker.fed > len(prompt) + 40
    np.testing.assert_allclose(cache, expected, atol=1e-4 * np.abs(expected).max())


def chain_logits(llm: LLM, prompt: list[int], chain: list[int], a_pass: int) -> np.ndarray:
    """Logits after each token of a chain that runs behind a prompt, so many rows a pass."""
    found: list[np.ndarray] = []
    with llm.decoder.workers.lent(len(prompt) + len(chain), 2) as workers:
        workers.reset(False)
        for _ in workers.prefill(prompt):
            pass
        for start in range(0, len(chain), a_pass):
            at = len(prompt) + start
            x: np.ndarray = np.array(chain[start : start + a_pass])
            positions = np.arange(at, at + len(x))
            visible = [list(range(at, row)) for row in positions]
            for worker in workers.stages:
                worker.load(x, positions, visible, at)
                worker.run()
                x = worker.output(worker.stage.last)
            found += list(workers.logits(x).copy())
    return np.array(found)


@pytest.mark.parametrize("llm", ROUNDED, indirect=True)
def test_a_row_of_a_chain_has_the_very_logits_of_plain_decoding(llm: LLM) -> None:
    """What losslessness of quantized bundles rests on; it is a fact about ONNX Runtime's kernels, to the last bit.

    torch's are made to have it: see `torch_engine.engine`.
    """
    prompt, chain = tokens(3, 57), tokens(4, 48)
    plain = chain_logits(llm, prompt, chain, 1)
    for a_pass in (2, 3, 5, 16, 48):
        assert np.array_equal(chain_logits(llm, prompt, chain, a_pass), plain)


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with a tokenizer and a random head."""
    folder = tmp_path_factory.mktemp("text")
    save_text_model("llama-untied", folder / "model", seed=1)
    draft = draft_of(open_checkpoint(str(folder / "model")))
    return wavekit.load(
        exported(folder / "model", folder / "bundle", draft=draft, draft_precision="fp32", split=(2,)), threads=1
    )


def test_a_draft_is_used_where_there_is_one_unless_told_otherwise(text_llm: LLM) -> None:
    assert text_llm.generate("Hello", max_new_tokens=9).speculation.mode == "draft+lookup"
    assert text_llm.generate("Hello", max_new_tokens=9, speculate="off").speculation.mode == "off"
    assert text_llm.stream("Hello", max_new_tokens=9, speculate="lookup").close() is None


def test_statistics_add_up(text_llm: LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 50, "stop_token_ids": ()}
    for way in ("off", *WAYS):
        result = text_llm.generate("Hello, hello, hello", speculate=way, **options)
        stats, timings = result.speculation, result.timings
        assert stats.tau == 49 / stats.passes
        assert timings.ticks == 2 * stats.passes
        assert stats.passes + stats.accepted == 49
        assert stats.accepted <= stats.proposed
        assert all(0 <= share <= 1 for share in stats.acceptance)
        whole = stats.draft_seconds + stats.target_seconds + stats.host_seconds
        assert whole == pytest.approx(timings.decode_seconds)
        assert stats.host_seconds / timings.decode_seconds == pytest.approx(timings.host_share)
        assert min(stats.target_seconds, stats.host_seconds) > 0
        assert (stats.draft_seconds > 0) == (stats.mode not in ("off", "lookup"))
    never = text_llm.generate("Hello", speculate="draft", **options).speculation
    assert never.silent["does not pay"] > 30  # this head is never right


def test_a_text_ends_before_a_stop_string_inside_an_accepted_run(text_llm: LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "stop_token_ids": (), "temperature": 0.5, "seed": 2}
    prompt = "abcabcabcabc"
    text = text_llm.generate(prompt, speculate="off", **options).text
    for start in range(0, len(text) - 2, 5):
        stop = text[start : start + 2]
        plain = text_llm.generate(prompt, speculate="off", stop=stop, **options)
        for way in ("lookup", WAYS[3]):
            found = text_llm.generate(prompt, speculate=way, stop=stop, **options)
            assert (found.text, found.token_ids, found.finish_reason) == (plain.text, plain.token_ids, "stop")


def test_streams_closed_early_and_threads_at_once_leave_no_trace(text_llm: LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "stop_token_ids": (), "temperature": 1.0, "seed": 2}
    expected = {
        prompt: text_llm.generate(prompt, speculate="off", **options).token_ids for prompt in ("Hello", "ab" * 9)
    }
    for way in WAYS:
        stream = text_llm.stream("Hello", speculate=way, **options)
        next(stream)
        stream.close()
    found: list[bool] = []

    def write(prompt: str) -> None:
        for way in WAYS:
            result = text_llm.generate(prompt, speculate=way, **options)
            found.append(result.token_ids == expected[prompt])

    threads = [threading.Thread(target=write, args=(prompt,)) for prompt in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4 * len(WAYS)


def test_a_bundle_without_a_draft_says_so(tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path / "model")
    llm = wavekit.load(exported(tmp_path / "model", tmp_path / "bundle"), threads=1)
    assert llm.generate([5, 6], max_new_tokens=5).speculation.mode == "off"
    assert llm.generate([5, 6], max_new_tokens=5, speculate="lookup").speculation.mode == "lookup"
    for mode in ("draft", "draft+lookup"):
        with pytest.raises(MisuseError, match="--draft"):
            llm.generate([5, 6], speculate=mode)


@pytest.mark.parametrize(
    ("speculation", "part"),
    [
        ({"mode": "guess"}, "speculate"),
        ({"depth": 0}, "depth"),
        ({"depth": 2.5}, "depth"),
        ({"top_k": 64}, "top_k"),
        ({"tokens": 64}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": True}, "tokens"),
    ],
)
def test_a_speculation_out_of_range_is_refused(speculation: dict[str, Any], part: str) -> None:
    with pytest.raises(MisuseError, match=part):
        Speculation(**speculation)


def test_a_tree_wider_than_the_heads_scores_is_refused(text_llm: LLM) -> None:
    with pytest.raises(MisuseError, match="scores 10 tokens"):
        text_llm.generate("Hello", speculate=Speculation(top_k=11))


def test_the_command_says_how_it_went(text_llm: LLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_text_model("llama-tied", tmp_path / "model")
    bundle = exported(tmp_path / "model", tmp_path / "bundle")
    common = ("generate", bundle, "Hello Hello Hello", "-n", "30", "--threads", "1")
    plain = wavekit_here(capfd, *common, "--json").stdout
    options = ("--speculate", "lookup", "--draft-depth", "4", "--draft-tokens", "8", "--draft-top-k", "2")
    found = wavekit_here(capfd, *common, *options, "--json").stdout
    plain_result, result = json.loads(plain), json.loads(found)
    assert result["token_ids"] == plain_result["token_ids"]
    assert (plain_result["speculation"]["mode"], result["speculation"]["mode"]) == ("off", "lookup")
    assert_one_line(wavekit_here(capfd, *common, "--speculate", "draft"), 2, "--draft")
    assert_one_line(wavekit_here(capfd, *common, "--draft-tokens", "99"), 2, "tokens", "1 to 63")
