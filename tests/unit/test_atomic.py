"""A directory appears whole or not at all, whatever fails or interrupts, and nothing is left beside it."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wavekit_engines.atomic import atomic_directory, atomic_update
from wavekit_engines.errors import MisuseError, WavekitError

INTERRUPT, TERMINATE = [signal.SIGINT], [signal.SIGTERM]


@pytest.fixture
def terminable() -> Iterator[None]:
    """A request to terminate interrupts, as in the command line."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, handler)


def write(path: Path, text: str = "new", **options) -> None:
    with atomic_directory(path, **options) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text(text)


def content(path: Path) -> str:
    return (path / "inner" / "file").read_text()


@pytest.fixture
def existing(tmp_path: Path) -> Path:
    write(tmp_path / "bundle", "old")
    return tmp_path / "bundle"


def test_the_directory_has_its_name_only_once_the_block_has_ended(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "bundle") as folder:
        (folder / "file").touch()
        assert folder.parent == tmp_path
        assert not (tmp_path / "bundle").exists()
    assert os.listdir(tmp_path) == ["bundle"]
    assert os.listdir(tmp_path / "bundle") == ["file"]


def test_parents_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "bundle")
    assert content(tmp_path / "a" / "b" / "bundle") == "new"


def test_others_may_read_it(tmp_path: Path) -> None:
    write(tmp_path / "bundle")
    assert (tmp_path / "bundle").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_taken_name_is_refused_before_anything_is_written(existing: Path) -> None:
    with pytest.raises(MisuseError, match=r"exists already.*--force"):
        write(existing)
    assert content(existing) == "old"
    assert os.listdir(existing.parent) == ["bundle"]


def test_a_dangling_link_is_a_taken_name(tmp_path: Path) -> None:
    (tmp_path / "bundle").symlink_to("nowhere")
    with pytest.raises(MisuseError, match="exists already"):
        write(tmp_path / "bundle")


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(WavekitError, match="cannot write"), atomic_directory(tmp_path / "bundle"):
        write(tmp_path / "bundle", "someone else's")
    assert content(tmp_path / "bundle") == "someone else's"
    assert os.listdir(tmp_path) == ["bundle"]


def test_replacing_happens_at_the_very_end(existing: Path) -> None:
    with atomic_directory(existing, replace=True) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("new")
        assert content(existing) == "old"
    assert content(existing) == "new"
    assert os.listdir(existing.parent) == ["bundle"]


def test_replacing_a_link_leaves_what_it_points_to(existing: Path) -> None:
    link = existing.with_name("link")
    link.symlink_to(existing)
    write(link, "new", replace=True)
    assert content(link) == "new"
    assert content(existing) == "old"
    assert sorted(os.listdir(existing.parent)) == ["bundle", "link"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError, MisuseError])
def test_what_the_block_raises_passes_through_and_nothing_is_left(raised: type[BaseException], tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "file").touch()
        raise raised

    with pytest.raises(raised), atomic_directory(tmp_path / "new" / "parents" / "bundle") as folder:
        fail(folder)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (errno.ENOSPC, "disk of .* is full"),
        (errno.EDQUOT, "disk of .* is full"),
        (errno.EFBIG, "cannot write .*bundle: File too large"),
        (errno.EIO, "cannot write .*bundle: Input/output error"),
    ],
)
def test_a_failing_disk_is_one_clear_line_and_the_old_directory_stays(code: int, line: str, existing: Path) -> None:
    with pytest.raises(WavekitError, match=line) as caught, atomic_directory(existing, replace=True):
        raise OSError(code, os.strerror(code))
    assert caught.value.exit_code == 1
    assert content(existing) == "old"
    assert os.listdir(existing.parent) == ["bundle"]


def test_too_little_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    needed = shutil.disk_usage(tmp_path).free + 10**12
    with pytest.raises(WavekitError, match=r"MB free and \d+\.\d MB are needed"):
        write(tmp_path / "new" / "bundle", needed_bytes=needed)
    assert os.listdir(tmp_path) == []


def test_a_parent_that_is_a_file_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MisuseError, match="cannot write to"):
        write(tmp_path / "file" / "bundle")


