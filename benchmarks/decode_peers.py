"""Decoding speed of wavekit beside onnxruntime-genai, transformers and llama.cpp: same checkpoint, prompts and threads.

Every engine lives in a worker process of its own for the whole run. A round asks each of them, in turn and in an order
that rotates, to continue each prompt greedily by equally many tokens. What counts is the time from the first new token
to the last; the time until the first one is reported apart. A measurement during which other processes kept a core
busy is repeated, and flagged if that does not help. Results are ratios within a round, as a median over rounds with
their range. Greedy texts of equal precision are compared too: in fp32 a difference makes the run fail.

README.md beside this file says how to build what the peers need.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from wavekit.benchmarking import peer_worker
from wavekit.benchmarking.peers import PeerProcess
from wavekit.benchmarking.quiet import QUIET_CORES, Others, loads
from wavekit.benchmarking.runs import first_difference
from wavekit.machine import this_machine
from wavekit_engines.errors import WavekitError

HERE = Path(__file__).resolve().parent


@dataclass
class Measurement:
    """One prompt continued once by one engine.

    ``others``: cores that other processes kept busy meanwhile. ``host_share``: the part of the decoding time that
    wavekit spent outside its engines; the peers do not tell.
    """

    engine: str
    round: int
    prompt: int
    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    others: float
    host_share: float | None = None

    @property
    def token_seconds(self) -> float:
        """Seconds a token, the first one excluded."""
        return self.decode_seconds / (len(self.tokens) - 1)


@dataclass
class Worker(PeerProcess):
    """An engine in its own process, and what it is."""

    kind: str = ""
    precision: str = ""


def main() -> int:
    """Run the comparison and print it; 1 where fp32 texts differ."""
    arguments = parse_arguments()
    workers = list(make_workers(arguments))
    if not workers:
        sys.exit("name at least one engine: --wavekit, --genai, --llama or --transformers")
    prompts = read_prompts(arguments.prompts, arguments.checkpoint, arguments.count)
    try:
        for worker in workers:
            say(f"opening {worker.name}")
            worker.start()
        measurements = measure(workers, prompts, arguments)
    except WavekitError as error:
        sys.exit(str(error))
    finally:
        for worker in workers:
            worker.stop()
    report: dict[str, Any] = {
        "command": sys.argv,
        "machine": describe_machine(),
        "engines": {worker.name: worker.versions for worker in workers},
        "settings": {"threads": arguments.threads, "new_tokens": arguments.new_tokens, "rounds": arguments.rounds},
        "speed": [summarize(worker, measurements) for worker in workers],
        "ratios": list(compare(workers, measurements)),
        "texts": list(compare_texts(workers, measurements)),
    }
    print_report(report)
    if arguments.output:
        everything = {**report, "measurements": [asdict(m) for m in measurements]}
        arguments.output.write_text(json.dumps(everything, indent=1) + "\n")
    return int(any(row["precision"] == "fp32" and row["same"] < row["of"] for row in report["texts"]))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    option = parser.add_argument
    option("checkpoint", help="Hugging Face folder: the tokenizer and chat template, and the model of --transformers")
    option("--wavekit", action="append", default=[], metavar="PRECISION=BUNDLE", help="may be repeated")
    option("--genai", action="append", default=[], metavar="PRECISION=FOLDER", help="may be repeated")
    option("--peer-python", default=sys.executable, help="Python of the environment that has onnxruntime-genai")
    option("--llama", action="append", default=[], metavar="PRECISION=FILE.gguf", help="may be repeated")
    option("--llama-home", help="folder in which `npm install node-llama-cpp` was run")
    option("--transformers", action="store_true", help="also transformers, fp32 and not compiled")
    option("--prompts", type=Path, default=HERE / "prompts.txt", help="one user message a line")
    option("--count", type=int, default=4, help="use this many prompts from the head of the file")
    option("--new-tokens", type=int, default=128, help="tokens to write after each prompt")
    option("--threads", type=int, default=2, help="threads of every engine")
    option("--rounds", type=int, default=5, help="how often everybody has a turn on each prompt")
    option("--tries", type=int, default=3, help="measure at most so often where other processes disturb")
    option("-o", "--output", type=Path, help="write everything that was measured as JSON")
    return parser.parse_args()


def make_workers(arguments: argparse.Namespace) -> Iterator[Worker]:
    """Turn the command line into workers, not yet started."""
    threads = arguments.threads
    script = peer_worker.__file__
    pythons = {"wavekit": sys.executable, "genai": arguments.peer_python}
    for kind, python in pythons.items():
        for precision, path in map(split_spec, getattr(arguments, kind)):
            command = [python, script, kind, path, str(threads)]
            yield Worker(f"{kind} {precision}", command, threads, kind=kind, precision=precision)
    if arguments.transformers:
        command = [sys.executable, script, "transformers", arguments.checkpoint, str(threads)]
        yield Worker("transformers fp32", command, threads, kind="transformers", precision="fp32")
    for precision, path in map(split_spec, arguments.llama):
        if arguments.llama_home is None:
            sys.exit("--llama needs --llama-home, the folder in which `npm install node-llama-cpp` was run")
        home = str(Path(arguments.llama_home).resolve())
        command = ["node", str(HERE / "peer_llama.mjs"), home, path, str(threads)]
        yield Worker(f"llama.cpp {precision}", command, threads, kind="llama.cpp", precision=precision)


def split_spec(spec: str) -> tuple[str, str]:
    """Split ``PRECISION=PATH`` and make the path absolute."""
    precision, _, path = spec.partition("=")
    if not path or not Path(path).exists():
        sys.exit(f"{spec}: expected PRECISION=PATH with a path that exists")
    return precision, str(Path(path).resolve())


def read_prompts(file: Path, checkpoint: str, count: int) -> list[list[int]]:
    """Turn user messages into token ids with the checkpoint's own chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": line}], add_generation_prompt=True, tokenize=False
            ),
            add_special_tokens=False,
        )
        for line in file.read_text().splitlines()[:count]
    ]


