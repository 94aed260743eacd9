"""Places to write to are refused before work begins, and nothing is made by looking."""

import os
from pathlib import Path

import pytest

from wavekit_engines.atomic import write_file
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.outputs import check_file, check_folder, make_folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is mounted so, which root may not write either."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


def test_what_can_be_written_passes_and_is_not_made(tmp_path: Path) -> None:
    check_folder(None)
    check_file(None)
    check_folder(tmp_path)
    check_folder(tmp_path / "a" / "b")
    check_file(tmp_path / "new.json")
    assert os.listdir(tmp_path) == []


def test_a_file_is_no_folder(file: Path) -> None:
    for place in (file, file / "inner"):
        with pytest.raises(MisuseError, match="file is a file"):
            check_folder(place)
    with pytest.raises(MisuseError, match="there is no folder"):
        check_file(file / "inner")
    with pytest.raises(MisuseError, match="cannot write to"):
        make_folder(file / "inner")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="is a folder"):
        check_file(tmp_path)


@pytest.mark.usefixtures("read_only")
def test_a_place_that_may_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="cannot write to"):
        check_folder(tmp_path / "new")
    with pytest.raises(MisuseError, match="is not writable"):
        check_file(tmp_path / "new.json")


def test_a_file_that_can_be_neither_written_nor_removed_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(WavekitError, match="Read-only file system"):
        write_file(tmp_path / "new.json", b"{}")