def test_a_move_that_fails_puts_the_old_directory_back(existing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def failing(source: Path, target: Path) -> Path:
        if ".partial-" in source.name:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(WavekitError, match=r"cannot write .*Permission denied"):
        write(existing, replace=True)
    assert content(existing) == "old"
    assert os.listdir(existing.parent) == ["bundle"]


@pytest.mark.parametrize("moment", ["before the move", "between the moves", "after the moves"])
@pytest.mark.parametrize("signals", [INTERRUPT, INTERRUPT * 2, TERMINATE, INTERRUPT + TERMINATE * 2], ids=str)
def test_ctrl_c_around_the_final_moves_never_loses_a_bundle(
    moment: str, signals: list[int], terminable: None, existing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def interrupted(source: Path, target: Path) -> Path:
        moving_new = ".partial-" in source.name
        if (moment == "before the move" and not moving_new) or (moment == "between the moves" and moving_new):
            press(*signals)
        result = rename(source, target)
        if moment == "after the moves" and moving_new:
            press(*signals)
        return result

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(existing, replace=True)
    assert content(existing) == "new"
    assert os.listdir(existing.parent) == ["bundle"]


@pytest.mark.parametrize("first", INTERRUPT + TERMINATE)
@pytest.mark.parametrize("second", INTERRUPT + TERMINATE)
def test_ctrl_c_again_while_cleaning_up_leaves_nothing(
    first: int, second: int, terminable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def interrupted(path: Path, **options) -> None:
        press(second)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "bundle"):
        press(first)
    assert os.listdir(tmp_path) == []
    assert {signal.getsignal(number) for number in INTERRUPT + TERMINATE} == {signal.default_int_handler}


def press(*signals: int) -> None:
    for number in signals:
        signal.raise_signal(number)


def test_it_works_outside_the_main_thread(tmp_path: Path) -> None:
    thread = threading.Thread(target=write, args=(tmp_path / "bundle",))
    thread.start()
    thread.join()
    assert content(tmp_path / "bundle") == "new"


def update(folder: Path, text: str = "new") -> None:
    with atomic_update(folder, "list") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "another").write_text(text)
        (partial / "list").write_text(text)


@pytest.fixture
def listed(existing: Path) -> Path:
    (existing / "list").write_text("old")
    return existing


def test_an_update_takes_its_place_once_the_block_has_ended(listed: Path) -> None:
    with atomic_update(listed, "list") as partial:
        (partial / "list").write_text("new")
        assert (listed / "list").read_text() == "old"
    assert (listed / "list").read_text() == "new"
    assert content(listed) == "old"
    assert sorted(os.listdir(listed)) == ["inner", "list"]


def test_the_list_changes_last(listed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, replace = [], Path.replace

    def recorded(self: Path, target: Path) -> Path:
        moved.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", recorded)
    update(listed)
    assert moved == ["another", "list"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "full"), WavekitError),
        (OSError(errno.EIO, "broken"), WavekitError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MisuseError("no"), MisuseError),
    ],
)
def test_an_update_that_fails_changes_nothing(error: BaseException, raised: type[BaseException], listed: Path) -> None:
    def fail() -> None:
        with atomic_update(listed, "list") as partial:
            (partial / "list").write_text("new")
            raise error

    with pytest.raises(raised):
        fail()
    assert (listed / "list").read_text() == "old"
    assert sorted(os.listdir(listed)) == ["inner", "list"]


def test_an_update_that_needs_more_than_there_is(listed: Path) -> None:
    with pytest.raises(WavekitError, match="are needed"), atomic_update(listed, "list", 1 << 60):
        pass
    assert sorted(os.listdir(listed)) == ["inner", "list"]


def test_an_update_removes_what_a_killed_one_left(listed: Path) -> None:
    (listed / ".partial-1234" / "inner").mkdir(parents=True)
    update(listed)
    assert sorted(os.listdir(listed)) == ["inner", "list"]


def test_one_update_at_a_time(listed: Path) -> None:
    with atomic_update(listed, "list") as partial:
        with pytest.raises(MisuseError, match="another process is changing"):
            update(listed)
        (partial / "list").write_text("new")
    update(listed, "newer")
    assert (listed / "list").read_text() == "newer"
