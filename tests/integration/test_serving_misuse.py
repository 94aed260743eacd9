"""The server under requests that make no sense, clients that leave, too many of them, and failures."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving_here import KEY, MESSAGES, Server, eventually, slowed, text_bundle

import wavekit as package
from wavekit.llm import LLM
from wavekit.serving.app import Limits, create_app


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


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.decoder, "decode", slowed(llm))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("stream", "texts"), [(True, 1), (False, 1), (True, 3)])
def test_a_client_that_disconnects_ends_its_generations(stream: bool, texts: int, server: Server, llm: LLM) -> None:
    before = server.metrics().get("wavekit_generations_total cancelled", 0)
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream, "n": texts, "wavekit": {"regex": ".{200}"}}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    if stream:
        connection.getresponse().read(10)
    eventually(lambda: llm.statistics.running == texts)
    connection.close()
    eventually(lambda: llm.statistics.running == 0 and server.service.admission.inside == 0)
    assert server.metrics()["wavekit_generations_total cancelled"] == before + texts


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
        ({"messages": MESSAGES, "temperature": -1}, "temperature"),
        ({"messages": MESSAGES, "temperature": float("nan")}, "temperature"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"messages": MESSAGES, "seed": 1.5}, "seed"),
        ({"messages": MESSAGES, "stop": [5]}, "stop"),
        ({"messages": MESSAGES, "n": 0}, "n"),
        ({"messages": MESSAGES, "n": 44}, "n"),  # more than may be there
        ({"messages": MESSAGES, "tools": [{}]}, "tools"),
        ({"messages": MESSAGES, "guided_regex": "a*"}, "guided_regex"),
        ({"messages": MESSAGES, "logit_bias": {"5": "much"}}, "logit_bias.5"),
        ({"messages": MESSAGES, "logit_bias": {"5": 101}}, None),
        ({"messages": MESSAGES, "logit_bias": {"5000": 1}}, None),
        ({"messages": MESSAGES, "presence_penalty": -2.5}, "presence_penalty"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "stream_options": {}}, "stream_options"),
        ({"messages": MESSAGES, "stop": ["x"] * 17}, "stop"),
        ({"messages": MESSAGES, "stop": ""}, None),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type"),
        (
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"name": "endless", "schema": {"$ref": "#"}}},
            },
            None,
        ),
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


def test_a_body_that_does_not_say_that_it_is_json_is_told_so(server: Server) -> None:
    body = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):  # the latter is what curl says unless told
        status, _, content = server.request("POST", "/v1/chat/completions", body, **{"Content-Type": kind})
        assert (status, "application/json" in json.loads(content)["error"]["message"]) == (415, True)


def test_a_connection_survives_refused_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    good = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    seen = []
    for body in (good, b"{", good, json.dumps({"model": "large", "prompt": "x"}).encode(), good):
        connection.request("POST", "/v1/completions", body, headers)
        reply = connection.getresponse()
        reply.read()
        seen.append((reply.status, reply.will_close))
    connection.close()
    assert seen == [(200, False), (400, False), (200, False), (404, False), (200, False)]


def test_a_web_page_may_use_it_only_if_told_so(server: Server, llm: LLM) -> None:
    asking = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization,content-type"
    assert "access-control-allow-origin" not in server.request("OPTIONS", "/v1/chat/completions", **asking)[1]
    assert "access-control-allow-origin" not in server.request("GET", "/v1/models", Origin="https://a.org")[1]
    opened = Server(create_app(llm, "tiny", Limits(), KEY, origins=["https://a.org"]))
    try:
        status, headers, _ = opened.request("OPTIONS", "/v1/chat/completions", **{**asking, "Authorization": ""})
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.org")
        assert "authorization" in headers["access-control-allow-headers"]
        for key, status in ((KEY, 200), ("sk-other", 401)):  # a page that is refused can read why
            answer = opened.request("GET", "/v1/models", Origin="https://a.org", Authorization=f"Bearer {key}")
            assert (answer[0], answer[1]["access-control-allow-origin"]) == (status, "https://a.org")
        assert opened.request("OPTIONS", "/v1/models", **{**asking, "Origin": "https://b.org"})[0] == 400
    finally:
        opened.stop()


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
