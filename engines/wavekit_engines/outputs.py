"""Places to write results to, looked at before the work begins, so that no measurement is lost for want of one.

Knows paths only. Nothing is made or changed by a check; what only shows while writing (a disk that fills up) is told
by whoever writes.
"""

import os
from pathlib import Path

from wavekit_engines.errors import MisuseError


def check_folder(folder: Path | None) -> None:
    """Refuse a folder that cannot be written, or made; None is no folder to be checked.

    Raises:
        MisuseError: it is a file, or it, or what it would be made in, cannot be written.
    """
    if folder is None:
        return
    path = Path(os.path.abspath(folder))
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise MisuseError(f"{folder} cannot be a folder: {there} is a file; choose another name")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MisuseError(f"cannot write to {there}; choose another folder than {folder}")


def check_file(file: Path | None) -> None:
    """Refuse a file that cannot be written; None is no file to be checked.

    Raises:
        MisuseError: it is a folder, there is no folder for it, or that cannot be written.
    """
    if file is None:
        return
    parent = Path(os.path.abspath(file)).parent
    if file.is_dir():
        raise MisuseError(f"{file} is a folder; give the name of a file")
    if not parent.is_dir():
        raise MisuseError(f"{file} cannot be written: there is no folder {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise MisuseError(f"{file} cannot be written: {parent} is not writable here; choose another folder")


def make_folder(folder: Path) -> None:
    """Make a folder with its parents, where it is not there.

    Raises:
        MisuseError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None
