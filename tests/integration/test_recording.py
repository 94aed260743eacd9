"""What is recorded along plain texts foretells depth exploration tick for tick."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_one_line, save_text_model, wavekit_here
from draft_models import draft_of
from engines import exported
from test_exploration import random_exits, tokens
from tiny_models import save_tiny

import wavekit
from wavekit import Speculation
from wavekit.decoding.exit_recording import Recording, record
from wavekit.llm import LLM
from wavekit_calibration.simulation.replay import DexStages, replay
from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader, load_trace
from wavekit_engines.checkpoint import open_checkpoint

DEPTH = 4
ENDS = (1, 2, 3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages of a layer, exits without adapters, which agree with the end now and then, and a random draft."""
    folder = tmp_path_factory.mktemp("recording")
    save_tiny("llama-tied", folder / "model", seed=4)
    draft = draft_of(open_checkpoint(str(folder / "model")), seed=5)
    exits = random_exits(folder / "model", ENDS, rank=0)
    options = {"split": ENDS, "draft": draft, "draft_precision": "fp32", "exits": exits, "exit_precision": "fp32"}
    return exported(folder / "model", folder / "bundle", **options)


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return wavekit.load(bundle, threads=1)


def trace_of(recorded: Recording) -> ExitTrace:
    header = TraceHeader(len(ENDS) + 1, ENDS)
    final = np.array(recorded.written, np.int32)
    return ExitTrace(header, recorded.candidates, final, np.zeros(1, np.int64), recorded.draft)


@pytest.mark.parametrize("decs", [True, False])
@pytest.mark.parametrize("exits", [ENDS, (2,), (1, 3)])
def test_exits_take_the_ticks_of_the_replay(exits: tuple[int, ...], decs: bool, llm: LLM) -> None:
    agreed = 0
    for seed in range(4):
        prompt = tokens(seed, 12)
        recorded = record(llm.decoder, prompt, 50, frozenset())
        found = llm.generate(
            prompt, max_new_tokens=50, stop_token_ids=(), speculate=Speculation("exits", exits=exits, decs=decs)
        )
        assert list(found.token_ids) == recorded.written
        stages = DexStages((*ENDS, 4), decs, tuple(ENDS.index(boundary) for boundary in exits))
        told = replay(trace_of(recorded), stages)
        assert found.exploration.ticks == told.ticks
        names = {f"exit at {end}": number for number, end in enumerate(ENDS)} | {"nobody": len(ENDS)}
        counts = {names[name]: count for name, count in found.exploration.commits.items()}
        # The replay counts what the last node came from, not the first.
        assert sum(abs(counts.get(origin, 0) - told.commits[origin]) for origin in range(4)) <= 2
        agreed += len(prompt) and 49 - counts.get(len(ENDS), 0)
    assert agreed > 10  # exits were right now and then


def test_the_hybrid_takes_the_ticks_of_the_replay(llm: LLM) -> None:
    for seed in range(4):
        prompt = tokens(seed, 12)
        recorded = record(llm.decoder, prompt, 50, frozenset(), DEPTH)
        way = Speculation("draft+exits", depth=DEPTH, top_k=1, tokens=DEPTH, nodes=256, adaptive=False)
        found = llm.generate(prompt, max_new_tokens=50, stop_token_ids=(), speculate=way)
        assert list(found.token_ids) == recorded.written
        told = replay(trace_of(recorded), DexStages((*ENDS, 4), True), recorded.draft)
        assert found.exploration.ticks == told.ticks


def test_a_bundle_is_recorded_and_simulated_from_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_text_model("llama-tied", tmp_path / "model")
    options = {"split": (2,), "exits": random_exits(tmp_path / "model", (2,))}
    bundle, out = exported(tmp_path / "model", tmp_path / "bundle", **options), tmp_path / "recorded"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "How do you do?"}\n')
    recorded = wavekit_here(capfd, "record", bundle, "-o", out, "--prompts", prompts, "-n", "12")
    assert recorded.returncode == 0, recorded.stderr
    trace = load_trace(out / "trace.npz")
    assert (len(trace.starts), trace.header.boundaries, trace.candidates.shape[1:]) == (2, (2,), (1, 8))
    told = wavekit_here(
        capfd, "simulate", out / "trace.npz", "--depths", "2,4", "--costs", out / "costs.json", "--json"
    )
    assert told.returncode == 0, told.stderr
    ways = {way["name"]: way["token"] for way in json.loads(told.stdout)["ways"]}
    assert all(milliseconds > 0 for milliseconds in ways.values())
    again = wavekit_here(capfd, "record", bundle, "-o", out)
    assert_one_line(again, 2, "exists")


def test_a_bundle_without_exits_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_text_model("llama-tied", tmp_path / "model")
    bundle = exported(tmp_path / "model", tmp_path / "bundle")
    refused = wavekit_here(capfd, "record", bundle, "-o", tmp_path / "out")
    assert_one_line(refused, 2, "no exits", "wavekit train exits")
    refused = wavekit_here(capfd, "generate", bundle, "hello", "--speculate", "exits")
    assert_one_line(refused, 2, "needs exits")
