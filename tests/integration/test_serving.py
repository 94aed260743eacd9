"""The server as OpenAI's own client finds it."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving_here import KEY, MESSAGES, OPTIONS, Server, eventually, expected, text_bundle

import wavekit as package
from wavekit.llm import LLM
from wavekit.serving.app import Limits, create_app

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_bundle(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return package.load(bundle, threads=1, concurrency=3)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    running = Server(create_app(llm, "tiny", Limits(running=3, waiting=40, max_body=20000), KEY))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_a_chat_is_what_the_bundle_writes(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **OPTIONS)
    result = expected(llm)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", result.text)
    assert choice.finish_reason == result.finish_reason
    assert (answer.model, answer.object) == ("tiny", "chat.completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (result.prompt_tokens, len(result.token_ids))


def test_a_stream_is_the_same_text_in_chunks(client: openai.OpenAI, llm: LLM) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **OPTIONS
        )
    )
    result = expected(llm)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == result.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, result.finish_reason]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(result.token_ids))
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_completion(stream: bool, client: openai.OpenAI, llm: LLM) -> None:
    for prompt in ("Hello", llm.encode("Hello"), ["Hello"]):
        answer = client.completions.create(model="tiny", prompt=prompt, stream=stream, **OPTIONS)
        text = "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text
        assert text == expected(llm, "Hello").text
    assert client.completions.create(model="tiny", prompt="Hello").usage.completion_tokens <= 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(stream: bool, client: openai.OpenAI, llm: LLM) -> None:
    text = expected(llm).text
    word = next(match.group() for match in re.finditer("[!-~]{2}", text))
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, stop=word, stream=stream, **OPTIONS)
    parts = list(answer) if stream else [answer]
    if stream:
        said = "".join(part.choices[0].delta.content or "" for part in parts)
    else:
        said = parts[0].choices[0].message.content
    assert said == text[: text.index(word)]
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_models(stream: bool, client: openai.OpenAI, llm: LLM) -> None:
    result = expected(llm, logprobs=2)
    entries = [entry for entry in result.logprobs if entry.token_id != 2]
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=stream, **OPTIONS
    )
    parts = list(answer) if stream else [answer]
    told = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert [entry.logprob for entry in told] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    assert [[best.logprob for best in entry.top_logprobs] for entry in told] == [
        pytest.approx([logprob for _, logprob in entry.best], abs=1e-4) for entry in entries
    ]
    special = ("<pad>", "<s>")
    said = b"".join(bytes(entry.bytes) for entry in told if entry.token not in special)
    assert said.decode(errors="replace") == result.text
    plain = client.completions.create(model="tiny", prompt="user: Hi\nassistant: ", logprobs=2, **OPTIONS)
    assert plain.choices[0].logprobs.token_logprobs == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    def text(**options: Any) -> Any:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, **options)
        return answer.choices[0].message.content

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(seed=-1) == text(seed=-1)
    assert text() != text()


def test_penalties_and_biases_are_those_of_the_bundle(client: openai.OpenAI, llm: LLM) -> None:
    changes: Any = {"frequency_penalty": 1.5, "presence_penalty": -0.5}
    bias = dict.fromkeys(expected(llm).token_ids[:3], -100.0)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, **OPTIONS, **changes, logit_bias={str(token): -100 for token in bias}
    )
    result = expected(llm, **changes, logit_bias=bias)
    assert answer.choices[0].message.content == result.text != expected(llm).text


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=shape)
    value = json.loads(answer.choices[0].message.content or "")
    assert sorted(value) == ["kind", "name"]
    number = client.completions.create(model="tiny", prompt="x", extra_body={"wavekit": {"regex": "[0-9]{4}"}})
    assert re.fullmatch("[0-9]{4}", number.choices[0].text)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_and_prompts_come_by_number(stream: bool, client: openai.OpenAI, llm: LLM) -> None:
    def texts(answer: Any) -> tuple[dict[int, str], Any]:
        """Texts by choice, and the numbers of tokens."""
        found = dict[int, str]()
        for part in list(answer) if stream else [answer]:
            for choice in part.choices:
                said = choice.text if hasattr(choice, "text") else getattr(choice, "delta", None) or choice.message
                text = said if isinstance(said, str) else said.content or ""
                found[choice.index] = found.get(choice.index, "") + text
        return found, part.usage

    more: Any = {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {}), **OPTIONS}
    found, usage = texts(client.chat.completions.create(model="tiny", messages=MESSAGES, n=5, **more))
    results = [expected(llm, seed=5 + choice) for choice in range(5)]
    assert found == {choice: result.text for choice, result in enumerate(results)}
    assert usage.prompt_tokens == results[0].prompt_tokens
    assert usage.completion_tokens == sum(len(result.token_ids) for result in results)
    found, usage = texts(client.completions.create(model="tiny", prompt=["Hello", "x"], n=2, **more))
    pairs = [(prompt, seed) for prompt in ("Hello", "x") for seed in (5, 6)]
    assert found == {choice: expected(llm, prompt, seed=seed).text for choice, (prompt, seed) in enumerate(pairs)}
    assert usage.prompt_tokens == len(llm.encode("Hello")) + len(llm.encode("x"))


def test_what_clients_of_other_servers_send_means_the_same_here(client: openai.OpenAI, llm: LLM) -> None:
    def text(messages: Any = MESSAGES, **options: Any) -> Any:
        extra = {name: options.pop(name) for name in ("top_k", "ignore_eos") if name in options}
        options = {**OPTIONS, **options}
        return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **options).choices[0]

    usual = expected(llm)
    assert text(top_k=-1).message.content == usual.text
    assert (
        text(stop=None, tools=None, tool_choice="none", response_format={"type": "text"}).message.content == usual.text
    )
    word = next(match.group() for match in re.finditer("[!-~]{2}", usual.text))
    assert text(stop=[word, *"\n\r\t\v\f"]).message.content == re.split(f"{re.escape(word)}|[\\s]", usual.text)[0]
    assert text(max_tokens=1 << 40, max_completion_tokens=3).message.content == expected(llm, max_new_tokens=3).text
    assert text(ignore_eos=True, max_tokens=200).finish_reason == "length"
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert text([{"role": "user", "content": parts}]).message.content == usual.text
    other = [{"role": "developer", "content": "\U0001f984 \u65e5"}, {"role": "user", "content": "Hi", "name": "x"}]
    plain = [{"role": "developer", "content": "\U0001f984 \u65e5"}, {"role": "user", "content": "Hi"}]
    assert text(other).message.content == expected(llm, plain).text


def test_steps_say_what_ticks_committed(server: Server, llm: LLM) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "wavekit": {"steps": True, "speculate": "lookup"}}
    _, headers, data = server.request("POST", "/v1/chat/completions", json.dumps({**body, **OPTIONS}).encode())
    content = data.decode()
    events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith("data: {")]
    told = [event["wavekit"] for event in events if "wavekit" in event]
    assert content.endswith("data: [DONE]\n\n")
    assert (headers["content-type"].split(";")[0], headers["x-accel-buffering"]) == ("text/event-stream", "no")
    assert sum(step["tokens"] for step in told[:-1]) == len(expected(llm).token_ids)
    assert all(0 <= step["accepted"] < max(step["tokens"], 1) for step in told[:-1])
    assert all(len(step["parts"]) == step["tokens"] for step in told[:-1])
    assert told[-1]["tau"] >= 1


def test_32_requests_at_once_all_get_their_text(server: Server, llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        options = {**OPTIONS, "seed": seed}
        if seed % 2:
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
        return answer.choices[0].message.content or ""

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(32)))

    assert asyncio.run(main()) == [expected(llm, seed=seed).text for seed in range(32)]
    eventually(lambda: server.service.admission.inside == llm.statistics.running == 0)


def test_models_and_what_is_not_there(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "wavekit"
    with pytest.raises(openai.NotFoundError, match="'large' is not here; 'tiny' is"):
        client.chat.completions.create(model="large", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")
    assert server.request("GET", "/v1/nothing")[0] == 404
    assert [server.request("HEAD", path)[0] for path in ("/health", "/")] == [200, 200]
    status, headers, content = server.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_metrics_tell_of_tokens_and_tau(server: Server) -> None:
    before = server.metrics()
    status, _, answer = server.post("/v1/completions", prompt="Hello", max_tokens=20, seed=1)
    after = server.metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert status == 200
    assert grown["wavekit_requests_total 200"] == 2  # and the metrics themselves
    assert grown["wavekit_prompt_tokens_total"] == 5
    assert grown["wavekit_new_tokens_total"] == answer["usage"]["completion_tokens"]
    for name in ("tau", "request_seconds", "time_to_first_token_seconds", "time_per_token_seconds", "queue_seconds"):
        assert grown[f"wavekit_{name}_count"] == 1
    assert after["wavekit_tau_sum"] >= after["wavekit_tau_count"]
    assert (after["wavekit_running"], after["wavekit_waiting"]) == (0, 0)


def test_the_page_asks_nobody_else_for_anything(server: Server) -> None:
    status, headers, content = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.search(rb"https?://|src=|url\(|@import|<link(?! rel=\"icon\" href=\"data:,\">)", content)


def test_the_page_finds_what_its_script_looks_for(server: Server) -> None:
    page = server.request("GET", "/")[2].decode()
    ids = {*re.findall(r'id="([\w-]+)"', page)}
    assert {*re.findall(r'at\("([\w-]+[a-z])"\)', page)} <= ids
    assert {prefix + side for prefix in re.findall(r'at\("(\w+-)" \+ side\)', page) for side in "ab"} <= ids
    assert {*re.findall(r'(?:for|aria-labelledby|aria-describedby)="([\w-]+)"', page)} <= ids
    health = json.loads(server.request("GET", "/health", Authorization="")[2])
    assert (health["model"], health["auto"]) == ("tiny", "draft+lookup")
    assert {*health["speculate"]} == {"draft", "lookup", "draft+lookup"}
