"""The key/value cache of one stage: rows appended by passes, dropped and closed up by one gather.

Layout: ``[layers, 2, batch, kv_heads, capacity, head_dim]``, keys before values. Graphs append in place; this
class only keeps the count of rows in use and moves them. A row is one token;
which token, and who may see it, is not known here. An engine whose memory is not the host's has a subclass of its own,
which holds the rows there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class KVCache:
    """Rows 0 to ``length - 1`` are in use, out of ``capacity``."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str, batch: int = 1) -> None:
        # Untouched pages take no memory, so a large capacity costs only what is written.
        self._array: Array = np.zeros((layers, 2, batch, kv_heads, capacity, head_dim), dtype)
        self.capacity = capacity
        """Rows that fit."""
        self.length = 0

    @property
    def array(self) -> Array:
        """All rows, in the layout above."""
        return self._array

    def keys(self, layer: int) -> Array:
        """Keys of a layer (counted within the stage): [batch, kv_heads, capacity, head_dim]."""
        keys: Array = self.array[layer, 0]
        return keys

    def values(self, layer: int) -> Array:
        """Values of a layer, shaped as the keys."""
        values: Array = self.array[layer, 1]
        return values

    def append(self, count: int) -> range:
        """Take the next ``count`` rows.

        Raises:
            ValueError: they do not fit; the caller checks lengths before a pass.
        """
        if self.length + count > self.capacity:
            raise ValueError(f"{count} rows do not fit: {self.length} of {self.capacity} are in use")
        rows = range(self.length, self.length + count)
        self.length += count
        return rows

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep rows 0 to ``start - 1`` as they are, and after them only ``rows``, in this order.

        All of them must be in use. Rows that stay in place cost nothing; otherwise all of ``rows`` move in one gather.
        """
        count = len(rows)
        if any(row != start + index for index, row in enumerate(rows)):
            self._move(start, rows)
        self.length = start + count

    def _move(self, start: int, rows: Sequence[int]) -> None:
        self._array[..., start : start + len(rows), :] = self._array[..., list(rows), :]
