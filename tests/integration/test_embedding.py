"""The embedded API in a program: log probabilities, shapes, deadlines, many texts at once, coroutines, cancellation."""

import asyncio
import gc
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import save_text_model
from draft_models import draft_of
from engines import exported

import wavekit
from wavekit import Speculation
from wavekit.decoding import sequence_workers
from wavekit.decoding.sequence_workers import SequenceWorkers
from wavekit.llm import LLM
from wavekit.streams import AsyncGenerationStream
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError

SAMPLED: dict[str, Any] = {"temperature": 1.5, "top_k": 100, "repetition_penalty": 1.1}
DRAFTING = Speculation("draft+lookup", depth=4, top_k=3, adaptive=False)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a random draft head."""
    folder = tmp_path_factory.mktemp("embedding")
    model = save_text_model("llama-untied", folder / "model", seed=1)
    return exported(model, folder / "bundle", draft=draft_of(open_checkpoint(str(model)), seed=2))


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    """Two texts of a batch are written at a time."""
    return wavekit.load(bundle, threads=1, concurrency=2)


def lent(llm: LLM) -> int:
    """Generations that hold buffers."""
    return llm.statistics.running


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("speculate", ["off", DRAFTING], ids=["plain", "speculative"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_models_own_distribution(speculate: Any, options: dict[str, Any], llm: LLM) -> None:
    prompt = llm.encode("Hello")
    base = llm.generate(prompt, max_new_tokens=20, stop_token_ids=(), speculate="off", **options)
    result = llm.generate(prompt, max_new_tokens=20, stop_token_ids=(), speculate=speculate, logprobs=3, **options)
    assert result.token_ids == base.token_ids
    assert base.logprobs == ()
    logits = llm.decoder.logits([*prompt, *result.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert len(result.logprobs) == 20
    for row, token, entry in zip(expected, result.token_ids, result.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert [token for token, _ in entry.best] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [value for _, value in entry.best] == pytest.approx(sorted(row, reverse=True)[:3], abs=1e-4)


def test_steps_carry_the_tokens_and_log_probabilities_of_their_tick(llm: LLM) -> None:
    stream = llm.stream("Hello", max_new_tokens=30, logprobs=0, speculate=DRAFTING, **SAMPLED)
    steps = list(stream.steps())
    result = stream.result
    assert "".join(step.text for step in steps) == result.text
    assert tuple(token for step in steps for token in step.token_ids) == result.token_ids
    assert tuple(entry for step in steps for entry in step.logprobs) == result.logprobs
    assert all(entry.best == () for entry in result.logprobs)
    assert sum(step.accepted for step in steps) == result.speculation.accepted


def test_min_tokens_keeps_stop_tokens_out_at_first(llm: LLM) -> None:
    ends = list(range(0, 320, 2))  # every other token would end the text
    for speculate in ("off", DRAFTING):
        result = llm.generate("Hello", max_new_tokens=40, min_tokens=10, stop_token_ids=ends, speculate=speculate)
        assert all(token % 2 for token in result.token_ids[:10])
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] in ends
    assert len(llm.generate("Hello", max_new_tokens=40, stop_token_ids=ends, **SAMPLED).token_ids) < 10


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
def test_additions_to_logits_are_lossless_and_keep_out_what_they_should(options: dict[str, Any], llm: LLM) -> None:
    options = {"max_new_tokens": 40, "stop_token_ids": (), **options}
    usual = llm.generate("Hello", speculate="off", **options)
    banned = dict.fromkeys({*usual.token_ids[:10]}, -100.0)
    options |= {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": banned}
    plain = llm.generate("Hello", speculate="off", **options)
    assert llm.generate("Hello", speculate=DRAFTING, **options).token_ids == plain.token_ids
    assert not banned.keys() & {*plain.token_ids}
    assert len({*plain.token_ids}) > len({*usual.token_ids})


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "shape", [{"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"regex": "(ab|c){1,9}[0-9]{3,9}!"}]
)
@pytest.mark.parametrize("ends", [None, ()], ids=["own-end", "no-end"])
def test_texts_have_the_shape_that_was_asked_for_with_and_without_drafts(
    shape: dict[str, Any], options: dict[str, Any], ends: Any, llm: LLM
) -> None:
    options = {"max_new_tokens": 150, "stop_token_ids": ends, **shape, **options}
    plain = llm.generate("Hello", speculate="off", **options)
    drafted = llm.generate("Hello", speculate=DRAFTING, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert plain.finish_reason == "stop"
    if "regex" in shape:
        assert re.fullmatch(shape["regex"], plain.text)
    else:
        value = json.loads(plain.text)
        assert sorted(value) == ["name", "tags"]
        assert {*value["tags"]} <= {"a", "b"}


def test_a_shape_that_is_complete_ends_the_text(llm: LLM) -> None:
    for ends in (None, (), (7, 9)):
        result = llm.generate("Hello", regex="[a-c]{5}", stop_token_ids=ends, max_new_tokens=50)
        assert re.fullmatch("[a-c]{5}", result.text)
        assert result.finish_reason == "stop"


def test_a_deadline_ends_the_text_where_it_is(llm: LLM) -> None:
    start = time.perf_counter()
    stream = llm.stream("Hello", max_new_tokens=200, stop_token_ids=(), deadline=0.5)
    pieces = [next(stream)]
    time.sleep(max(0.0, 0.55 - (time.perf_counter() - start)))
    pieces += stream
    assert stream.result.finish_reason == "deadline"
    assert stream.result.text == "".join(pieces)
    assert 1 <= len(stream.result.token_ids) < 200
    result = llm.generate("Hello", deadline=1e-9)
    assert (result.token_ids, result.text, result.finish_reason) == ((), "", "deadline")


def test_a_batch_gives_the_texts_of_its_prompts_in_order(llm: LLM) -> None:
    prompts = ["Hello", "A", [5, 6, 7], [{"role": "user", "content": "Hi"}], "Z" * 40]
    options = {"max_new_tokens": 25, "seed": 4, **SAMPLED}
    assert [result.token_ids for result in llm.generate_batch(prompts, **options)] == [
        llm.generate(prompt, **options).token_ids for prompt in prompts
    ]
    assert llm.generate_batch([]) == []
    before = llm.statistics
    with pytest.raises(MisuseError, match="prompt is empty"):
        llm.generate_batch(["Hello", ""])
    assert llm.statistics == before


def test_texts_in_flight_advance_alike(llm: LLM) -> None:
    counts, barrier, at_end = [0, 0, 0], threading.Barrier(3), list[list[int]]()

    def write(number: int) -> None:
        stream = llm.stream([5 + number] * 5, max_new_tokens=240, stop_token_ids=(), speculate="off")
        barrier.wait()
        for _ in stream.steps():
            counts[number] += 1
        at_end.append(list(counts))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(at_end[0]) > 80


def test_the_same_texts_come_out_of_many_threads(llm: LLM) -> None:
    options = {"max_new_tokens": 20, "speculate": DRAFTING, **SAMPLED}
    expected = [llm.generate("Hello", seed=seed, **options).token_ids for seed in range(8)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: llm.generate("Hello", seed=seed, **options)}))
        for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed].token_ids for seed in range(8)] == expected


def test_a_stream_is_closed_from_another_thread(llm: LLM) -> None:
    started, ended = threading.Event(), threading.Event()
    stream = llm.stream("Hello", max_new_tokens=200, stop_token_ids=())

    def read() -> None:
        for _ in stream:
            started.set()
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(10)
    stream.close()
    assert lent(llm) == 0
    assert stream.result.finish_reason == "cancelled"
    assert ended.wait(10)
    thread.join()


def test_a_coroutine_reads_the_same_text(llm: LLM) -> None:
    options = {"max_new_tokens": 30, "seed": 8, **SAMPLED}

    async def read() -> tuple[str, Any]:
        stream = llm.stream_async("Hello", **options)
        with pytest.raises(RuntimeError, match="not finished"):
            _ = stream.result
        return "".join([piece async for piece in stream]), stream.result

    text, result = asyncio.run(read())
    assert text == result.text == llm.generate("Hello", **options).text


def test_more_coroutines_than_writers_are_served_in_order(llm: LLM) -> None:
    async def first_token(number: int, order: list[int]) -> str:
        stream = llm.stream_async([5 + number], max_new_tokens=15, stop_token_ids=())
        await stream.next_step()
        order.append(number)
        return "".join([step.text async for step in stream.steps()])

    async def read() -> list[int]:
        order: list[int] = []
        await asyncio.gather(*(first_token(number, order) for number in range(8)))
        return order

    order = asyncio.run(read())
    assert sorted(order) == list(range(8))
    assert all(abs(place - number) < 3 for place, number in enumerate(order))


def test_a_mistake_is_raised_where_a_coroutine_reads(llm: LLM) -> None:
    async def read() -> None:
        async for _ in llm.stream_async("Hello", temperature=-1):
            pass

    with pytest.raises(MisuseError, match="temperature"):
        asyncio.run(read())


@pytest.mark.parametrize("way", ["cancel the task", "close the stream", "let go of it"])
def test_a_coroutine_that_stops_reading_frees_the_buffers(way: str, llm: LLM) -> None:
    async def read(stream: AsyncGenerationStream) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        stream = llm.stream_async("Hello", max_new_tokens=250, stop_token_ids=())
        await stream.next_step()
        assert lent(llm) == 1
        if way == "cancel the task":
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "close the stream":
            await stream.aclose()
            assert lent(llm) == 0
            assert stream.result.finish_reason == "cancelled"
        del stream
        gc.collect()
        await asyncio.to_thread(eventually, lambda: lent(llm) == 0)

    asyncio.run(main())
    assert lent(llm) == 0


def test_a_queued_coroutine_can_be_cancelled_before_it_begins(llm: LLM) -> None:
    async def main() -> None:
        running = [llm.stream_async([5], max_new_tokens=240, stop_token_ids=()) for _ in range(2)]
        queued = llm.stream_async([6], max_new_tokens=200, stop_token_ids=())
        await running[0].next_step()
        queued.cancel()
        assert [step.token_ids async for step in queued.steps()] == []
        assert queued.result.finish_reason == "cancelled"
        for stream in running:
            await stream.aclose()

    asyncio.run(main())


def test_closing_ends_what_is_under_way(llm: LLM, tmp_path: Path) -> None:
    other = LLM(llm.manifest, llm.decoder, llm.tokenizer, 2)
    stream = other.stream("Hello", max_new_tokens=200, stop_token_ids=())
    next(stream)
    other.decoder = type("Decoder", (), {"close": lambda self: None})()  # the engines are still needed here
    other.close()
    assert stream.result.finish_reason == "cancelled"
    assert list(stream) == []


def test_statistics_add_up(llm: LLM) -> None:
    before = llm.statistics
    results = [llm.generate("Hello", max_new_tokens=10, stop_token_ids=(), speculate=DRAFTING) for _ in range(3)]
    llm.stream("Hello").close()
    dropped = llm.stream("Hello")
    next(dropped)
    del dropped
    gc.collect()
    after = llm.statistics
    assert after.new_tokens - before.new_tokens == 30
    assert after.passes - before.passes == sum(result.speculation.passes for result in results)
    assert after.finished["length"] - before.finished.get("length", 0) == 3
    assert after.finished["cancelled"] - before.finished.get("cancelled", 0) == 1
    assert after.dropped - before.dropped == 1
    assert after.running == 0
    assert after.tau == pytest.approx(after.decoded_tokens / after.passes)


def test_generations_are_logged_without_their_texts(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "wavekit"):
        llm.generate("My secret", max_new_tokens=5)
    (record,) = caplog.records
    assert "9 + 5 tokens, length" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_generations_are_spans_below_the_callers(llm: LLM) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("test").start_as_current_span("request"):
        stream = llm.stream("Hello", max_new_tokens=5)
    list(stream)
    request, span = exporter.get_finished_spans()
    assert (span.name, span.parent.span_id) == ("wavekit.generate", request.context.span_id)
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert math.isfinite(span.attributes["wavekit.tau"])


def test_texts_at_a_time_leave_their_buffers_to_the_next_ones(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that come and go on many threads leave the heap in pieces, and a server's memory grows for hours."""
    made = []

    class Counted(SequenceWorkers):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(sequence_workers, "SequenceWorkers", Counted)
    four = wavekit.load(bundle, threads=1, concurrency=4)
    for _ in range(3):
        streams = [four.stream("x", max_new_tokens=9) for _ in range(4)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()
    assert len(made) == 4
    four.close()
