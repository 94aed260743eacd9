"""Engines of others, each in a worker process of its own that stays for the whole run.

What is installed in their environment is found out by starting them. The protocol is in `peer_worker`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

from wavekit.benchmarking import peer_worker
from wavekit.benchmarking.quiet import Others
from wavekit.benchmarking.runs import Written
from wavekit_engines.errors import MisuseError, WavekitError

KINDS = {"onnxruntime-genai": "genai", "transformers": "transformers"}
"""What a user calls them, and what the worker does."""

_SETTLING = 0.3  # seconds after which the thread pools of the engine before have stopped spinning
_STOPPING = 30


class PeerMissingError(WavekitError):
    """The peer's package is not installed where it was to run."""


@dataclass
class PeerProcess:
    """An engine in its own process, and how it is called in tables."""

    name: str
    command: list[str]
    threads: int
    versions: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start the process and wait until its engine is open.

        Raises:
            PeerMissingError: its package is not installed there.
            MisuseError: it cannot be started or cannot open its model.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        try:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
                env=environment,
            )  # fmt: skip
        except OSError as error:
            raise MisuseError(f"{self.name}: {self.command[0]} cannot be started: {error.strerror}") from None
        self.versions = self._read()["versions"]

    def generate(self, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
        """Ask for one continuation and wait for it. Raises MisuseError if the process ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def write(self, prompt: Sequence[int], new_tokens: int) -> Written:
        """The same once the engine before it has come to rest, with what others did meanwhile."""
        sleep(_SETTLING)
        others = Others()
        answer = self.generate(prompt, new_tokens)
        busy = others.cores(answer["cpu_seconds"])
        sleep(_SETTLING)  # the next engine must not meet this one's threads
        return Written(tuple(answer["tokens"]), answer["prefill_seconds"], answer["decode_seconds"], busy)

    def stop(self) -> None:
        """Let the process end by closing its input; nothing happens where it was never started."""
        if not hasattr(self, "_process"):
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOPPING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        self._said.seek(0)
        last = next((text for text in reversed(self._said.read().splitlines()) if text.strip()), "it said nothing")
        if status == peer_worker.MISSING:
            raise PeerMissingError(f"{self.name} is left out: {last} in the environment of {self.command[0]}")
        raise MisuseError(f"{self.name} ended with status {status}: {last}")


def peers(given: Sequence[tuple[str, str]], python: str | None, threads: int) -> list[PeerProcess]:
    """Peers by kind and folder of their model, not yet started.

    Raises:
        MisuseError: a kind that is none, or a folder that is not there.
    """
    found = []
    for kind, model in given:
        if kind not in KINDS:
            raise MisuseError(f"{kind} is no peer: say {' or '.join(f'{name}=FOLDER' for name in KINDS)}")
        if not Path(model).exists():
            raise MisuseError(f"{kind}: there is no {model}")
        path = str(Path(model).resolve())
        command = [python or sys.executable, peer_worker.__file__, KINDS[kind], path, str(threads)]
        found.append(PeerProcess(kind, command, threads))
    return found
