"""``wavekit tune`` as a user runs it, and its whole search on a real bundle with times that were made up."""

import json
import shutil
from pathlib import Path

import pytest
from bench_bundle import bench_bundle
from command_line import assert_one_line, wavekit_here
from fake_times import FakeTimes

import wavekit
from wavekit.benchmarking import bench
from wavekit.benchmarking.openings import Openings
from wavekit.decoding.speculation import Speculation
from wavekit.profiles import FOLDER, Setting, profile_for
from wavekit.tuning.tune import Tuned, tune
from wavekit_engines.bundle import open_bundle

SHORT = ("--count", "2", "-n", "6", "--minutes", "0.03")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    bench_bundle(folder)
    return folder


def searched(bundle: Path, costs: dict[str, float], cores: int = 2, seconds: float = 1e6) -> Tuned:
    """The result where plain decoding with 2 threads takes 1 and modes what ``costs`` says."""

    def cost(setting: Setting, prompt: int, before: int) -> float:
        speculation = setting.speculation
        base = costs.get(speculation.mode, 2.0)
        better = 0.8 if speculation.depth == 2 or speculation.exits or speculation.nodes == 8 else 1.0
        return base * better * (1.0 if setting.threads * setting.lanes == cores else 1.4)

    source = FakeTimes(cost)
    openings = Openings(bundle)
    try:
        return tune(openings.get(Setting(1)).decoder, source, cores, seconds, source.clock)
    finally:
        openings.close()


def test_modes_then_limits_are_searched(folder: Path) -> None:
    found = searched(folder / "bundle", {"off": 1.0, "draft": 0.7, "exits": 0.9})
    assert (found.setting, found.plain.threads) == (Setting(2, 1, Speculation("draft", depth=2)), 2)
    assert found.speed == pytest.approx(1 / 0.56)
    tried = {trial.setting.speculation.mode for trial in found.trials if trial.phase == "modes"}
    assert tried >= {"draft", "lookup", "exits", "draft+exits"}
    on_lanes = {trial.setting.lanes for trial in found.trials if trial.setting.speculation.mode == "exits"}
    assert on_lanes == {1, 2}


def test_nothing_slower_than_plain_decoding_is_chosen(folder: Path) -> None:
    found = searched(folder / "bundle", {"off": 1.0, "draft": 1.3, "lookup": 1.24})
    assert (found.setting, found.speed, found.chosen) == (Setting(2, 1, Speculation("off")), 1.0, None)
    assert {trial.outcome for trial in found.trials if trial.phase == "final"} <= {"no gain"}


def test_fewer_threads_must_be_faster_to_the_end(folder: Path) -> None:
    for lasting in (False, True):

        def cost(setting: Setting, prompt: int, before: int, lasting: bool = lasting) -> float:
            fast = setting.threads == 1 and (lasting or before < 20)
            return (0.5 if fast else 1.0) * (1.0 if setting.speculation.mode == "off" else 0.99)

        source, openings = FakeTimes(cost), Openings(folder / "bundle")
        try:
            found = tune(openings.get(Setting(1)).decoder, source, 2, 1e6, source.clock)
        finally:
            openings.close()
        assert found.setting == Setting(1 if lasting else 2, 1, Speculation("off"))


def test_a_rounded_bundle_without_a_draft_is_tuned_in_threads_alone(tmp_path: Path) -> None:
    bundle = bench_bundle(tmp_path, draft=None, draft_precision=None, exits=None, precision="int8")
    found = searched(bundle, {"off": 1.0, "lookup": 0.1})
    assert {trial.phase for trial in found.trials} == {"threads"}
    assert found.setting == Setting(2, 1, Speculation("off"))


def test_the_profile_is_what_load_uses(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "peak_memory", lambda *_: None)
    bundle = shutil.copytree(folder / "bundle", tmp_path / "bundle")
    plain = wavekit.load(bundle, threads=1).generate("Once", max_new_tokens=12, speculate="off")
    result = wavekit_here(
        capfd, "tune", bundle, *SHORT, "-o", tmp_path / "tried.svg", "--json", tmp_path / "tried.json"
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    assert "kept in" in result.stdout.decode()
    assert (tmp_path / "tried.svg").read_bytes().startswith(b"<?xml")
    found, profile = json.loads((tmp_path / "tried.json").read_text()), profile_for(open_bundle(bundle))
    assert profile is not None
    assert found["chosen"]["speculation"]["mode"] == profile.setting.speculation.mode
    assert found["costs"]["target"][0][0] == 1
    llm = wavekit.load(bundle)
    assert llm.auto == profile.setting.speculation
    assert llm.generate("Once", max_new_tokens=12).token_ids == plain.token_ids
    result = wavekit_here(capfd, "bench", bundle, "--modes", "tuned", "--count", "1", "-n", "4", "--rounds", "1")
    assert "\ntuned " in result.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["bundle", "--prompts", "nowhere.txt"], ["no prompt file"]),
        (["bundle", "-o", "tried.txt"], ["tried.txt is no figure", ".svg"]),
        (["bundle", "--json", "nowhere/tried.json"], ["there is no folder"]),
        (["bundle", "--json", "model"], ["model is a folder"]),
        (["bundle", "--minutes", "0"], ["--minutes"]),
        (["model"], ["is not a bundle"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str],
    parts: list[str],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert_one_line(wavekit_here(capfd, "tune", *arguments), 2, *parts)
    assert not (folder / "bundle" / FOLDER).exists()
