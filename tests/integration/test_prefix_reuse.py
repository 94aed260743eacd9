"""Beginnings of texts that are kept between calls: the same texts, fewer passes, bounded memory."""

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import save_text_model
from draft_models import draft_of
from engines import exported
from tiny_models import VOCABULARY

import wavekit
from wavekit import Speculation
from wavekit.decoding.sequence_workers import SequenceWorkers
from wavekit.llm import LLM
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError

DRAFTING = Speculation("draft+lookup", depth=4, top_k=3, adaptive=False)
BUNDLES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("llama-untied", {}),
    "fp32-window": ("qwen3-window", {"split": (2,)}),
    "fp32-longrope": ("phi3-longrope", {}),
    "int4": ("llama-tied", {"precision": "int4"}),
    "int8-staged": ("gemma3-tied", {"precision": "int8", "split": (2,)}),
}
MEMORY = 64 << 20


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


@pytest.fixture(scope="module", params=BUNDLES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, options = BUNDLES[request.param]
    folder = tmp_path_factory.mktemp("prefixes")
    model = save_text_model(name, folder / "model", seed=4)
    precision = options.get("precision", "fp32")
    draft = draft_of(open_checkpoint(str(model)), seed=5)
    exported(model, folder / "plain", **options)
    return exported(model, folder / "bundle", draft=draft, draft_precision=precision, **options)


@pytest.mark.parametrize("kind", ["plain", "draft"])
def test_texts_are_those_of_a_run_without(kind: str, bundle: Path) -> None:
    path = bundle if kind == "draft" else bundle.with_name("plain")
    fresh, llm = wavekit.load(path, threads=1), wavekit.load(path, threads=1, prefix_memory=MEMORY)
    draw, text, reused = random.Random(1), tokens(0, 40), 0
    for turn in range(8):
        speculate: Any = DRAFTING if kind == "draft" and turn % 3 else "off"
        options = {"max_new_tokens": 12, "stop_token_ids": (), "speculate": speculate, "temperature": 0.5 * (turn % 2)}
        result, expected = llm.generate(text, **options), fresh.generate(text, **options)
        assert result.token_ids == expected.token_ids
        assert expected.reused_tokens == 0
        reused += result.reused_tokens
        text = [*text, *result.token_ids, *tokens(turn, draw.randint(1, 9))]  # the next turn of a chat
        if turn % 4 == 3:  # another chat that begins alike
            text = [*text[: draw.randint(20, 40)], *tokens(turn, 20)]
    assert reused > 60


@pytest.mark.parametrize("kind", ["plain", "draft"])
@pytest.mark.parametrize("count", [90, 20], ids=["the-prompt", "what-outgrows-its-tables"])
def test_a_text_that_was_cancelled_while_it_ran_through_is_kept_as_far_as_it_came(
    kind: str, count: int, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle if kind == "draft" else bundle.with_name("plain")
    fresh, llm = wavekit.load(path, threads=1), wavekit.load(path, threads=1, prefix_memory=MEMORY)
    options: dict[str, Any] = {"stop_token_ids": (), "speculate": DRAFTING if kind == "draft" else "off"}
    prompt, through = tokens(7, count), SequenceWorkers.prefill

    def cancelling(workers: SequenceWorkers, run: Sequence[int]) -> Iterator[Any]:
        for chunk, rows in enumerate(through(workers, run, 13), 1):
            if chunk == 2 and len(run) > 26:
                stream.cancel()
            yield rows

    with monkeypatch.context() as patched:
        patched.setattr(SequenceWorkers, "prefill", cancelling)
        stream = llm.stream(prompt, max_new_tokens=30, **options)
        written = [token for step in stream.steps() for token in step.token_ids]
    if count == 20 and not any(rope.switch_length for rope in llm.decoder.spec.ropes.values()):
        assert len(written) == 30
        return
    assert stream.result.finish_reason == "cancelled"
    assert len(written) == max(33 - count, 0)
    assert llm.statistics.running == 0
    following = [*prompt, *written, *tokens(8, 15)]
    again = llm.generate(following, max_new_tokens=10, **options)
    assert 16 <= again.reused_tokens <= 26
    assert again.token_ids == fresh.generate(following, max_new_tokens=10, **options).token_ids


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("prefix")
    model = save_text_model("llama-untied", folder / "model", seed=1)
    return wavekit.load(exported(model, folder / "bundle"), threads=1, prefix_memory=1 << 20)


def test_only_what_is_new_runs(llm: LLM) -> None:
    first = llm.generate(tokens(1, 100), max_new_tokens=20, stop_token_ids=())
    again = llm.generate(tokens(1, 100), max_new_tokens=20, stop_token_ids=())
    assert (first.reused_tokens, again.reused_tokens) == (0, 99)
    chat = [*tokens(1, 100), *first.token_ids, *tokens(2, 5)]
    assert llm.generate(chat, max_new_tokens=2).reused_tokens == 119
    assert llm.generate([*tokens(1, 50), *tokens(3, 5)], max_new_tokens=2).reused_tokens == 50
    assert llm.generate([*tokens(1, 9), *tokens(3, 5)], max_new_tokens=2).reused_tokens == 0


def test_memory_is_bounded_and_the_oldest_go_first(llm: LLM) -> None:
    prefixes = llm.decoder.prefixes
    assert prefixes is not None
    for seed in range(40, 60):
        llm.generate(tokens(seed, 200), max_new_tokens=2)
        assert 0 < prefixes.size <= 1 << 20
    assert llm.generate(tokens(59, 200), max_new_tokens=2).reused_tokens == 199
    assert llm.generate(tokens(40, 200), max_new_tokens=2).reused_tokens == 0


def test_a_text_that_was_cancelled_is_kept_as_far_as_it_came(llm: LLM) -> None:
    stream = llm.stream(tokens(70, 60), max_new_tokens=100, stop_token_ids=())
    written = [token for _ in range(10) for token in stream.next_step().token_ids]
    stream.close()
    following = [*tokens(70, 60), *written, 5, 6]
    assert llm.generate(following, max_new_tokens=2).reused_tokens == 60 + len(written) - 1


def test_many_threads_share_what_is_kept(llm: LLM) -> None:
    system, found = tokens(80, 80), dict[int, Any]()

    def ask(number: int) -> None:
        found[number] = llm.generate([*system, *tokens(number, 10)], max_new_tokens=8, stop_token_ids=())

    ask(99)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number].reused_tokens >= 80 for number in range(6))
    fresh = LLM(llm.manifest, type(llm.decoder)(llm.manifest, llm.decoder._engines), llm.tokenizer)
    for number in range(6):
        expected = fresh.generate([*system, *tokens(number, 10)], max_new_tokens=8, stop_token_ids=())
        assert found[number].token_ids == expected.token_ids


@pytest.mark.parametrize("memory", [-1, 1.5, True, "much"])
def test_a_bad_limit_is_named(memory: object, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="prefix_memory"):
        wavekit.load(tmp_path, prefix_memory=memory)
