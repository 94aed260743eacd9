"""The embedded API: what ends a text, what a stream hands over and when it is closed, prompts of every kind."""

import re
import shutil
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import pytest
from command_line import byte_tokenizer, save_text_model
from engines import exported
from tiny_models import CONTEXT, VOCABULARY

import wavekit
from wavekit.llm import LLM, GenerationResult
from wavekit_engines.errors import ContextLengthError, MisuseError

SAMPLED = {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model("llama-untied", tmp_path_factory.mktemp("llm") / "model", seed=1)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return wavekit.load(exported(checkpoint, checkpoint.parent / "bundle"), threads=1)


@pytest.fixture(scope="module")
def staged(checkpoint: Path) -> LLM:
    """The same model in four stages."""
    return wavekit.load(exported(checkpoint, checkpoint.parent / "staged", split=(1, 2, 3), taps=(0, 2)), threads=1)


def decoded(ids: tuple[int, ...]) -> str:
    return byte_tokenizer().decode(list(ids), skip_special_tokens=True)


def long_text(llm: LLM) -> GenerationResult:
    return llm.generate("Hello", max_new_tokens=60, seed=5, stop_token_ids=(), **SAMPLED)


def test_a_text_is_that_of_its_tokens(llm: LLM) -> None:
    result = long_text(llm)
    assert len(result.token_ids) == 60
    assert result.text == decoded(result.token_ids)
    assert (result.finish_reason, result.prompt_tokens) == ("length", len("Hello"))


def test_a_stop_token_ends_the_text_and_is_the_last_token_but_no_text(llm: LLM) -> None:
    whole = long_text(llm).token_ids
    position = next(index for index in range(10, 60) if whole[index] not in whole[:index])
    options = {"max_new_tokens": 60, "seed": 5, **SAMPLED}
    result = llm.generate("Hello", stop_token_ids=[whole[position]], **options)
    assert result.token_ids == whole[: position + 1]
    assert result.finish_reason == "stop"
    result = llm.generate("Hello", stop_token_ids=[whole[position]], **{**options, "max_new_tokens": position + 1})
    assert result.finish_reason == "stop"


def test_the_checkpoints_own_stop_token_is_used_unless_others_are_given(llm: LLM) -> None:
    assert llm.manifest.generation.stop_token_ids == (2,)
    for seed in range(60):
        free = llm.generate([5, 6], max_new_tokens=60, temperature=2.0, seed=seed, stop_token_ids=())
        if 2 in free.token_ids:
            break
    result = llm.generate([5, 6], max_new_tokens=60, temperature=2.0, seed=seed)
    assert result.token_ids == free.token_ids[: free.token_ids.index(2) + 1]
    assert result.text == decoded(result.token_ids[:-1])
    assert result.finish_reason == "stop"


def test_a_text_ends_before_a_stop_string(llm: LLM) -> None:
    def generate(seed: int, stop: str | list[str] = ()) -> GenerationResult:
        return llm.generate("Hello", max_new_tokens=60, seed=seed, stop=stop, stop_token_ids=(), **SAMPLED)

    seed, match = next((seed, match) for seed in range(100) if (match := re.search("[ -~]{4}", generate(seed).text)))
    text, word = generate(seed).text, match.group()
    assert generate(seed, word).text == text[: text.index(word)]
    for stop in ([word], ["no such text", word], [word[2:], word], [word, word[1]]):
        result = generate(seed, stop)
        cut = min((text.index(part) + len(part), text.index(part)) for part in stop if part in text)[1]
        assert result.text == text[:cut]
        assert result.finish_reason == "stop"
        assert decoded(result.token_ids).startswith(text[:cut])
        assert len(result.token_ids) < 60


@pytest.mark.parametrize("stop", [(), "e", ["\ufffd", "zz"]])
def test_pieces_of_a_stream_are_the_text(stop: object, llm: LLM) -> None:
    options = {"max_new_tokens": 60, "seed": 5, "stop": stop, **SAMPLED}
    stream = llm.stream("Hello", **options)
    pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == stream.result.text == llm.generate("Hello", **options).text
    assert next(stream, None) is None
    assert stream.result.text == "".join(pieces)


def test_there_is_no_result_while_pieces_are_to_come(llm: LLM) -> None:
    stream = llm.stream("Hello", max_new_tokens=20, **SAMPLED)
    next(stream)
    with pytest.raises(RuntimeError, match="not finished"):
        _ = stream.result


def test_a_stream_closed_early_holds_what_was_read_and_frees_its_buffers(llm: LLM) -> None:
    options = {"max_new_tokens": 60, "seed": 5, "stop_token_ids": (), **SAMPLED}
    expected = long_text(llm)
    for _ in range(3):
        stream = llm.stream("Hello", **options)
        pieces = [next(stream) for _ in range(5)]
        stream.close()
        stream.close()
        assert stream.result.text == "".join(pieces)
        assert stream.result.token_ids == expected.token_ids[: len(stream.result.token_ids)]
        assert 5 <= len(stream.result.token_ids) < 60
        assert stream.result.finish_reason == "cancelled"
        assert list(stream) == []
        lent = len(llm.decoder.workers._free)
        assert lent > 0
        assert long_text(llm).token_ids == expected.token_ids
        assert len(llm.decoder.workers._free) == lent


def test_a_stream_that_is_dropped_frees_its_buffers(llm: LLM) -> None:
    free = len(llm.decoder.workers._free)
    assert free
    for _piece in llm.stream("Hello", max_new_tokens=60, **SAMPLED):
        break
    assert len(llm.decoder.workers._free) == free


def test_a_stream_closed_before_its_first_piece_costs_nothing(llm: LLM) -> None:
    stream = llm.stream("Hello")
    stream.close()
    assert list(stream) == []
    assert (stream.result.token_ids, stream.result.finish_reason) == ((), "cancelled")


def test_a_stream_closed_at_its_end_keeps_its_result(llm: LLM) -> None:
    stream = llm.stream("Hello", max_new_tokens=8, **SAMPLED)
    text = "".join(stream)
    stream.close()
    assert (stream.result.text, stream.result.finish_reason) == (text, "length")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, SAMPLED])
