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
