"""``wavekit simulate`` and ``wavekit plan`` as a user runs them, on synthetic traces."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_one_line, wavekit, wavekit_here

from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader

LAYERS = 12


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Exits that are right more often the deeper they are, with two ranks and a draft that is right in half."""
    rng = np.random.default_rng(0)
    boundaries = tuple(range(1, LAYERS))
    final = rng.integers(0, 50, 300).astype(np.int32)
    right = rng.random((300, len(boundaries))) < np.linspace(0.5, 0.95, len(boundaries))
    best = np.where(right, final[:, None], 60 + rng.integers(0, 9, right.shape))
    candidates = np.stack([best, np.where(right, 70, final[:, None])], axis=2).astype(np.int32)
    draft = np.where(rng.random(300) < 0.5, final, 99)[:, None].astype(np.int32)
    header = TraceHeader(LAYERS, boundaries, origin="made up for a test")
    ExitTrace(header, candidates, final, np.array([0, 150]), draft).save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


def write_costs(folder: Path, **changes: object) -> Path:
    file = folder / "costs.json"
    file.write_text(json.dumps({"layers": [1.0] * LAYERS, "head": 0.5, "unit": "ms", **changes}))
    return file


def json_of(result: subprocess.CompletedProcess[bytes]) -> dict:
    assert (result.returncode, result.stderr) == (0, b"")
    return json.loads(result.stdout)


def test_simulate_compares_all_ways(trace: Path) -> None:
    result = wavekit("simulate", trace, "--depths", "4,8,12", "--draft-acceptance", "0.6,0.5")
    assert (result.returncode, result.stderr) == (0, b"")
    text = result.stdout.decode()
    for part in ("298 tokens", "made up for a test", "plain decoding", "both", "pipelining", "selection", "oracle of"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110


def test_simulate_in_json(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = json_of(wavekit_here(capfd, "simulate", trace, "--depths", "4,8,12", "--json"))
    ways = {way["name"]: way for way in found["ways"]}
    dex = ways["depth exploration"]
    assert dex["tick_speedup"] == pytest.approx(3 / dex["ticks"])
    assert ways["plain decoding"]["token"] == LAYERS
    assert dex["speedup"] == pytest.approx(dex["tick_speedup"])  # stages of equal length, in layers
    assert sum(found["detail"]["commits"].values()) == pytest.approx(1)
    assert found["detail"]["peak_live"] <= 7
    plain = json_of(wavekit_here(capfd, "simulate", trace, "--depths", "4,8,12", "--no-decs", "--json"))
    ticks = next(way["ticks"] for way in plain["ways"] if way["name"] == "depth exploration")
    assert dex["ticks"] < ticks  # second ranks are right often here


def test_a_recorded_draft_alone_commits_more_than_a_token_a_tick(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--depths", "12", "--draft-acceptance", "recorded", "--json")
    ways = {way["name"]: way for way in json_of(wavekit_here(capfd, "simulate", trace, *options))["ways"]}
    assert 1.3 < ways["draft"]["tick_speedup"] < 1.7
    assert set(ways) == {"plain decoding", "draft", "oracle of the EAD", "oracle of the first right exit"}


def test_plan_recommends_what_it_found_best(trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    costs = write_costs(tmp_path)
    found = json_of(wavekit_here(capfd, "plan", trace, "--costs", costs, "--max-stages", "3", "--json"))
    assert [len(plan["depths"]) for plan in found["plans"]] == [2, 3]
    assert found["recommended"] == min(found["plans"], key=lambda plan: plan["token"])
    depths = found["recommended"]["depths"]
    text = wavekit_here(capfd, "plan", trace, "--costs", costs, "--max-stages", "3").stdout.decode()
    assert f"stages ending at {','.join(map(str, depths))}" in text
    assert f"--split {','.join(map(str, depths[:-1]))}" in text
    simulated = json_of(
        wavekit_here(capfd, "simulate", trace, "--depths", ",".join(map(str, depths)), "--costs", costs, "--json",
                     "--decs" if found["recommended"]["decs"] else "--no-decs")
    )  # fmt: skip
    assert simulated["ways"][1]["token"] == pytest.approx(found["recommended"]["token"])


@pytest.mark.parametrize("changes", [{"exit_head": 40.0}, {"overhead": 30.0, "plain": 12.5}, {"plain": 3.0}])
def test_plan_says_when_nothing_pays(
    changes: dict, trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    costs = write_costs(tmp_path, **changes)
    result = wavekit_here(capfd, "plan", trace, "--costs", costs, "--max-stages", "3")
    assert b"nothing pays: plain decoding" in result.stdout
    assert b"best" not in result.stdout
    assert (
        json_of(wavekit_here(capfd, "plan", trace, "--costs", costs, "--max-stages", "3", "--json"))["recommended"]
        is None
    )


def test_the_folder_of_a_recording_stands_for_its_trace(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    by_file = wavekit_here(capfd, "simulate", trace, "--depths", "4,12")
    by_folder = wavekit_here(capfd, "simulate", trace.parent, "--depths", "4,12")
    assert by_folder.returncode == 0
    assert by_folder.stdout == by_file.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("simulate", "TRACE"), ["Missing option '--depths'"]),
        (("simulate", "TRACE", "--depths", "4,x"), ["'4,x' is not a list of boundary numbers"]),
        (("simulate", "TRACE", "--depths", "4,8"), ["4,8", "last boundary, 12"]),
        (("simulate", "TRACE", "--depths", "8,4,12"), ["must rise"]),
        (("simulate", "missing", "--depths", "4,12"), ["missing does not exist", "wavekit calibrate"]),
        (("simulate", "COSTS", "--depths", "4,12"), ["is no exit trace, or a damaged one"]),
        (("simulate", "TRACE", "--depths", "4,12", "--devices", "0"), ["--devices"]),
        (("simulate", "TRACE", "--depths", "4,12", "--costs", "missing"), ["missing cannot be read"]),
        (("simulate", "TRACE", "--depths", "4,12", "--costs", "TRACE"), ["trace.npz is no JSON"]),
        (("simulate", "TRACE", "--depths", "4,12", "--draft-acceptance", "often"), ["0.7,0.6,0.5", "'often'"]),
        (("simulate", "TRACE", "--depths", "4,12", "--draft-acceptance", "1.5"), ["a share from 0 to 1"]),
        (("plan", "TRACE"), ["Missing option '--costs'"]),
        (("plan", "TRACE", "--costs", "COSTS", "--max-stages", "1"), ["--max-stages"]),
        (("plan", "TRACE", "--costs", "SHORT"), ["the model has 12 layers", "name 2"]),
    ],
)
def test_misuse_is_one_line(
    arguments: tuple[str, ...], parts: list[str], trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.json").write_text('{"layers": [1, 1], "head": 1}')
    files = {"TRACE": trace, "COSTS": write_costs(tmp_path), "SHORT": tmp_path / "short.json"}
    assert_one_line(wavekit_here(capfd, *(files.get(argument, argument) for argument in arguments)), 2, *parts)


def test_a_trace_without_drafts_has_none_to_replay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "matrices.npz", agrees=np.ones((9, 5), dtype=bool))
    result = wavekit_here(capfd, "simulate", tmp_path, "--depths", "2,4", "--draft-acceptance", "recorded")
    assert_one_line(result, 2, "the trace holds no drafts")
