"""Whether a measurement was disturbed: how many cores other processes kept busy meanwhile.

Thread pools wait for their slowest thread, so another busy process can double a time where there are as many threads
as cores. Read from Linux' ``/proc``; elsewhere nothing is known.
"""

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

QUIET_CORES = 0.15
"""Other processes may use this much of a core during a measurement that counts as undisturbed."""

_STATISTICS = Path("/proc/stat")


def busy_seconds() -> float | None:
    """CPU seconds that all processes of this machine have used, and that its host took away; None: not known."""
    if not _STATISTICS.is_file():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _STATISTICS.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Others:
    """Watches what others do from when it is made on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = perf_counter(), busy_seconds(), process_time()

    def cores(self, own_seconds: float | None = None) -> float | None:
        """Cores that others kept busy so far; ``own_seconds``: CPU time that is not theirs, None: this process'."""
        busy = busy_seconds()
        if busy is None or self._busy is None:
            return None
        own = process_time() - self._own if own_seconds is None else own_seconds
        return max(0.0, (busy - self._busy - own) / (perf_counter() - self._start))


def is_disturbed(cores: float | None) -> bool:
    """Whether a measurement during which others kept so many cores busy is not to be trusted."""
    return cores is not None and cores > QUIET_CORES


def loads() -> tuple[float, ...] | None:
    """Processes that wanted to run, averaged over 1, 5 and 15 minutes."""
    average: Callable[[], tuple[float, float, float]] | None = getattr(os, "getloadavg", None)
    return average() if average is not None else None