def measure(
    workers: Sequence[Worker], prompts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> list[Measurement]:
    """Warm every worker up, then go round them, rotating who is first."""
    for worker in workers:
        say(f"warming up {worker.name}")
        worker.generate(prompts[0], arguments.new_tokens)
    measurements = []
    for turn in range(arguments.rounds):
        first = turn % len(workers)
        for number, prompt in enumerate(prompts):
            say(f"round {turn + 1} of {arguments.rounds}, prompt {number + 1} of {len(prompts)}")
            for worker in [*workers[first:], *workers[:first]]:
                tries = (
                    measure_once(worker, turn, number, prompt, arguments.new_tokens) for _ in range(arguments.tries)
                )
                measurements.append(quietest(tries))
    return measurements


def measure_once(worker: Worker, turn: int, number: int, prompt: Sequence[int], new_tokens: int) -> Measurement:
    """Measure one continuation, and what the rest of the machine did meanwhile."""
    time.sleep(0.3)  # the thread pools of the engine before have stopped spinning
    watched = Others()
    answer = worker.generate(prompt, new_tokens)
    others = watched.cores(answer.pop("cpu_seconds"))
    return Measurement(worker.name, turn, number, others=others or 0.0, **answer)


def quietest(tries: Iterable[Measurement]) -> Measurement:
    """Try until nothing disturbs, and keep the least disturbed measurement."""
    kept: list[Measurement] = []
    for attempt in tries:
        kept.append(attempt)
        if attempt.others <= QUIET_CORES:
            break
    return min(kept, key=lambda measurement: measurement.others)


def summarize(worker: Worker, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Milliseconds of one engine, and how disturbed they are."""
    own = [m for m in measurements if m.engine == worker.name]
    times = [m.token_seconds * 1e3 for m in own]
    low, _, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return {
        "engine": worker.name,
        "token_ms": median(times),
        "best_token_ms": min(times),
        "token_ms_quartiles": [low, high],
        "prefill_ms": median(m.prefill_seconds * 1e3 for m in own),
        "host_share": median(shares) if (shares := [m.host_share for m in own if m.host_share is not None]) else None,
        "disturbed": sum(m.others > QUIET_CORES for m in own),
        "of": len(own),
    }


def compare(workers: Sequence[Worker], measurements: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
    """Speed of each wavekit engine (the first engine, where there is none) over each peer's nearest, round by round."""
    seconds: dict[tuple[str, int], float] = {}
    for m in measurements:
        seconds[m.engine, m.round] = seconds.get((m.engine, m.round), 0.0) + m.token_seconds
    subjects = [worker for worker in workers if worker.kind == "wavekit"] or list(workers[:1])
    rounds = sorted({m.round for m in measurements})
    precisions = {(worker.kind, worker.precision) for worker in workers}
    for subject in subjects:
        for peer in workers:
            if peer is subject or (
                peer.precision != subject.precision and (peer.kind, subject.precision) in precisions
            ):
                continue  # itself, or a peer that has an engine of the same precision
            ratios = [seconds[peer.name, turn] / seconds[subject.name, turn] for turn in rounds]
            yield {"engine": subject.name, "over": peer.name, "median": median(ratios), "rounds": ratios}


def compare_texts(workers: Sequence[Worker], measurements: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
    """Compare what engines of equal precision wrote, and each engine with itself in later rounds."""
    texts: dict[str, dict[int, list[list[int]]]] = {}
    for m in measurements:
        texts.setdefault(m.engine, {}).setdefault(m.prompt, []).append(m.tokens)
    leaders: dict[str, Worker] = {}
    for worker in workers:
        leader = leaders.setdefault(worker.precision, worker)
        pairs = [(texts[leader.name][p][0], other) for p, others in texts[worker.name].items() for other in others]
        splits = [first_difference(one, other) for one, other in pairs]
        yield {
            "precision": worker.precision,
            "engine": worker.name,
            "with": leader.name,
            "same": splits.count(None),
            "of": len(splits),
            "first_differences": sorted({split for split in splits if split is not None}),
        }


def describe_machine() -> dict[str, Any]:
    """Describe what the numbers belong to."""
    machine = this_machine()
    return {"cpu": machine.cpu, "cores": os.cpu_count(), "system": platform.platform(), "load": loads()}


def print_report(report: dict[str, Any]) -> None:
    """Print the tables."""
    columns = f"{'ms/token':>9} {'quartiles':>15} {'best':>7} {'host':>6} {'prefill ms':>11} {'disturbed':>10}"
    print(f"\n{'engine':<20} {columns}")
    for row in report["speed"]:
        low, high = row["token_ms_quartiles"]
        noise = f"{row['disturbed']}/{row['of']}"
        spread = f"{low:.2f}-{high:.2f}"
        host = "" if row["host_share"] is None else f"{row['host_share']:.1%}"
        speed = f"{row['token_ms']:>9.2f} {spread:>15} {row['best_token_ms']:>7.2f}"
        print(f"{row['engine']:<20} {speed} {host:>6} {row['prefill_ms']:>11.1f} {noise:>10}")
    print("\nspeed over (median of rounds, range)")
    for row in report["ratios"]:
        spread = f"{min(row['rounds']):.2f}-{max(row['rounds']):.2f}"
        print(f"{row['engine']:<20} {row['over']:<20} {row['median']:>6.2f} {spread:>12}")
    print("\ngreedy texts (equal up to the shorter one)")
    for row in report["texts"]:
        where = f", first differences at {row['first_differences']}" if row["first_differences"] else ""
        print(f"{row['engine']:<20} as {row['with']:<20} {row['same']} of {row['of']}{where}")


def say(text: str) -> None:
    """Show progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
