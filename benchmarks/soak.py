"""Soak test: many short generations in this process, then mixed load on a server, every text checked.

    python benchmarks/soak.py bundle --generations 10000 --minutes 120 --clients 8 > soak.json

The first part calls `llm.generate`; the second starts `wavekit serve` on a free loopback port and sends it chats and
completions, streamed and whole, greedy and sampled, with stop strings, log probabilities and a regular expression, with
clients that leave in mid-stream and with bodies that make no sense. Texts are compared with plain decoding, done
before. `--pause 10` lets every client rest ten seconds on average between two requests, so that a machine with other
work can carry hours of it; 0 for `--generations` or `--minutes` leaves a part out.

Memory and threads along the way go to the error output, a line each; latencies and everything that went wrong to the
output as JSON. It exits with 1 if a text was wrong, or memory or threads grew. Where the whole machine stood still
(processes that were stopped and continued), the requests of that time are left out of the latencies and counted.
Linux only: it reads /proc.
"""

import argparse
import gc
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import wavekit
from wavekit.llm import LLM

PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "Count from one to twenty in words.",
    "Repeat this: the cat sat on the mat, the cat sat on the mat.",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "stop": ["."]},
    {"temperature": 0.7, "regex": "[A-Z][a-z ]{5,40}[.]"},
)
BROKEN = (b"{", b"[]", b'{"model": 5}', b'{"model": "soak", "messages": []}', b"\xff" * 40)
GROWTH = 1.05  # memory in the second half over memory in the first, without its first tenth: caches fill up before
SAMPLES = 40
STILL = 1.5  # seconds in which a thread that wants to run every quarter of a second does not: the machine stood still
PATIENCE = 900  # seconds for an answer, a machine that stands still included


@dataclass(frozen=True)
class Case:
    """A chat or a text to go on with, how, and the text that plain decoding gives."""

    prompt: str
    chat: bool
    options: dict[str, Any]
    text: str

    def body(self, tokens: int, **more: Any) -> dict[str, Any]:
        """The request that asks a server for it."""
        options = dict(self.options)
        regex = options.pop("regex", None)
        extension = {"wavekit": {"regex": regex}} if regex else {}
        asked = {"messages": _chat(self.prompt)} if self.chat else {"prompt": self.prompt}
        return {"model": "soak", "max_tokens": tokens, **asked, **options, **extension, **more}


@dataclass
class Findings:
    """What clients saw; shared by their threads."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    disturbed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Stillness:
    """When this process could not run for a while; watched by a thread."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            if now - last > STILL:
                self.spans.append((last, now))
            last = now

    def within(self, start: float, end: float) -> bool:
        """Whether it did between two times."""
        return any(first < end and last > start for first, last in reversed(self.spans))

    @property
    def seconds(self) -> float:
        """How long altogether."""
        return round(sum(last - first for first, last in self.spans), 1)


