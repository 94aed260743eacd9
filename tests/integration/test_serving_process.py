"""`wavekit serve` as a process: how it begins, and how it ends in the middle of streams."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from command_line import COMMAND, assert_one_line, environment, wavekit_here
from serving_here import text_bundle

from wavekit.serving.server import bind


class Served:
    """A server in a process of its own, which writes one text at a time."""

    def __init__(self, bundle: Path, options: Sequence[str], variables: dict[str, str]) -> None:
        command = [COMMAND, "serve", bundle, "--port", "0", "--max-concurrent", "1", "--threads", "1", *options]
        environ = environment(**variables)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        url = self.process.stdout.readline().decode().split()[-1]
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)

    def stream(self) -> Any:
        """Ask for 200 characters, a token each."""
        shape = {"wavekit": {"regex": "[a-z]{200}"}}
        return self.client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True, extra_body=shape)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_bundle(tmp_path_factory.mktemp("serving"))


@pytest.fixture
def served(bundle: Path) -> Iterator[Callable[..., Served]]:
    started = list[Served]()

    def serve(*options: str, **variables: str) -> Served:
        started.append(Served(bundle, options, variables))
        return started[-1]

    yield serve
    for server in started:
        server.process.kill()
        server.process.communicate()


def test_a_request_to_stop_ends_streams_in_order(served: Callable[..., Served]) -> None:
    server = served("--grace", "0")
    streams = [server.stream() for _ in range(12)]
    next(iter(streams[0]))
    server.process.send_signal(signal.SIGTERM)
    reasons = [[chunk.choices[0].finish_reason for chunk in stream][-1] for stream in streams]
    assert {*reasons} <= {"stop", "length"}
    assert reasons[-1] == "length"  # it had not begun
    assert server.process.wait(30) == 0
    assert b"Traceback" not in server.process.stderr.read()
    with pytest.raises(openai.APIConnectionError):
        server.client.models.list()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_texts_may_go_on_until_a_second_request_to_stop(second: signal.Signals, served: Callable[..., Served]) -> None:
    server = served("--grace", "3000")
    streams = [server.stream() for _ in range(30)]
    first = iter(streams[0])
    next(first)
    server.process.send_signal(signal.SIGTERM)
    assert len("".join(chunk.choices[0].text for chunk in first)) > 150  # to its end
    server.process.send_signal(second)
    last = list(streams[-1])
    assert (last[-1].choices[0].finish_reason, "".join(chunk.choices[0].text for chunk in last)) == ("length", "")
    assert server.process.wait(30) == 0


def test_a_server_that_is_killed_leaves_neither_waiting_clients_nor_a_taken_port(served: Callable[..., Served]) -> None:
    server = served(WAVEKIT_API_KEY="sk-env")
    with pytest.raises(openai.AuthenticationError, match="wrong"):
        server.stream()
    server.client.api_key = "sk-env"
    streams = [server.stream() for _ in range(4)]
    next(iter(streams[0]))
    server.process.kill()
    for stream in streams:
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    server.process.wait(30)  # its connections may end before its port is free
    with bind("127.0.0.1", server.client.base_url.port):
        pass


def test_a_server_that_cannot_listen_says_why(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert_one_line(wavekit_here(capfd, "serve", bundle, "--port", port), 2, "in use", "--port")
    assert_one_line(wavekit_here(capfd, "serve", bundle, "--host", "203.0.113.1"), 2, "203.0.113.1", "--host")
    assert_one_line(wavekit_here(capfd, "serve", bundle, "--api-key", ""), 2, "--api-key is empty")
