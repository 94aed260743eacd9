"""Lanes: the stages of a tick run at once, each on a thread of its own.

A job is one stage's run with what reads its output. The caller's thread is the first lane, so one lane starts no thread
and a tick of one job never changes threads. Lanes may be shared by any number of callers; jobs must not wait for each
other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

Job = Callable[[], None]


class Lanes:
    """``count`` lanes, the caller's included."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix="wavekit-lane") if count > 1 else None

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, the first ones first, and wait for them.

        If some fail, the others still end, and the first error is raised.
        """
        waiting = deque(jobs)
        helpers = min(self.count, len(jobs)) - 1
        if self._pool is None or helpers < 1:
            for job in jobs:
                job()
            return
        drains = [self._pool.submit(_drain, waiting) for _ in range(helpers)]
        try:
            _drain(waiting)
        finally:
            wait(drains)
        for drain in drains:
            drain.result()

    def close(self) -> None:
        """End the threads. No job may be under way."""
        if self._pool is not None:
            self._pool.shutdown()


def _drain(waiting: deque[Job]) -> None:
    while waiting:
        try:
            job = waiting.popleft()
        except IndexError:  # another lane took the last one
            return
        job()
