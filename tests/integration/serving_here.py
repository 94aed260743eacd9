"""A server in a thread of this process, for tests that talk to it over HTTP, and what its texts must be."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import uvicorn
from command_line import save_text_model
from draft_models import draft_of
from engines import exported
from prometheus_client.parser import text_string_to_metric_families

from wavekit.llm import LLM
from wavekit.serving.server import bind
from wavekit_engines.checkpoint import open_checkpoint

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
KEY = "sk-test"
OPTIONS: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40}


def text_bundle(folder: Path) -> Path:
    """A bundle with a tokenizer and a draft head, all of random weights."""
    model = save_text_model("llama-untied", folder / "model", seed=1)
    return exported(model, folder / "tiny", draft=draft_of(open_checkpoint(str(model)), seed=2))


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


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def expected(llm: LLM, prompt: Any = MESSAGES, **options: Any) -> Any:
    options = {**{"max_new_tokens": 40, "temperature": 0.9, "seed": 5}, **options}
    return llm.generate(prompt, speculate="off", **options)


def slowed(llm: LLM, seconds: float = 0.02) -> Callable[..., Iterator[list[int]]]:
    """The decoder's `decode`, every tick of which takes longer, so that there is time to interfere."""
    decode = llm.decoder.decode

    def slowly(*arguments: Any) -> Iterator[list[int]]:
        ticks = decode(*arguments)
        try:
            for tokens in ticks:
                time.sleep(seconds)
                yield tokens
        finally:
            ticks.close()

    return slowly
