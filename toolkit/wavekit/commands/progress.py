"""Progress on a terminal, silence elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import click

_WIDTH = 28
_SECONDS_BETWEEN = 0.1


class Progress:
    """One line on standard error, rewritten as work goes on."""

    def __init__(self, label: str, enabled: bool) -> None:
        self._label, self._enabled = label, enabled
        self._start = monotonic()
        self._shown = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being done, and how much of how much is done."""
        now = monotonic()
        if not self._enabled or (now - self._shown < _SECONDS_BETWEEN and done < total):
            return
        self._shown = now
        filled = _WIDTH * done // max(total, 1)
        left = f", {(now - self._start) / done * (total - done):.0f} s left" if done else ""
        bar = "#" * filled + "-" * (_WIDTH - filled)
        click.echo(f"\r\033[K{self._label} [{bar}] {what}{left}", err=True, nl=False)

    def clear(self) -> None:
        """Remove the line."""
        if self._enabled:
            click.echo("\r\033[K", err=True, nl=False)


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """A progress line for the time of the block."""
    line = Progress(label, sys.stderr.isatty())
    try:
        yield line
    finally:
        line.clear()


class Steps:
    """Shows each kind of step on a progress line of its own, so that the time left is that step's."""

    def __init__(self, label: str) -> None:
        self._label, self._terminal = label, sys.stderr.isatty()
        self._kind = ""
        self._line = Progress(label, self._terminal)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being done, and how much of how much is done."""
        kind = what.partition(" (")[0]
        if kind != self._kind:
            self._kind, self._line = kind, Progress(self._label, self._terminal)
        self._line(f"{what} ({done} of {total})", done, total)

    def clear(self) -> None:
        """Remove the line."""
        self._line.clear()
