"""Soak test: many short generations in this process, then mixed load on a server, every text checked.

    python benchmarks/soak.py bundle --generations 10000 --minutes 120 --clients 8

The first part calls `llm.generate`; the second starts `wavekit serve` on a free loopback port and sends it chats and
completions, streamed and whole, greedy and sampled, with stop strings, with clients that leave in mid-stream and with
bodies that make no sense. Texts are compared with plain decoding, done before. Prints memory and threads along the way,
latencies and everything that went wrong as JSON, and exits with 1 if anything did. Linux only: it reads /proc.
"""

import argparse
import gc
import http.client
import json
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
)
BROKEN = (b"{", b"[]", b'{"model": 5}', b'{"model": "soak", "messages": []}', b"\xff" * 40)
GROWTH = 1.1  # memory at the end over memory after a tenth of the work; caches fill up before


@dataclass(frozen=True)
class Case:
    """A request, and the text that plain decoding gives."""

    prompt: str
    options: dict[str, Any]
    text: str


@dataclass
class Findings:
    """What clients saw; shared by their threads."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def main() -> None:
    """Run both parts and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--generations", type=int, default=1000, help="short generations in this process")
    parser.add_argument("--minutes", type=float, default=2.0, help="of load on the server")
    parser.add_argument("--clients", type=int, default=8, help="that send requests at a time")
    parser.add_argument("--tokens", type=int, default=24, help="the most tokens of a text")
    arguments = parser.parse_args()
    llm = wavekit.load(arguments.bundle, check_hashes=False)
    cases = [
        Case(prompt, way | {"seed": seed}, _plain(llm, prompt, way, seed, arguments.tokens))
        for prompt in PROMPTS
        for way in WAYS
        for seed in range(2)
    ]
    report = {"embedded": embedded(llm, cases, arguments.generations, arguments.tokens)}
    llm.close()
    del llm
    gc.collect()
    report["server"] = served(arguments.bundle, cases, arguments.minutes, arguments.clients, arguments.tokens)
    print(json.dumps(report, indent=2))
    sys.exit(any(part["wrong"] or part["grew"] for part in report.values()))


def _plain(llm: LLM, prompt: str, way: dict[str, Any], seed: int, tokens: int) -> str:
    chat = [{"role": "user", "content": prompt}]
    return llm.generate(chat, seed=seed, max_new_tokens=tokens, speculate="off", **way).text


def embedded(llm: LLM, cases: list[Case], count: int, tokens: int) -> dict[str, Any]:
    """Short generations one after the other; every eighth is a stream that is left half read."""
    wrong, trace, seconds = list[str](), list[dict[str, float]](), list[float]()
    for number in range(count):
        case = cases[number % len(cases)]
        chat = [{"role": "user", "content": case.prompt}]
        start = time.perf_counter()
        stream = llm.stream(chat, max_new_tokens=tokens, **case.options)
        if number % 8 == 7:
            text = next(stream, "")
            stream.close()
            fits = case.text.startswith(text)
        else:
            text = "".join(stream)
            fits = text == case.text
            seconds.append(time.perf_counter() - start)
        if not fits:
            wrong.append(f"{case.prompt!r} {case.options}: {text!r} is not {case.text!r}")
        if number % max(count // 10, 1) == 0 or number == count - 1:
            trace.append({"done": number + 1, **usage("self")})
    return {"generations": count, "wrong": wrong[:5], **_grown(trace), "seconds": _percentiles(seconds), "trace": trace}


def served(bundle: Path, cases: list[Case], minutes: float, clients: int, tokens: int) -> dict[str, Any]:
    """Mixed load on a server of its own."""
    command = [sys.executable, "-m", "wavekit", "serve", str(bundle), "--port", "0", "--name", "soak", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().rpartition("//")[2].strip()
        findings, end = Findings(), time.monotonic() + 60 * minutes
        threads = [
            threading.Thread(target=_client, args=(address, cases, tokens, end, random.Random(number), findings))
            for number in range(clients)
        ]
        trace = list[dict[str, float]]()
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            time.sleep(min(6 * minutes, max(end - time.monotonic(), 0)))
            trace.append({"done": sum(findings.counts.values()), **usage(str(server.pid))})
        for thread in threads:
            thread.join()
        trace.append({"done": sum(findings.counts.values()), **usage(str(server.pid))})
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    if code:
        findings.wrong.append(f"the server ended with {code}")
    return {
        "requests": dict(findings.counts),
        "wrong": findings.wrong[:5],
        **_grown(trace),
        "tokens_per_second": round(findings.tokens / (60 * minutes), 1),
        "seconds": _percentiles(findings.seconds),
        "seconds_to_first_token": _percentiles(findings.first),
        "trace": trace,
    }


def _client(address: str, cases: list[Case], tokens: int, end: float, draw: random.Random, findings: Findings) -> None:
    while time.monotonic() < end:
        kind = draw.choices(("whole", "streamed", "abandoned", "broken"), (4, 4, 1, 1))[0]
        try:
            if kind == "broken":
                _send_broken(address, draw, findings)
            else:
                _send(address, draw.choice(cases), tokens, kind, findings)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with findings.lock:
                findings.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        with findings.lock:
            findings.counts[kind] += 1


def _send_broken(address: str, draw: random.Random, findings: Findings) -> None:
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("POST", "/v1/chat/completions", draw.choice(BROKEN), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    if not 400 <= reply.status < 500 or b'"error"' not in body:
        with findings.lock:
            findings.wrong.append(f"a broken body got {reply.status}: {body[:200]!r}")


def _send(address: str, case: Case, tokens: int, kind: str, findings: Findings) -> None:
    messages = [{"role": "user", "content": case.prompt}]
    body = {"model": "soak", "messages": messages, "max_tokens": tokens, "stream": kind != "whole", **case.options}
    connection = http.client.HTTPConnection(address, timeout=120)
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if kind == "abandoned":
        reply.read(1)
        connection.close()
        return
    text, first, count = "", 0.0, 0
    if kind == "whole":
        answer = json.loads(reply.read())
        text, count = answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    else:
        for line in reply:
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                first = first or (time.monotonic() - start if piece else 0.0)
                text += piece
    connection.close()
    with findings.lock:
        findings.seconds.append(time.monotonic() - start)
        findings.first += [first] if first else []
        findings.tokens += count
        if text != case.text:
            findings.wrong.append(f"{kind} {case.prompt!r} {case.options}: {text!r} is not {case.text!r}")


def usage(process: str) -> dict[str, float]:
    """Resident memory in MB, threads and open files of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line)
    files = len(list(Path(f"/proc/{process}/fd").iterdir()))
    return {"mb": round(int(lines["VmRSS"].split()[0]) / 1024, 1), "threads": int(lines["Threads"]), "files": files}


def _grown(trace: list[dict[str, float]]) -> dict[str, Any]:
    """Whether memory or threads at the end are more than after the first tenth."""
    early, late = trace[min(1, len(trace) - 1)], trace[-1]
    return {"grew": late["mb"] > GROWTH * early["mb"] or late["threads"] > early["threads"]}


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{share}": round(float(np.percentile(seconds, share)), 3) for share in (50, 95, 99)}


if __name__ == "__main__":
    main()