def main() -> None:
    """Run both parts and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--generations", type=int, default=1000, help="short generations in this process")
    parser.add_argument("--minutes", type=float, default=2.0, help="of load on the server")
    parser.add_argument("--clients", type=int, default=8, help="that send requests at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a client rests, on average")
    parser.add_argument("--tokens", type=int, default=24, help="the most tokens of a text")
    parser.add_argument("--threads", type=int, help="of an engine")
    parser.add_argument("--prefix-memory", type=int, default=64, help="MB, little so that texts push others out")
    arguments = parser.parse_args()
    llm = wavekit.load(
        arguments.bundle,
        threads=arguments.threads,
        prefix_memory=arguments.prefix_memory << 20,
        check_hashes=False,
    )
    cases = [
        Case(prompt, chat, way | {"seed": seed}, _plain(llm, prompt, chat, way | {"seed": seed}, arguments.tokens))
        for prompt in PROMPTS
        for chat in (True, False)
        for way in WAYS
        for seed in range(2)
    ]
    still = Stillness()
    report = dict[str, dict[str, Any]]()
    if arguments.generations:
        report["embedded"] = embedded(llm, cases, arguments, still)
    llm.close()
    del llm
    gc.collect()
    if arguments.minutes:
        report["server"] = served(cases, arguments, still)
    print(json.dumps(report, indent=2))
    sys.exit(any(part["wrong"] or part["grew"] for part in report.values()))


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _plain(llm: LLM, prompt: str, chat: bool, options: dict[str, Any], tokens: int) -> str:
    asked = _chat(prompt) if chat else prompt
    return llm.generate(asked, max_new_tokens=tokens, speculate="off", **options).text


def embedded(llm: LLM, cases: list[Case], arguments: argparse.Namespace, still: Stillness) -> dict[str, Any]:
    """Short generations one after the other; every eighth is a stream that is left half read."""
    count, findings, trace = arguments.generations, Findings(), list[dict[str, float]]()
    begin = time.monotonic()
    for number in range(count):
        case = cases[number % len(cases)]
        asked = _chat(case.prompt) if case.chat else case.prompt
        start = time.monotonic()
        stream = llm.stream(asked, max_new_tokens=arguments.tokens, **case.options)
        if number % 8 == 7:
            text = next(stream, "")
            stream.close()
            fits = case.text.startswith(text)
        else:
            text = "".join(stream)
            fits = text == case.text
            _took(findings, start, still)
        if not fits:
            findings.wrong.append(f"{case.prompt!r} {case.options}: {text!r} is not {case.text!r}")
        if number % max(count // SAMPLES, 1) == 0 or number == count - 1:
            _sample(trace, begin, number + 1, "self", len(findings.wrong))
    return {"generations": count, **_summary(findings, trace, still)}


def served(cases: list[Case], arguments: argparse.Namespace, still: Stillness) -> dict[str, Any]:
    """Mixed load on a server of its own."""
    command = [sys.executable, "-m", "wavekit", "serve", str(arguments.bundle), "--port", "0", "--name", "soak"]
    command += ["--quiet", "--prefix-memory", str(arguments.prefix_memory)]
    command += ["--threads", str(arguments.threads)] if arguments.threads else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address, process = server.stdout.readline().rpartition("//")[2].strip(), str(server.pid)
        findings, begin, trace = Findings(), time.monotonic(), list[dict[str, float]]()
        end = begin + 60 * arguments.minutes
        threads = [
            threading.Thread(target=_client, args=(address, cases, arguments, end, number, findings, still))
            for number in range(arguments.clients)
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            time.sleep(max(min(60 * arguments.minutes / SAMPLES, end - time.monotonic()), 0))
            _sample(trace, begin, sum(findings.counts.values()), process, len(findings.wrong))
        for thread in threads:
            thread.join()
        _sample(trace, begin, sum(findings.counts.values()), process, len(findings.wrong))
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    if code:
        findings.wrong.append(f"the server ended with {code}")
    return {
        "requests": dict(findings.counts),
        **_summary(findings, trace, still),
        "seconds_to_first_token": _percentiles(findings.first),
    }


def _client(
    address: str,
    cases: list[Case],
    arguments: argparse.Namespace,
    end: float,
    number: int,
    findings: Findings,
    still: Stillness,
) -> None:
    draw = random.Random(number)
    while time.monotonic() < end:
        kind = draw.choices(("whole", "streamed", "abandoned", "broken"), (4, 4, 1, 1))[0]
        try:
            if kind == "broken":
                _send_broken(address, draw, findings)
            else:
                _send(address, draw.choice(cases), arguments.tokens, kind, draw, findings, still)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with findings.lock:
                findings.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        with findings.lock:
            findings.counts[kind] += 1
        if arguments.pause:
            time.sleep(min(draw.expovariate(1 / arguments.pause), max(end - time.monotonic(), 0)))


def _send_broken(address: str, draw: random.Random, findings: Findings) -> None:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("POST", "/v1/chat/completions", draw.choice(BROKEN), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    if not 400 <= reply.status < 500 or b'"error"' not in body:
        with findings.lock:
            findings.wrong.append(f"a broken body got {reply.status}: {body[:200]!r}")


def _send(
    address: str, case: Case, tokens: int, kind: str, draw: random.Random, findings: Findings, still: Stillness
) -> None:
    more: dict[str, Any] = {"stream": kind != "whole"}
    if draw.random() < 0.25:
        more |= {"logprobs": True, "top_logprobs": 2} if case.chat else {"logprobs": 2}
    path = "/v1/chat/completions" if case.chat else "/v1/completions"
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    start = time.monotonic()
    connection.request("POST", path, json.dumps(case.body(tokens, **more)), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if kind == "abandoned":
        reply.read(1)
        connection.close()
        return
    text, first, count = "", 0.0, 0
    if kind == "whole":
        answer = json.loads(reply.read())
        text, count = _text(answer["choices"][0]), answer["usage"]["completion_tokens"]
    else:
        for line in reply:
            if line.startswith(b"data: {"):
                piece = _text(json.loads(line[6:])["choices"][0])
                first = first or (time.monotonic() if piece else 0.0)
                text += piece
    connection.close()
    with findings.lock:
        calm = _took(findings, start, still)
        findings.first += [first - start] if first and calm else []
        findings.tokens += count
        if text != case.text:
            findings.wrong.append(f"{kind} {case.prompt!r} {case.options}: {text!r} is not {case.text!r}")


def _text(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")
    return str(text)


def _took(findings: Findings, start: float, still: Stillness) -> bool:
    """Note how long something took that has just ended, unless the machine stood still meanwhile."""
    end = time.monotonic()
    calm = not still.within(start, end)
    if calm:
        findings.seconds.append(end - start)
    else:
        findings.disturbed += 1
    return calm


def _sample(trace: list[dict[str, float]], begin: float, done: int, process: str, wrong: int) -> None:
    """Add a line to the trace, and write it."""
    minutes = round((time.monotonic() - begin) / 60, 1)
    trace.append({"minutes": minutes, "done": done, "wrong": wrong, **usage(process)})
    print(json.dumps(trace[-1]), file=sys.stderr, flush=True)


def usage(process: str) -> dict[str, float]:
    """Resident memory in MB, threads, open files and seconds of processor time of a process."""
    folder = Path("/proc", process)
    lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "mb": round(int(lines["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(lines["Threads"]),
        "files": len(list((folder / "fd").iterdir())),
        "cpu_seconds": round((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"), 1),
    }


def _summary(findings: Findings, trace: list[dict[str, float]], still: Stillness) -> dict[str, Any]:
    return {
        "wrong": len(findings.wrong),
        "examples": findings.wrong[:5],
        "grew": _grew(trace),
        "start": trace[0],
        "end": trace[-1],
        "seconds": _percentiles(findings.seconds),
        "disturbed": findings.disturbed,
        "still_seconds": still.seconds,
        "trace": trace,
    }


def _grew(trace: list[dict[str, float]]) -> bool:
    """Whether the most memory or the most threads of the second half are more than those of the first."""
    warm = trace[len(trace) // 10 :]
    early, late = warm[: len(warm) // 2 + 1], warm[len(warm) // 2 :]

    def most(samples: list[dict[str, float]], name: str) -> float:
        return max(sample[name] for sample in samples)

    return most(late, "mb") > GROWTH * most(early, "mb") or most(late, "threads") > most(early, "threads")


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{share}": round(float(np.percentile(seconds, share)), 3) for share in (50, 95, 99)}


if __name__ == "__main__":
    main()
