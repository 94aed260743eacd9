"""Who is let in: so many requests run and so many wait; others are told to come again."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from wavekit.serving.errors import ApiError

_MOST_RETRY_SECONDS = 60
_MEMORY = 0.8  # weight of the durations before, at every new one


class Admission:
    """Counts the texts that requests in the server ask for. For one event loop; not for threads."""

    def __init__(self, running: int, waiting: int) -> None:
        """``running`` are written at a time, ``waiting`` more may be there."""
        self._running, self._most = running, running + waiting
        self._duration = 1.0
        self.inside = 0
        self.draining = False

    @contextmanager
    def entry(self, texts: int = 1) -> Iterator[None]:
        """Count in a request for so many texts for the time of the block.

        Raises:
            ApiError: the server is full (429, with the time after which a place is likely) or stopping (503), or never
                takes so many texts (400).
        """
        if self.draining:
            raise ApiError(503, "the server is stopping", code="stopping", headers={"Connection": "close"})
        if texts > self._most:
            raise ApiError(
                400, f"the request asks for {texts} texts; at most {self._most} are taken at a time", param="n"
            )
        if self.inside + texts > self._most:
            seconds = (self._most - self._running + 1) * self._duration / self._running
            after = min(max(math.ceil(seconds), 1), _MOST_RETRY_SECONDS)
            message = f"{self.inside} texts are being written or wait already; try again in {after} s"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(after)})
        self.inside += texts
        start = perf_counter()
        try:
            yield
        finally:
            self.inside -= texts
            self._duration = _MEMORY * self._duration + (1 - _MEMORY) * (perf_counter() - start)
