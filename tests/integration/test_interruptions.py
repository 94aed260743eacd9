"""A full disk or an interruption during an export: one line, exit code 1, nothing left behind, what was there kept."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir
import pytest
from command_line import COMMAND, assert_one_line, environment, save_text_model, wavekit, wavekit_here
from engines import decoded, exported, opened

from wavekit.commands import main
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.graphs.graph_writer import WeightFile


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model("llama-untied", tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def existing(checkpoint: Path, tmp_path: Path) -> Path:
    """A bundle in three stages, which no export of these tests would make."""
    return exported(checkpoint, tmp_path / "bundle", split=(1, 2))


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(params=[300, 520, 560, 600, 640])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of so many kB: less than is known to be needed, or enough to begin with."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(checkpoint: Path, small_disk: Path) -> None:
    result = wavekit("export", checkpoint, "-o", small_disk / "new" / "bundle", "--stages", "4")
    assert_one_line(result, 1, "the disk of", "make room")
    assert os.listdir(small_disk) == []


def test_files_that_may_not_grow_large_enough(checkpoint: Path, existing: Path) -> None:
    before = content(existing)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    result = wavekit("export", checkpoint, "-o", existing, "--force", preexec_fn=limit)
    assert_one_line(result, 1, "cannot write", "File too large")
    assert os.listdir(existing.parent) == ["bundle"]
    assert content(existing) == before


FULL = OSError(errno.ENOSPC, "No space left on device")


def full_at_weights(patch: pytest.MonkeyPatch) -> None:
    add, calls = WeightFile.add, []

    def failing(self: WeightFile, *arguments) -> None:
        calls.append(arguments)
        if len(calls) == 10:
            raise FULL
        add(self, *arguments)

    patch.setattr(WeightFile, "add", failing)


def full_at_graphs(patch: pytest.MonkeyPatch) -> None:
    def failing(*arguments) -> None:
        raise FULL

    patch.setattr(onnx_ir, "save", failing)


def full_at(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    write = Path.write_bytes

    def failing(self: Path, data: bytes) -> int:
        if self.name == name:
            raise FULL
        return write(self, data)

    return lambda patch: patch.setattr(Path, "write_bytes", failing)


@pytest.mark.parametrize("fill", [full_at_weights, full_at_graphs, full_at("tokenizer.json"), full_at("manifest.json")])
def test_a_disk_that_fills_up_at_any_step_leaves_the_existing_bundle(
    fill: Callable[[pytest.MonkeyPatch], None], checkpoint: Path, existing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(existing)
    fill(monkeypatch)
    with pytest.raises(WavekitError, match="is full") as caught:
        export_bundle(open_checkpoint(checkpoint), existing, ExportOptions(), replace=True)
    assert caught.value.exit_code == 1
    assert os.listdir(existing.parent) == ["bundle"]
    assert content(existing) == before


SLOW_EXPORT = """
import time
from wavekit_engines.graphs.graph_writer import WeightFile
add = WeightFile.add
def slow(self, *arguments):
    add(self, *arguments)
    time.sleep(0.05)
WeightFile.add = slow
from wavekit.commands.main import main
main()
"""


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("vocabulary.weights", signal.SIGINT),
        ("head.onnx", signal.SIGTERM),
        ("stage_1.weights", signal.SIGINT),
        ("stage_3.weights", signal.SIGTERM),
    ],
)
def test_ctrl_c_or_a_request_to_terminate(
    moment: str, how: signal.Signals, force: bool, checkpoint: Path, tmp_path: Path
) -> None:
    output = exported(checkpoint, tmp_path / "bundle", split=(1, 2)) if force else tmp_path / "bundle"
    before = content(tmp_path)
    arguments = ["export", checkpoint, "-o", output, "--stages", "4", *(["--force"] if force else [])]
    result = interrupted([sys.executable, "-c", SLOW_EXPORT, *arguments], tmp_path, moment, how)
    assert_one_line(result, 1, "interrupted")
    assert os.listdir(tmp_path) == (["bundle"] if force else [])
    assert content(tmp_path) == before


def interrupted(command: list, folder: Path, moment: str, how: signal.Signals) -> subprocess.CompletedProcess[bytes]:
    """Run a command and send it a signal when a file called ``moment`` appears below ``folder/.*``."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    while not any(folder.glob(f".*/graphs/{moment}")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(how)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_ctrl_c_while_a_text_is_written(existing: Path) -> None:
    command = [COMMAND, "generate", existing, "Hello", "-n", "250", "--temperature", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode in (0, 1)  # 0: the text was finished before
    assert err.strip() in (b"", b"wavekit: interrupted; nothing half-written was left behind")


INTERRUPTED_IMPORT = """
import os, signal, time
from wavekit.commands import main
def importing(**options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        raise ImportError("initialization failed")
main.wavekit.main = importing
main.main()
"""


def test_ctrl_c_that_a_library_turns_into_an_error_of_its_own() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    assert_one_line(subprocess.run(command, capture_output=True, check=False), 1, "interrupted")


def test_a_file_that_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(**options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "locked.json")

    monkeypatch.setattr(main.wavekit, "main", refused)
    assert_one_line(wavekit_here(capfd, "inspect", "bundle"), 1, "locked.json: Permission denied")


def test_a_bundle_replaced_with_force_is_the_new_one(checkpoint: Path, existing: Path) -> None:
    text = decoded(opened(existing), [5, 6, 7], 20)
    result = wavekit("export", checkpoint, "-o", existing, "--force", "--stages", "2")
    assert result.returncode == 0
    assert os.listdir(existing.parent) == ["bundle"]
    decoder = opened(existing)
    assert len(decoder.manifest.stages) == 2
    assert decoded(decoder, [5, 6, 7], 20) == text
