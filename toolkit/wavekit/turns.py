"""Turns at the engines: generations of many threads run their ticks one after the other, in the order they asked.

A tick uses every core it was given, so two at once would only be in each other's way; and since a turn lasts one tick,
all texts in flight advance alike, however many threads ask. Knows nothing of what is done in a turn.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Turns:
    """A lock that serves in the order of asking; not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    @contextmanager
    def turn(self) -> Iterator[float]:
        """Wait for a turn and hold it for the time of the block; gives the seconds waited."""
        waited = self._take()
        try:
            yield waited
        finally:
            self._pass_on()

    def _take(self) -> float:
        with self._lock:
            if not self._taken:
                self._taken = True
                return 0.0
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        start = perf_counter()
        try:
            gate.acquire()
        except BaseException:  # interrupted: give up the place in the queue, or the turn that has just come
            with self._lock:
                queued = gate in self._waiting
                if queued:
                    self._waiting.remove(gate)
            if not queued:
                self._pass_on()
            raise
        return perf_counter() - start

    def _pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
