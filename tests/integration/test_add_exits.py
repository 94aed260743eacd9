"""Exits added to a bundle, or exported with it: the same exits; what does not fit is refused, nothing is half done."""

import dataclasses
import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from command_line import assert_one_line, environment, save_text_model, wavekit_here
from engines import decoded, exported, opened
from exit_models import random_exits, run_exit
from tiny_models import save_tiny

from wavekit_engines.bundle import ExitsInfo, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import BundleError, CheckpointError, MisuseError, WavekitError
from wavekit_engines.exit_export import add_exits
from wavekit_engines.exit_files import write_exits
from wavekit_engines.exit_spec import Exits
from wavekit_engines.graphs.graph_writer import WeightFile

HIDDEN = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model("llama-untied", tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(checkpoint, tmp_path_factory.mktemp("plain") / "bundle", split=(2, 3))


@pytest.fixture
def bundle(plain: Path, tmp_path: Path) -> Path:
    """Stages that end at 2, 3 and 4."""
    return Path(shutil.copytree(plain, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exits at 1, 2 and 3."""
    path = tmp_path_factory.mktemp("exits") / "exits"
    write_exits(path, exits_for(checkpoint))
    return path


def exits_for(checkpoint: Path, **options: Any) -> Exits:
    opened_checkpoint = open_checkpoint(checkpoint)
    return dataclasses.replace(
        random_exits(opened_checkpoint, **options), target_digest=opened_checkpoint.digest(), origin="a test"
    )


def info_of(bundle: Path) -> ExitsInfo:
    info = open_bundle(bundle).manifest.exits
    assert info is not None
    return info


def content(bundle: Path) -> dict[str, bytes]:
    return {str(file.relative_to(bundle)): file.read_bytes() for file in bundle.rglob("*") if file.is_file()}


def exit_files(bundle: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(bundle).items() if name.startswith("graphs/exit")}


@pytest.mark.parametrize(
    ("precision", "exit_precision", "vocab", "stored"),
    [
        ("fp32", None, 100, "int8"),
        ("fp32", "fp32", None, "fp32"),
        ("fp16", None, None, "fp16"),
        ("int8", "int4", 100, "int4"),
        ("int4", None, 100, "int8"),
    ],
)
def test_exits_are_the_same_added_or_exported(
    precision: str, exit_precision: Any, vocab: int | None, stored: str, checkpoint: Path, tmp_path: Path
) -> None:
    exits = exits_for(checkpoint, vocab=vocab)
    forms = {"precision": precision, "split": (1, 3)}
    together = exported(checkpoint, tmp_path / "together", exits=exits, exit_precision=exit_precision, **forms)
    apart = exported(checkpoint, tmp_path / "apart", **forms)
    before = content(apart)
    add_exits(apart, exits, precision=exit_precision)
    assert exit_files(apart) == exit_files(together) != {}
    assert {name: data for name, data in content(apart).items() if name in before and name != "manifest.json"} == {
        name: data for name, data in before.items() if name != "manifest.json"
    }
    infos = [dataclasses.replace(info_of(bundle), created="") for bundle in (together, apart)]
    assert infos[0] == infos[1]
    assert infos[0].precision == stored
    assert open_bundle(together).manifest.files == open_bundle(apart).manifest.files


def test_a_bundle_decodes_as_before(bundle: Path, checkpoint: Path) -> None:
    text = decoded(opened(bundle), [5, 6, 7], 8)
    add_exits(bundle, exits_for(checkpoint))
    assert decoded(opened(bundle), [5, 6, 7], 8) == text


def test_exits_between_stages_stay_away_and_stages_without_one_are_fine(bundle: Path, checkpoint: Path) -> None:
    add_exits(bundle, exits_for(checkpoint, boundaries=(1, 2)))
    assert info_of(bundle).spec.boundaries == (2,)
    assert sorted(exit_files(bundle)) == ["graphs/exit_2.onnx", "graphs/exits.weights"]


def test_exits_are_replaced_when_that_is_asked_for(bundle: Path, checkpoint: Path) -> None:
    first, second = exits_for(checkpoint), exits_for(checkpoint, seed=1, boundaries=(3,))
    add_exits(bundle, first)
    found = run_exit(bundle, 3, HIDDEN)[1]
    with pytest.raises(MisuseError, match="has exits already, at 2, 3; add --force"):
        add_exits(bundle, second)
    add_exits(bundle, second, replace=True)
    assert len(exit_files(bundle)) == 2
    assert not np.array_equal(run_exit(bundle, 3, HIDDEN)[1], found)
    add_exits(bundle, first, replace=True)
    assert np.array_equal(run_exit(bundle, 3, HIDDEN)[1], found)
    assert len(exit_files(bundle)) == 3


def other(**changes: Any) -> Callable[[Exits], Exits]:
    return lambda exits: dataclasses.replace(exits, spec=dataclasses.replace(exits.spec, **changes))


def without_weight(exits: Exits) -> Exits:
    return dataclasses.replace(exits, weights={role: exits.weights[role] for role in list(exits.weights)[1:]})


def with_nan(exits: Exits) -> Exits:
    exits.weights["3.B"][2, 1] = np.nan
    return exits


@pytest.mark.parametrize(
    ("change", "options", "kind", "line"),
    [
        (other(hidden_size=32), {}, MisuseError, "hidden size of 32, but this model's is 64"),
        (other(vocab_size=321), {}, MisuseError, "vocabulary of 321"),
        (other(target_layers=5), {}, MisuseError, "number of layers of 5"),
        (other(boundaries=(1,)), {}, MisuseError, "stages end at 2, 3, 4, the exits lie at 1; export .* --split 1"),
        (other(boundaries=(3, 2)), {}, CheckpointError, "do not ascend"),
        (other(exit_vocab_size=99), {}, CheckpointError, "ids that do not ascend within"),
        (other(rank=9), {}, CheckpointError, r"no weight 1\.A of shape \[9, 64\]"),
        (without_weight, {}, CheckpointError, r"no weight 1\.norm"),
        (with_nan, {}, CheckpointError, r"the weight exits\.3\.B holds NaN"),
        (other(), {"precision": "fp16"}, MisuseError, "fp16 exits cannot go with a fp32 target"),
        (other(), {"precision": "fp8"}, MisuseError, "precision 'fp8'"),
        (other(), {"top_k": 0}, MisuseError, "score 0 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_bundle_alone(
    change: Callable[[Exits], Exits],
    options: dict[str, Any],
    kind: type[WavekitError],
    line: str,
    bundle: Path,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    before, exits = content(bundle), change(exits_for(checkpoint))
    with pytest.raises(kind, match=line):
        add_exits(bundle, exits, **options)
    assert content(bundle) == before
    names = {"precision": "exit_precision", "top_k": "exit_top_k"}
    with pytest.raises(kind, match=line):
        exported(checkpoint, tmp_path / "new", exits=exits, split=(2, 3), **{names[k]: v for k, v in options.items()})
    assert not (tmp_path / "new").exists()


def test_a_damaged_bundle_gets_no_exits(bundle: Path, checkpoint: Path) -> None:
    file = bundle / "graphs/vocabulary.weights"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(BundleError, match=r"vocabulary\.weights was changed"):
        add_exits(bundle, exits_for(checkpoint))


def test_damaged_exits_are_noticed(bundle: Path, checkpoint: Path) -> None:
    add_exits(bundle, exits_for(checkpoint))
    (bundle / "graphs/exits.weights").unlink()
    with pytest.raises(BundleError, match=r"exits\.weights is missing"):
        open_bundle(bundle)


FULL = OSError(errno.ENOSPC, "No space left on device")


class Killed(BaseException):
    """What ends a process at once."""


def failing(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: BaseException) -> None:
    """Let the call number ``at``, counted from 0, raise."""
    original, calls = getattr(owner, name), []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) == at + 1:
            raise error
        return original(*arguments, **options)

    patch.setattr(owner, name, fail)


STEPS = [
    *((WeightFile, "add", at) for at in (0, 9)),
    *((onnx_ir, "save", at) for at in (0, 1)),
    (Path, "write_bytes", 0),
]


@pytest.mark.parametrize(("owner", "name", "at"), STEPS)
def test_a_disk_that_fills_up_leaves_the_bundle_as_it_was(
    owner: Any, name: str, at: int, bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = exits_for(checkpoint)
    add_exits(bundle, exits)
    before = content(bundle)
    failing(monkeypatch, owner, name, at, FULL)
    with pytest.raises(WavekitError, match=r"the disk of .* is full"):
        add_exits(bundle, exits, replace=True)
    assert content(bundle) == before


@pytest.mark.parametrize("had", [False, True])
@pytest.mark.parametrize("at", range(5))
def test_a_kill_at_any_moment_leaves_a_bundle_that_opens_and_can_be_added_to(
    at: int, had: bool, bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = exits_for(checkpoint), exits_for(checkpoint, seed=1)
    if had:
        add_exits(bundle, old)
    before = open_bundle(bundle).manifest
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # who is killed does not clean up
        if at < 4:
            failing(patch, Path, "replace", at, Killed())  # two graphs, weights, the manifest
        else:
            failing(patch, Path, "glob", 1, Killed())  # what was replaced is about to be removed
        with pytest.raises(Killed):
            add_exits(bundle, new, replace=True)
    after = open_bundle(bundle).manifest
    assert (after == before) == (at < 4)
    add_exits(bundle, new, replace=True)
    clean = {"manifest.json", *open_bundle(bundle).manifest.files}
    assert {*content(bundle)} == clean


SLOW = """
import time
from wavekit_engines.graphs.graph_writer import WeightFile
add = WeightFile.add
def slow(self, *arguments):
    add(self, *arguments)
    time.sleep(0.1)
WeightFile.add = slow
from wavekit.commands.main import main
main()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_request_to_terminate(how: signal.Signals, bundle: Path, folder: Path) -> None:
    before = content(bundle)
    command = [sys.executable, "-c", SLOW, "add-exits", bundle, folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    while not any(bundle.glob(".partial-*/graphs/exits.weights")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(how)
    out, err = process.communicate(timeout=300)
    assert_one_line(subprocess.CompletedProcess(command, process.returncode, out, err), 1, "interrupted")
    assert content(bundle) == before


def test_the_commands(
    checkpoint: Path, folder: Path, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = wavekit_here(capfd, "add-exits", bundle, folder)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode().startswith(f"{bundle}: exits at 2, 3, int8, ")
    assert info_of(bundle).command.startswith("wavekit ")
    assert_one_line(wavekit_here(capfd, "add-exits", bundle, folder), 2, "has exits already, at 2, 3", "--force")
    assert wavekit_here(capfd, "add-exits", bundle, folder, "--force", "--exit-precision", "int4").returncode == 0
    assert info_of(bundle).precision == "int4"
    shown = wavekit_here(capfd, "inspect", bundle).stdout.decode()
    assert "exits       boundaries 2, 3, adapters of rank 8, vocabulary 100, int4, best 8 of a row; a test;" in shown
    assert "top_tokens top_logprobs" in shown
    assert [line for line in shown.splitlines() if len(line) > 100 and str(tmp_path) not in line] == []
    as_json = json.loads(wavekit_here(capfd, "inspect", bundle, "--json").stdout)
    assert as_json["exits"]["spec"]["boundaries"] == [2, 3]


@pytest.mark.parametrize(
    ("options", "ends", "exits"),
    [
        ([], [1, 2, 3, 4], (1, 2, 3)),
        (["--split", "2"], [2, 4], (2,)),
        (["--stages", "2"], [2, 4], (2,)),
        (["--stages", "4"], [1, 2, 3, 4], (1, 2, 3)),
    ],
)
def test_exports_end_their_stages_at_exits_unless_told_where(
    options: list[str],
    ends: list[int],
    exits: tuple[int, ...],
    checkpoint: Path,
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = wavekit_here(capfd, "export", checkpoint, "-o", tmp_path / "bundle", "--exits", folder, *options)
    assert (result.returncode, result.stderr) == (0, b"")
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert [stage.last for stage in manifest.stages] == ends
    assert info_of(tmp_path / "bundle").spec.boundaries == exits
    assert f"at {', '.join(map(str, exits))}, fp32" in result.stdout.decode().splitlines()[0]


def test_commands_that_are_refused(
    checkpoint: Path, folder: Path, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export = ["export", checkpoint, "-o", tmp_path / "new"]
    for arguments, parts in (
        ([*export, "--exits", folder, "--stages", "1"], ("stages end at 4, the exits lie at 1, 2, 3", "--split 1,2,3")),
        ([*export, "--exits", folder, "--exit-precision", "fp16"], ("fp16 goes with fp16 only",)),
        ([*export, "--exit-precision", "int8"], ("without exits",)),
        ([*export, "--exits", checkpoint], ("holds no exits",)),
        (["add-exits", bundle, tmp_path / "nothing"], ("holds no exits", "wavekit train exits")),
        (["add-exits", tmp_path / "nothing", folder], ("does not exist", "wavekit export")),
        (["add-exits", checkpoint, folder], ("is not a bundle",)),
    ):
        assert_one_line(wavekit_here(capfd, *arguments), 2, *parts)
    assert not (tmp_path / "new").exists()


def test_another_model(folder: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama-three-heads", tmp_path / "narrow")
    narrow = exported(tmp_path / "narrow", tmp_path / "bundle", split=(2,))
    assert_one_line(wavekit_here(capfd, "add-exits", narrow, folder), 2, "hidden size of 64", "wavekit train exits")
    result = wavekit_here(capfd, "export", tmp_path / "narrow", "-o", tmp_path / "other", "--exits", folder)
    assert_one_line(result, 2, "hidden size of 64")
    tuned = save_text_model("llama-untied", tmp_path / "tuned", seed=1)
    for arguments in (
        ["export", tuned, "-o", tmp_path / "with", "--exits", folder],
        ["export", tuned, "-o", tmp_path / "without", "--stages", "2"],
        ["add-exits", tmp_path / "without", folder],
    ):
        result = wavekit_here(capfd, *arguments)
        assert result.returncode == 0
        said = result.stderr.decode().splitlines()
        assert len(said) == (folder in arguments)
        assert all("trained for another checkpoint of this shape" in line for line in said)
