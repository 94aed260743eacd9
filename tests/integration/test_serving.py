"""The server as OpenAI's own client finds it, and as clients that misbehave do."""

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from command_line import COMMAND, assert_one_line, environment, save_text_model, wavekit_here
from draft_models import draft_of
from engines import exported
from prometheus_client.parser import text_string_to_metric_families

import wavekit as package
from wavekit.llm import LLM
from wavekit.serving.app import Limits, create_app
from wavekit.serving.server import bind
from wavekit_engines.checkpoint import open_checkpoint

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
KEY = "sk-test"
OPTIONS: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    model = save_text_model("llama-untied", folder / "model", seed=1)
    return exported(model, folder / "tiny", draft=draft_of(open_checkpoint(str(model)), seed=2))


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return package.load(bundle, threads=1, concurrency=3)


class Server:
    """A server in a thread of its own."""

    def __init__(self, app: Any) -> None:
        self.service = app.state.service
        listening = bind("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()
        eventually(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, content

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, str], Any]:
        status, headers, content = self.request("POST", path, json.dumps({"model": "tiny", **body}).encode())
        return status, headers, json.loads(content)

    def metrics(self) -> dict[str, float]:
        """Samples by name, summed over labels but for counts by reason or status."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.request("GET", "/metrics")[2].decode()):
            for sample in family.samples:
                labels = "".join(f" {sample.labels[name]}" for name in ("reason", "status") if name in sample.labels)
                found[sample.name + labels] = found.get(sample.name + labels, 0) + sample.value
        return found


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    running = Server(create_app(llm, "tiny", Limits(running=3, waiting=40, max_body=20000), KEY))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tick takes 20 ms, so that there is time to interfere."""
    decode = llm.decoder.decode

    def slowly(*arguments: Any) -> Iterator[list[int]]:
        ticks = decode(*arguments)
        try:
            for tokens in ticks:
                time.sleep(0.02)
                yield tokens
        finally:
            ticks.close()

    monkeypatch.setattr(llm.decoder, "decode", slowly)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def expected(llm: LLM, prompt: Any = MESSAGES, **options: Any) -> Any:
    options = {**{"max_new_tokens": 40, "temperature": 0.9, "seed": 5}, **options}
    return llm.generate(prompt, speculate="off", **options)


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


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=shape)
    value = json.loads(answer.choices[0].message.content or "")
    assert sorted(value) == ["kind", "name"]
    number = client.completions.create(model="tiny", prompt="x", extra_body={"wavekit": {"regex": "[0-9]{4}"}})
    assert re.fullmatch("[0-9]{4}", number.choices[0].text)


def test_steps_say_what_ticks_committed(server: Server, llm: LLM) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "wavekit": {"steps": True, "speculate": "lookup"}}
    content = server.request("POST", "/v1/chat/completions", json.dumps({**body, **OPTIONS}).encode())[2].decode()
    events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith("data: {")]
    told = [event["wavekit"] for event in events if "wavekit" in event]
    assert content.endswith("data: [DONE]\n\n")
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


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_ends_its_generation(stream: bool, server: Server, llm: LLM) -> None:
    before = server.metrics().get("wavekit_generations_total cancelled", 0)
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream, "wavekit": {"regex": ".{200}"}}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    if stream:
        connection.getresponse().read(10)
    eventually(lambda: llm.statistics.running == 1)
    connection.close()
    eventually(lambda: llm.statistics.running == 0 and server.service.admission.inside == 0)
    assert server.metrics()["wavekit_generations_total cancelled"] == before + 1


@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_the_queue_makes_room_at_once(server: Server, llm: LLM) -> None:
    with server.client() as client:
        streams = [
            client.completions.create(
                model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"wavekit": {"regex": ".{200}"}}
            )
            for _ in range(5)
        ]
        eventually(lambda: llm.statistics.running == 3)
        assert server.metrics()["wavekit_waiting"] == 2
        streams[4].close()
        eventually(lambda: server.service.admission.inside == 4)
        assert llm.statistics.running == 3
        for stream in streams:
            stream.close()
    eventually(lambda: server.service.admission.inside == 0)


