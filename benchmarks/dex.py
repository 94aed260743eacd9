"""Depth exploration, drafts, both and the baselines side by side on one bundle with exits, and beside the simulator.

Every prompt is continued in every way, in an order that rotates; texts must agree token for token with plain decoding,
or the run fails. Ways that explore run their stages on lanes, one thread each; plain decoding and drafts have all
threads on one lane. Ticks and times are two things: a tick runs all stages at once, which saves time only where lanes
have cores, and memory, of their own.

With ``--simulate`` the same texts are recorded, costs measured on the same lanes, and the simulator's ticks and times
stand beside the measured ones. Predictions for a device a stage are predictions: nothing ran on such devices.

    python benchmarks/dex.py bundle prompts/held_out/mt_bench.jsonl --count 6 --simulate
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

import wavekit
from wavekit.decoding.exit_recording import record
from wavekit.decoding.speculation import Speculation
from wavekit.decoding.stage_costs import measure_stage_costs
from wavekit.llm import LLM, available_cores
from wavekit_calibration.exits import StageCosts
from wavekit_calibration.prompts import read_prompts
from wavekit_calibration.simulation.baselines import selection
from wavekit_calibration.simulation.nodes import count_nodes
from wavekit_calibration.simulation.replay import DexStages, replay
from wavekit_calibration.simulation.timing import TickCosts, duration
from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader

DRAFTED = 3  # tokens of a draft's chain, and of selection's, so that the simulator can follow


@dataclass(frozen=True)
class Way:
    """One way to decode, and on which of the opened bundles."""

    name: str
    on: str
    speculation: Speculation


@dataclass(frozen=True)
class Run:
    """One prompt, one way."""

    way: str
    tokens: int
    equal: bool
    ticks: int
    passes: int
    seconds: float
    exploration: dict[str, Any]


def main() -> None:
    """Measure, print, simulate."""
    options = _options()
    llms = open_all(options)
    manifest = llms["lanes"].manifest
    ends = tuple(stage.last for stage in manifest.stages)
    exits = llms["lanes"].decoder.exit_boundaries
    ways = ways_of(exits, manifest.draft is not None)
    if options.only:
        ways = [way for way in ways if way.name in ("plain", *options.only.split(","))]
    prompts = read_prompts(options.prompts).prompts[: options.count]
    chats = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in prompts]
    runs = measure(llms, ways, chats, options)
    print(f"stages end at {ends}, exits at {exits}; {len(chats)} prompts of up to {options.new_tokens} tokens")
    print("\n".join(table(ways, runs)))
    found: dict[str, Any] = {"runs": [vars(run) for run in runs]}
    if options.simulate:
        told = simulate(llms, ends, chats, runs, options)
        print("\n".join(predictions(told, runs)))
        found["simulated"] = told
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    if different := sum(not run.equal for run in runs):
        sys.exit(f"{different} texts differ from plain decoding")


def open_all(options: argparse.Namespace) -> dict[str, LLM]:
    """The bundle three times: all threads for one pass at a time, one thread, and one thread on each lane."""
    lanes = options.lanes
    return {
        "whole": wavekit.load(options.bundle, threads=options.threads),
        "one": wavekit.load(options.bundle, threads=1, check_hashes=False),
        "lanes": wavekit.load(
            options.bundle, threads=max(1, options.threads // lanes), lanes=lanes, check_hashes=False
        ),
    }


def ways_of(exits: tuple[int, ...], drafts: bool) -> list[Way]:
    """Everything that this bundle can do."""
    middle = exits[len(exits) // 2]
    ways = [
        Way("plain", "whole", Speculation("off")),
        Way("plain, one thread", "one", Speculation("off")),
        Way("DEX", "lanes", Speculation("exits", nodes=256)),
        Way("DEX without DECS", "lanes", Speculation("exits", decs=False, nodes=256)),
        Way(f"pipelining at {middle}", "lanes", Speculation("exits", exits=(middle,))),
        Way(f"selection at {middle}", "whole",
            Speculation("exits", exits=(middle,), nodes=DRAFTED + 1, selection=True, decs=False)),
    ]  # fmt: skip
    if drafts:
        chain = Speculation("draft", depth=DRAFTED, top_k=1, tokens=DRAFTED, adaptive=False)
        ways += [
            Way("EAGLE-3, as pays", "whole", Speculation("draft")),
            Way("EAGLE-3, chain", "whole", chain),
            Way("both, as pays", "lanes", Speculation("draft+exits", nodes=64)),
            Way("both, chain", "lanes", replace(chain, mode="draft+exits", nodes=256)),
        ]
    return ways


def measure(llms: dict[str, LLM], ways: list[Way], chats: list[Any], options: argparse.Namespace) -> list[Run]:
    """Every prompt in every way; who is first rotates."""
    for way in ways:
        llms[way.on].generate(chats[0], max_new_tokens=16, speculate=way.speculation)
    runs = []
    for number, chat in enumerate(chats):
        turn = number % len(ways)
        results = {}
        for way in (*ways[turn:], *ways[:turn]):
            results[way.name] = llms[way.on].generate(
                chat,
                max_new_tokens=options.new_tokens,
                temperature=options.temperature,
                seed=number,
                speculate=way.speculation,
            )
        plain = results["plain"].token_ids
        for way in ways:
            result = results[way.name]
            runs.append(
                Run(
                    way.name,
                    len(result.token_ids),
                    result.token_ids == plain,
                    result.exploration.ticks,
                    result.speculation.passes,
                    result.timings.decode_seconds,
                    vars(result.exploration),
                )
            )
        print(f"{number + 1} of {len(chats)} prompts", file=sys.stderr)
    return runs


def table(ways: list[Way], runs: list[Run]) -> list[str]:
    """Markdown, one way a line; speeds are medians over prompts with quartiles."""
    columns = ("way", "ticks a token", "passes a token", "explored a token", "speed over plain", "equal")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    plain = [run for run in runs if run.way == "plain"]
    for way in ways:
        mine = [run for run in runs if run.way == way.name]
        tokens = sum(run.tokens - 1 for run in mine)
        speeds = [one.seconds / other.seconds for one, other in zip(plain, mine, strict=True)]
        low, _, high = quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        counts = [
            sum(run.ticks for run in mine),
            sum(run.passes for run in mine),
            sum(run.exploration["explored"] for run in mine),
        ]
        cells = [
            way.name,
            *(f"{count / tokens:.2f}" for count in counts),
            f"{median(speeds):.2f}x ({low:.2f}-{high:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} | {sum(run.equal for run in mine)} of {len(mine)} |")
    return lines


def simulate(
    llms: dict[str, LLM], ends: tuple[int, ...], chats: list[Any], runs: list[Run], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What the simulator says of the ways that it can follow: on these lanes, and with a device a stage."""
    llm, plain = llms["lanes"], [run for run in runs if run.way == "plain"]
    stops = frozenset(llm.manifest.generation.stop_token_ids)
    depth = DRAFTED if llm.manifest.draft is not None else 0
    texts = [record(llm.decoder, llm.encode(chat), options.new_tokens, stops, depth) for chat in chats]
    trace = ExitTrace(
        TraceHeader(ends[-1], llm.decoder.exit_boundaries),
        np.concatenate([text.candidates for text in texts]),
        np.concatenate([np.array(text.written, np.int32) for text in texts]),
        np.cumsum([0, *(len(text.written) for text in texts[:-1])]).astype(np.int64),
        np.concatenate([text.draft for text in texts]) if depth else None,
    )
    costs = costs_of(llm, ends[-1], plain)
    at = tuple(number for number, end in enumerate(ends) if end in llm.decoder.exit_boundaries)
    middle = at[len(at) // 2]
    settings: dict[str, tuple[DexStages, np.ndarray[Any, Any] | None]] = {
        "DEX": (DexStages(ends, True, at), None),
        "DEX without DECS": (DexStages(ends, False, at), None),
        f"pipelining at {ends[middle]}": (DexStages(ends, False, (middle,)), None),
    }
    if depth:
        settings["EAGLE-3, chain"] = DexStages(ends[-1:], True), trace.draft
        settings["both, chain"] = DexStages(ends, True, at), trace.draft
    told = []
    for name, (stages, draft) in settings.items():
        if name not in (run.way for run in runs):
            continue
        played = replay(trace, stages, draft)
        nodes, steps = count_nodes(played), depth if draft is not None else 0
        mine = costs.alone if stages.count == 1 else costs
        here, apart = (duration(played, nodes, mine, devices, steps) for devices in (options.lanes, None))
        scale = stages.count if stages.count > 1 else 1 / len(ends)  # its passes take a tick a stage here
        told.append({"way": name, "ticks": played.ticks / played.tokens / (scale if scale < 1 else 1),
                     "ms": here.token, "apart": costs.plain_token / apart.token})  # fmt: skip
    one = selection(trace, ends[middle], DRAFTED, costs)
    if any(run.way == f"selection at {ends[middle]}" for run in runs):
        told.append({"way": f"selection at {ends[middle]}", "ticks": None, "ms": one.token, "apart": None})
    return told


def costs_of(llm: LLM, layers: int, plain: list[Run]) -> TickCosts:
    """Measured stage costs, in milliseconds, and plain decoding as it was measured beside the other ways."""
    costs, per_layer = measure_stage_costs(llm.decoder), list[float]()
    for end, seconds in costs.stages:
        count = end - len(per_layer)
        per_layer += [seconds * 1e3 / count] * count
    assert len(per_layer) == layers
    return TickCosts(
        StageCosts(tuple(per_layer), costs.head * 1e3),
        costs.exit_head * 1e3,
        costs.rows,
        costs.overhead * 1e3,
        llm.decoder.draft_costs().of(1) * 1e3 if llm.manifest.draft is not None else 0.0,
        median(run.seconds * 1e3 / (run.tokens - 1) for run in plain),
    )


def predictions(told: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    """Markdown: simulated beside measured."""
    lines = ["", "| way | ticks: simulated, run | ms a token: simulated, run | error | predicted, a device a stage |",
             f"|{' --- |' * 5}"]  # fmt: skip
    for one in told:
        mine = [run for run in runs if run.way == one["way"]]
        tokens = sum(run.tokens - 1 for run in mine)
        ticks = sum(run.ticks for run in mine) / tokens
        measured = median(run.seconds * 1e3 / (run.tokens - 1) for run in mine)
        simulated = f"{one['ticks']:.3f}" if one["ticks"] is not None else "-"
        apart = f"{one['apart']:.2f}x" if one["apart"] is not None else "-"
        lines.append(f"| {one['way']} | {simulated}, {ticks:.3f} | {one['ms']:.1f}, {measured:.1f} "
                     f"| {one['ms'] / measured - 1:+.0%} | {apart} |")  # fmt: skip
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="a bundle of several stages with exits")
    parser.add_argument("prompts", type=Path, help="a file of prompts as `wavekit calibrate` reads them")
    parser.add_argument("--count", type=int, default=6, help="prompts (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; the seed is the prompt's number")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of plain decoding (%(default)s)")
    parser.add_argument("--lanes", type=int, default=available_cores(), help="(%(default)s)")
    parser.add_argument("--only", help="ways to compare with plain decoding, by name, as in DEX  [all]")
    parser.add_argument("--simulate", action="store_true", help="compare with the simulator (greedy only)")
    parser.add_argument("-o", "--output", type=Path, help="JSON with every run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
