"""Directories that appear whole or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wavekit_engines.errors import MisuseError, WavekitError


@contextmanager
def atomic_directory(path: Path, replace: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """A fresh directory beside ``path`` that takes its name when the block ends well and is removed when it does not.

    Args:
        path: the final name.
        replace: an existing directory of that name is replaced at the very end instead of refused.
        needed_bytes: refuse before writing anything when the disk has less room than this.

    Raises:
        MisuseError: ``path`` exists and ``replace`` is False, or its parent cannot be written.
        WavekitError: the disk is full.
    """
    path = Path(os.path.abspath(path))
    if path.exists() and not replace:
        raise MisuseError(f"{path} exists already; choose another name or add --force to replace it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    except OSError as error:
        raise MisuseError(f"cannot write to {path.parent}: {error.strerror}") from None
    try:
        free = shutil.disk_usage(partial).free
        if free < needed_bytes:
            raise WavekitError(
                f"the disk of {path.parent} has {free / 1e6:.0f} MB free and needs {needed_bytes / 1e6:.0f} MB: "
                "make room or write elsewhere"
            )
        partial.chmod(0o755)
        yield partial
        _take_name(partial, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise WavekitError(f"the disk of {path.parent} is full and nothing was left on it; make room") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _take_name(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
    path.rename(old / "bundle")
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)
