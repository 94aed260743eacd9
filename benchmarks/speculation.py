"""What a draft head, or a lookup, is worth: tokens a pass and speed over plain decoding, on prompt sets of your own.

Every prompt is continued by the same bundle several times in turn: plainly, as much speculation as pays, and,
for the acceptance alone, a chain and the largest tree whatever they cost. Texts must agree token for token; where they
do not, the run fails. Speed is the ratio within one prompt, plain time over speculated time from the first new token
to the last, as median and quartiles over the prompts; each of the two goes first in turn. tau is tokens per pass of
the target, the bonus token counted; plain decoding is 1.00.

    python benchmarks/speculation.py bundle mt_bench=prompts/held_out/mt_bench.jsonl gsm8k=prompts/held_out/gsm8k.jsonl

A set is a file of prompts as `wavekit calibrate` reads them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import wavekit
from wavekit.decoding.speculation import Speculation
from wavekit.llm import LLM, GenerationResult
from wavekit_calibration.prompts import read_prompts

CHAIN = 5


def main() -> None:
    """Run every set and print the tables."""
    options = _options()
    llm = wavekit.load(options.bundle, threads=options.threads)
    compared = {"plain": Speculation("off"), "speculated": Speculation(options.mode)}
    fixed = {
        "chain": Speculation("draft", depth=CHAIN, top_k=1, tokens=CHAIN, adaptive=False),
        "tree": Speculation("draft", depth=7, tokens=options.tree, adaptive=False),
    }
    if "draft" not in options.mode or options.speed_only:
        fixed = {}
    warm_up(llm, compared)
    results = {}
    for item in options.sets:
        name, _, file = item.partition("=")
        prompts = [
            [{"role": m.role, "content": m.content} for m in prompt.messages]
            for prompt in read_prompts(Path(file)).prompts[: options.count]
        ]
        results[name] = [
            measure(llm, prompt, number, options, compared, fixed) for number, prompt in enumerate(prompts)
        ]
        print("\n".join(table({name: results[name]})[2:]), file=sys.stderr)
    if options.output:
        options.output.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()},
                                              "results": results}, indent=1) + "\n")  # fmt: skip
    print("\n".join(table(results)))
    different = sum(not run["equal"] for runs in results.values() for run in runs)
    if different:
        sys.exit(f"{different} texts differ from plain decoding")


def warm_up(llm: LLM, compared: dict[str, Speculation]) -> None:
    """Measure the pass costs and touch every buffer before anything counts."""
    for speculation in compared.values():
        llm.generate([{"role": "user", "content": "Count to ten."}], max_new_tokens=24, speculate=speculation)


def measure(
    llm: LLM,
    prompt: list[dict[str, str]],
    number: int,
    options: argparse.Namespace,
    compared: dict[str, Speculation],
    fixed: dict[str, Speculation],
) -> dict[str, Any]:
    """One prompt, every way of writing it."""

    def write(speculation: Speculation) -> GenerationResult:
        return llm.generate(
            prompt,
            max_new_tokens=options.new_tokens,
            temperature=options.temperature,
            seed=number,
            speculate=speculation,
        )

    order = list(compared.items())
    written = {name: write(speculation) for name, speculation in (order if number % 2 else order[::-1])}
    written |= {name: write(speculation) for name, speculation in fixed.items()}
    plain = written["plain"]
    return {
        "tokens": len(plain.token_ids),
        "equal": all(result.token_ids == plain.token_ids for result in written.values()),
        "speed": plain.timings.decode_seconds / written["speculated"].timings.decode_seconds,
        "runs": {name: asdict(result.speculation) for name, result in written.items()},
    }


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Markdown, one set a line."""
    columns = ("prompts", "tau, as pays", "speed over plain", "draft, target, host time", "tau, chain of 5",
               "by position", "tau, tree", "equal")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for name, runs in results.items():
        speeds = [run["speed"] for run in runs]
        quartiles = quantiles(speeds, n=4) if len(speeds) > 1 else [speeds[0]] * 3
        parts = [total(runs, "speculated", part) for part in ("draft_seconds", "target_seconds", "host_seconds")]
        shares = ", ".join(f"{part / sum(parts):.0%}" for part in parts)
        chain = "chain" in runs[0]["runs"]
        positions = " ".join(f"{share:.0%}" for share in by_position(runs, "chain")) if chain else "-"
        cells = (
            f"{name} ({len(runs)})",
            f"{tau(runs, 'speculated'):.2f}",
            f"{median(speeds):.2f}x ({quartiles[0]:.2f}-{quartiles[2]:.2f})",
            shares,
            f"{tau(runs, 'chain'):.2f}" if chain else "-",
            positions,
            f"{tau(runs, 'tree'):.2f}" if chain else "-",
            f"{sum(run['equal'] for run in runs)} of {len(runs)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def total(runs: Sequence[dict[str, Any]], name: str, part: str) -> float:
    """A statistic summed over the prompts."""
    return float(sum(run["runs"][name][part] for run in runs))


def tau(runs: Sequence[dict[str, Any]], name: str) -> float:
    """Tokens a pass over all prompts together; the first token of a text comes from the prefill."""
    return float(sum(run["tokens"] - 1 for run in runs)) / max(total(runs, name, "passes"), 1)


def by_position(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Share of passes in which the k-th proposed token was committed, over the prompts by their passes."""
    depth = max(len(run["runs"][name]["acceptance"]) for run in runs)
    passes = total(runs, name, "passes")
    return [
        sum(
            run["runs"][name]["passes"] * run["runs"][name]["acceptance"][k]
            for run in runs
            if k < len(run["runs"][name]["acceptance"])
        )
        / passes
        for k in range(depth)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="a bundle, with a draft head unless --mode lookup")
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE", help="prompt files")
    parser.add_argument("--mode", default="draft", choices=["draft", "lookup", "draft+lookup"], help="(%(default)s)")
    parser.add_argument("--count", type=int, default=20, help="prompts of a set (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; the seed is the prompt's number")
    parser.add_argument("--tree", type=int, default=60, help="tokens of the fixed tree (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--speed-only", action="store_true", help="leave out the fixed chain and tree")
    parser.add_argument("-o", "--output", type=Path, help="JSON with every run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
