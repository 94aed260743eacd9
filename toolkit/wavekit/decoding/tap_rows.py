"""The target's states at tapped boundaries, kept from the pass that made them until a draft has read them.

A stage's output buffers are overwritten by its next pass. `TapRows` copies the rows of every pass, numbered as the
stage's cache rows, and moves them as the cache moves its own; so once a text is committed, row t holds the states of
the token at position t. Rows that have been read are dropped, which keeps the memory at a few hundred rows whatever the
length of the text.
"""

from collections.abc import Sequence

import numpy as np

from wavekit_engines.engine import Array


class TapRows:
    """States [taps, H] of cache rows ``first`` to ``stop - 1`` of one stage."""

    def __init__(self, boundaries: Sequence[int], hidden_size: int, capacity: int, dtype: str) -> None:
        self.boundaries = tuple(boundaries)
        self.first = 0
        self.stop = 0
        self._rows = np.zeros((capacity, len(self.boundaries), hidden_size), dtype)

    def clear(self) -> None:
        """Forget every row."""
        self.first = self.stop = 0

    def skip(self, first: int) -> None:
        """Begin at row ``first``: nobody will ask for those before it."""
        self.first = self.stop = first

    def store(self, rows: range, states: Sequence[Array]) -> None:
        """Copy the states [S, H] of new cache rows, one array a boundary."""
        at = rows.start - self.first
        for tap, state in enumerate(states):
            self._rows[at : at + len(rows), tap] = state
        self.stop = rows.stop

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep rows up to ``start - 1`` and, after them, ``rows`` in this order; as `KVCache.keep`."""
        if rows and rows[-1] - start >= len(rows):
            first = self.first
            self._rows[start - first : start - first + len(rows)] = self._rows[[row - first for row in rows]]
        self.stop = start + len(rows)

    def read(self, start: int, stop: int) -> Array:
        """States [stop - start, taps, H] of rows ``start`` to ``stop - 1``; a view."""
        states: Array = self._rows[start - self.first : stop - self.first]
        return states

    def drop(self, first: int) -> None:
        """Forget the rows below ``first``."""
        self._rows[: self.stop - first] = self._rows[first - self.first : self.stop - self.first].copy()
        self.first = first
