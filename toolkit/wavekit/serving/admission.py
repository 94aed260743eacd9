"""Who is let in: so many requests run and so many wait; others are told to come again."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from wavekit.serving.errors import ApiError

_MOST_RETRY_SECONDS = 60
_MEMORY = 0.8  # weight of the durations before, at every new one


class Admission:
    """Counts the requests in the server. For one event loop; not for threads."""

    def __init__(self, running: int, waiting: int) -> None:
        """``running`` are served at a time, ``waiting`` more may be there."""
        self._running, self._most = running, running + waiting
        self._duration = 1.0
        self.inside = 0
        self.draining = False

    @contextmanager
    def entry(self) -> Iterator[None]:
        """Count one request in for the time of the block.

        Raises:
            ApiError: the server is full (429, with the time after which a place is likely) or stopping (503).
        """
        if self.draining:
            raise ApiError(503, "the server is stopping", code="stopping", headers={"Connection": "close"})
        if self.inside >= self._most:
            seconds = (self._most - self._running + 1) * self._duration / self._running
            after = min(max(math.ceil(seconds), 1), _MOST_RETRY_SECONDS)
            message = f"{self.inside} requests are being served or wait already; try again in {after} s"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(after)})
        self.inside += 1
        start = perf_counter()
        try:
            yield
        finally:
            self.inside -= 1
            self._duration = _MEMORY * self._duration + (1 - _MEMORY) * (perf_counter() - start)