def test_the_same_seed_gives_the_same_text_however_the_layers_are_cut(options: dict, llm: LLM, staged: LLM) -> None:
    for seed in range(4):
        results = [
            model.generate([9, 8, 7], max_new_tokens=80, seed=seed, stop_token_ids=(), **options)
            for model in (llm, staged, llm)
        ]
        assert results[0].token_ids == results[1].token_ids == results[2].token_ids


def test_another_seed_gives_another_text(llm: LLM) -> None:
    texts = {llm.generate("Hello", max_new_tokens=20, temperature=1.0, seed=seed).token_ids for seed in range(5)}
    assert len(texts) == 5


def test_one_new_token(llm: LLM) -> None:
    result = llm.generate("Hello", max_new_tokens=1)
    assert result.token_ids == llm.generate("Hello", max_new_tokens=9).token_ids[:1]
    assert (result.timings.ticks, result.timings.tokens_per_second, result.timings.host_share) == (0, 0, 0)


def test_timings_are_what_they_say(staged: LLM) -> None:
    timings = staged.generate([5] * 50, max_new_tokens=100, stop_token_ids=()).timings
    assert timings.ticks >= 99  # with several stages a tick advances a token by one of them
    assert timings.prefill_seconds > 0
    assert timings.decode_seconds > 0
    assert timings.tokens_per_second == pytest.approx(99 / timings.decode_seconds)
    assert 0 < timings.host_share < 1


def test_a_slow_reader_is_not_in_the_timings(llm: LLM) -> None:
    start = perf_counter()
    stream = llm.stream("Hello", max_new_tokens=5, seed=5, **SAMPLED)
    for _piece in stream:
        sleep(0.1)
    timings = stream.result.timings
    assert timings.prefill_seconds + timings.decode_seconds <= perf_counter() - start - 0.1


def test_token_ids_may_come_from_numpy_and_chat_is_the_template(llm: LLM) -> None:
    ids = [5, 6, 7]
    expected = llm.generate(ids, max_new_tokens=5).token_ids
    for prompt in (tuple(ids), np.array(ids), [np.int32(number) for number in ids]):
        assert llm.generate(prompt, max_new_tokens=5).token_ids == expected
    chat = llm.encode([{"role": "user", "content": "Hi"}])
    assert chat == byte_tokenizer().encode("user: Hi\nassistant: ").ids


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 1.5, b"bytes", {"role": "user"}, [1.5], [5, "a"], ["a"], [[5]], [{"role": "user"}, 5], np.eye(2)],
)
def test_what_is_no_prompt_is_refused(prompt: object, llm: LLM) -> None:
    with pytest.raises(MisuseError):
        llm.generate(prompt)


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: object, llm: LLM) -> None:
    with pytest.raises(MisuseError, match="prompt is empty"):
        llm.stream(prompt)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**9])
def test_a_token_outside_the_vocabulary_is_named(token: int, llm: LLM) -> None:
    with pytest.raises(MisuseError, match=f"token id {token} is outside the vocabulary of {VOCABULARY}"):
        llm.generate([5, token, 6])


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 1000])
def test_a_prompt_as_long_as_the_context_is_refused_before_the_first_piece(length: int, llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=f"{length} tokens, the model's context holds {CONTEXT}"):
        llm.stream([5] * length)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 257}, "min_tokens"),
        ({"min_tokens": 1, "regex": "a"}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 101}, "logprobs"),
        ({"stop_token_ids": "2"}, "stop_token_ids"),
        ({"stop_token_ids": 2}, "stop_token_ids"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": {"type": "bogus"}}, "json_schema"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema.*uniqueItems"),
        ({"regex": "("}, "regex"),
        ({"regex": 5}, "regex"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5"),
        ({"logit_bias": {VOCABULARY: 1}}, f"token id {VOCABULARY}"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "stop strings"),
        ({"stop": ["a", ""]}, "stop strings"),
        ({"stop": [3]}, "stop strings"),
    ],
)
def test_a_bad_parameter_is_named_at_once(options: dict, named: str, llm: LLM) -> None:
    with pytest.raises(MisuseError, match=named):
        llm.stream("Hello", **options)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, "2", 5000, 2**40])
def test_a_bad_number_of_threads_is_named(threads: object, checkpoint: Path) -> None:
    with pytest.raises(MisuseError, match="threads"):
        wavekit.load(checkpoint, threads=threads)


def test_without_a_tokenizer_only_token_ids_work(checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*")))
    llm = wavekit.load(exported(model, tmp_path / "bundle"), threads=1)
    result = llm.generate([5, 6, 7], max_new_tokens=5)
    assert (len(result.token_ids), result.text) == (5, "")
    assert list(llm.stream([5, 6, 7], max_new_tokens=5)) == []
    for arguments in (
        {"prompt": "Hello"},
        {"prompt": [{"role": "user", "content": "x"}]},
        {"prompt": [5], "stop": "x"},
    ):
        with pytest.raises(MisuseError, match="no tokenizer"):
            llm.generate(**arguments)
