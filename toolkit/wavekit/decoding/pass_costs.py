"""What a pass of several rows costs on this machine: measured, never assumed.

The curve decides how much it pays to propose: on a CPU it climbs from a few rows on, on a GPU it stays flat for long.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from wavekit_engines.engine import Array

MEASURED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows in a pass; between them costs are interpolated."""

_FEWEST_RUNS, _MOST_RUNS = 2, 4  # of a size; the first also warms up
_REPEATED = 0.04  # seconds; passes of one size that have taken this long together are not repeated again
_SECONDS = 0.4  # after this long, only sizes needed for a slope are still measured
_FEWEST = 4


class PassCosts:
    """Seconds of a pass by its number of rows, from 1 to the last of `MEASURED`."""

    def __init__(self, seconds: Sequence[float]) -> None:
        """Make a curve of the seconds that passes of the first so many of `MEASURED` rows took.

        Noise only ever adds time, so a pass costs no more than a longer one took, and the curve never falls. Beyond the
        last measured size it goes on with the steepest slope seen, so that large trees are not begun on hope.
        """
        sizes = MEASURED[: len(seconds)]
        rising = np.minimum.accumulate(np.array(seconds, np.float64)[::-1])[::-1]
        slopes = np.diff(rising) / np.diff(sizes)
        rows = np.arange(1, MEASURED[-1] + 1)
        beyond = np.maximum(rows - sizes[-1], 0) * slopes.max(initial=0.0)
        self.seconds: Array = np.interp(rows, sizes, rising) + beyond
        """Seconds by rows, float64 [64]: entry i is a pass of i + 1 rows."""

    @classmethod
    def measure(cls, run: Callable[[int], None], before: Callable[[], None] = lambda: None) -> "PassCosts":
        """Time ``run``, which runs a pass of so many rows: the fastest of a few, where passes are not slow.

        All sizes have a second turn after the last, since other processes disturb for a while and not for a moment.
        ``before`` runs ahead of each, untimed: what a decoder runs between two such passes, for what that leaves in the
        processor's caches.
        """
        seconds, start = list[float](), perf_counter()
        for count in MEASURED:
            if len(seconds) >= _FEWEST and perf_counter() - start > _SECONDS:
                break
            times = list[float]()
            while len(times) < _FEWEST_RUNS or (len(times) < _MOST_RUNS and sum(times) < _REPEATED):
                before()
                times.append(_timed(run, count))
            seconds.append(min(times))
        for number in reversed(range(len(seconds))):
            before()
            seconds[number] = min(seconds[number], _timed(run, MEASURED[number]))
        return cls(seconds)

    def of(self, rows: int) -> float:
        """Seconds of a pass of ``rows`` rows; more than were measured cost in proportion."""
        most = len(self.seconds)
        return float(self.seconds[rows - 1]) if rows <= most else float(self.seconds[-1]) * rows / most

    def relative(self, rows: int) -> float:
        """Cost of a pass of ``rows`` rows; 1.0 for one."""
        return self.of(rows) / self.of(1)


def _timed(run: Callable[[int], None], count: int) -> float:
    start = perf_counter()
    run(count)
    return perf_counter() - start