@pytest.mark.usefixtures("slow")
def test_the_client_closes_its_stream(client: openai.OpenAI, server: Server, llm: LLM) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, extra_body={"wavekit": {"regex": ".{200}"}}
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: llm.statistics.running == 0 and server.service.admission.inside == 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[]", None),
        (b"\xff", None),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "temperature": 3}, "temperature"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ({"messages": MESSAGES, "top_p": 0}, "top_p"),
        ({"messages": MESSAGES, "n": 2}, "n"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools"),
        ({"messages": MESSAGES, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "stream_options": {}}, "stream_options"),
        ({"messages": MESSAGES, "stop": ["x"] * 17}, "stop"),
        ({"messages": MESSAGES, "stop": ""}, None),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": MESSAGES, "wavekit": {"regex": "("}}, None),
        ({"messages": MESSAGES, "wavekit": {"speculate": "exits"}}, None),
        ({"messages": MESSAGES, "wavekit": {"speed": 2}}, "wavekit.speed"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(body: Any, param: str | None, server: Server) -> None:
    data = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
    status, _, content = server.request("POST", "/v1/chat/completions", data)
    error = json.loads(content)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]
    assert "Traceback" not in error["message"]


def test_neutral_values_of_what_is_not_served_pass(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=1, frequency_penalty=0, presence_penalty=0.0, user="me", max_tokens=1
    )
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_prompt_longer_than_the_context_is_refused(path: str, server: Server) -> None:
    text = "long " * 200
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    status, _, answer = server.post(path, **body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_body_that_is_too_large_is_refused(server: Server) -> None:
    data = json.dumps({"model": "tiny", "prompt": "x" * 30000}).encode()
    status, _, content = server.request("POST", "/v1/completions", data)
    assert (status, json.loads(content)["error"]["code"]) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:  # the same without saying how large
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_key_is_asked_for(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError, match="wrong"):
        server.client("sk-other").models.list()
    for path, status in (("/v1/models", 401), ("/metrics", 401), ("/v1/nothing", 401), ("/health", 200), ("/", 200)):
        assert server.request("GET", path, Authorization="")[0] == status


def test_models_and_what_is_not_there(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "wavekit"
    with pytest.raises(openai.NotFoundError, match="'large' is not here; 'tiny' is"):
        client.chat.completions.create(model="large", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")
    assert server.request("GET", "/v1/nothing")[0] == 404
    status, headers, content = server.request("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_a_full_server_says_when_to_come_again(llm: LLM) -> None:
    server = Server(create_app(llm, "tiny", Limits(running=1, waiting=0)))
    try:
        with server.service.admission.entry(), pytest.raises(openai.RateLimitError) as refused:
            server.client().chat.completions.create(model="tiny", messages=MESSAGES)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2)[0] == 200
        assert server.metrics()["wavekit_requests_total 429"] == 1
    finally:
        server.stop()


def test_a_text_ends_in_time(llm: LLM, slow: None) -> None:
    server = Server(create_app(llm, "tiny", Limits(running=1, seconds=0.3)))
    try:
        start = time.monotonic()
        answer = server.post("/v1/completions", prompt="x", max_tokens=200, wavekit={"regex": ".{200}"})[2]
        assert time.monotonic() - start < 2
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 200
    finally:
        server.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_an_answer_and_one_line_in_the_log(
    stream: bool, server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> Iterator[list[int]]:
        yield [5]
        raise RuntimeError("the engine's secret")

    monkeypatch.setattr(llm.decoder, "decode", fail)
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": stream}).encode()
    status, _, content = server.request("POST", "/v1/chat/completions", body)
    assert status == (200 if stream else 500)
    assert b"internal_error" in content
    assert b"secret" not in content
    assert content.endswith(b"data: [DONE]\n\n") or not stream
    (line,) = [record for record in caplog.records if record.name == "wavekit.serve"]
    assert "secret" in line.getMessage()
    assert line.exc_info is None


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
    assert not re.search(rb"https?://|src=|<link", content)


def test_a_request_to_stop_ends_streams_in_order(bundle: Path) -> None:
    command = [COMMAND, "serve", bundle, "--port", "0", "--max-concurrent", "1", "--grace", "0", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().split()[-1]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        streams = [
            client.completions.create(
                model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"wavekit": {"regex": ".{200}"}}
            )
            for _ in range(12)
        ]
        next(iter(streams[0]))
        process.send_signal(signal.SIGTERM)
        reasons = [[chunk.choices[0].finish_reason for chunk in stream][-1] for stream in streams]
        assert {*reasons} <= {"stop", "length"}
        assert reasons[-1] == "length"  # it had not begun
        assert process.wait(30) == 0
        assert b"Traceback" not in process.stderr.read()
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_cannot_listen_says_why(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert_one_line(wavekit_here(capfd, "serve", bundle, "--port", port), 2, "in use", "--port")
    assert_one_line(wavekit_here(capfd, "serve", bundle, "--host", "203.0.113.1"), 2, "203.0.113.1", "--host")
