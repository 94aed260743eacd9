"""Directories that appear whole or not at all, and change so."""

import errno
import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

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
        WavekitError: the disk is full, or fails in another way.
    """
    path = Path(os.path.abspath(path))
    if os.path.lexists(path) and not replace:
        raise MisuseError(f"{path} exists already; choose another name or add --force to replace it")
    new_parents = [parent for parent in path.parents if not parent.exists()]
    partial = path.parent / f".{path.name}.partial-{secrets.token_hex(4)}"
    try:
        _make(partial)
        _check_room(partial, needed_bytes)
        yield partial
        with _undisturbed():
            _take_name(partial, path, replace)
    except OSError as error:
        raise WavekitError(_reason(error, path, "nothing was left of it")) from error
    finally:
        with _undisturbed():
            _clean_up(partial, new_parents)


@contextmanager
def atomic_update(folder: Path, last: str, needed_bytes: int = 0) -> Iterator[Path]:
    """A fresh directory whose files take their places in ``folder`` when the block ends well.

    Whoever reads ``folder`` knows what is in it from its file ``last``, which changes after all others are safely on
    the disk. So whenever this is cut short, even by a power failure, what was there before is there still, provided
    that none of the other files takes a name that ``last`` knows so far. What a killed process left is removed by the
    next.

    Args:
        folder: an existing directory.
        last: the name of the file that takes its place last.
        needed_bytes: refuse before writing anything when the disk has less room than this.

    Raises:
        MisuseError: the directory cannot be written, or another process is changing it.
        WavekitError: the disk is full, or fails in another way.
    """
    folder = Path(os.path.abspath(folder))
    partial = folder / f".partial-{secrets.token_hex(4)}"
    with held(folder):
        for leftover in folder.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            _make(partial)
            _check_room(partial, needed_bytes)
            yield partial
            with _undisturbed():
                _move_in(partial, folder, last)
        except OSError as error:
            raise WavekitError(_reason(error, folder, "it is as it was")) from error
        finally:
            with _undisturbed():
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from changing a directory that they hold in the same way.

    Raises:
        MisuseError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MisuseError(f"another process is changing {folder}; wait until it is done") from None
        except OSError:
            pass  # a network's file system without locks
        yield
    finally:
        os.close(handle)


def _move_in(partial: Path, folder: Path, last: str) -> None:
    files = [file.relative_to(partial) for file in partial.rglob("*") if file.is_file() and file != partial / last]
    for name in (*files, Path(last)):
        _flush(partial / name)
    for name in files:
        (partial / name).replace(folder / name)
    for parent in {(folder / name).parent for name in files}:
        _flush(parent)
    (partial / last).replace(folder / last)
    _flush(folder)


@contextmanager
def new_file(file: Path) -> Iterator[BinaryIO]:
    """A stream to write to, whose file takes its name when the block ends well: a reader never sees half of it.

    Raises:
        WavekitError: the disk is full, or the file cannot be written.
    """
    temporary = file.with_name(file.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed either
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise WavekitError(_reason(error, file, "nothing was left of it")) from None
        raise


def write_file(file: Path, content: bytes) -> None:
    """Write a whole `new_file`, and raise what it raises."""
    with new_file(file) as stream:
        stream.write(content)


def _flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(partial: Path) -> None:
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise MisuseError(f"cannot write to {partial.parent}: {error.strerror}") from None


def _check_room(partial: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(partial).free
    if free < needed_bytes:
        raise WavekitError(
            f"the disk of {partial.parent} has {free / 1e6:.1f} MB free and {needed_bytes / 1e6:.1f} MB are needed: "
            "make room or write elsewhere"
        )


def _take_name(partial: Path, path: Path, replace: bool) -> None:
    if not (replace and os.path.lexists(path)):
        partial.rename(path)
        return
    old = path.parent / f".{path.name}.old-{secrets.token_hex(4)}"
    moved = old / "replaced"
    old.mkdir()
    try:
        path.rename(moved)
        partial.rename(path)
    except OSError:
        with suppress(OSError):  # what cannot be moved back stays where it is rather than being removed
            moved.rename(path)
        with suppress(OSError):
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clean_up(partial: Path, new_parents: Sequence[Path]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):  # where the block ended well, they are not empty and stay
        for parent in new_parents:
            parent.rmdir()


def _reason(error: OSError, path: Path, outcome: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {path.parent} is full and nothing was left on it; make room"
    return f"cannot write {path}: {error.strerror or error}; {outcome}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put Ctrl-C and a request to terminate off for a few quick steps that must not be left half-done."""
    heard: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only there does Python hear signals
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    put_off = [number for number, handler in handlers.items() if handler is not None]  # None: not Python's
    for number in put_off:
        signal.signal(number, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        for number in put_off:
            signal.signal(number, handlers[number])
        for heard_number in heard[:1]:
            signal.raise_signal(heard_number)
