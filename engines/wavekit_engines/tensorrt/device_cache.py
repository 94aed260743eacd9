"""A cache of keys and values on the device, which engines read and write in place."""

import threading
from collections.abc import Sequence

import numpy as np

from wavekit_engines.engine import Array
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.tensorrt.buffers import loaded, stored_dtype
from wavekit_engines.tensorrt.cuda import Cuda, Owned, Pinned, device_memory


class DeviceCache(KVCache):
    """A cache of one sequence: ``rows`` rows on the device, more than ``capacity``, for passes that are filled up.

    Rows move on a stream of the cache's own; a lane that is to see them moved follows it (`follow`), while the host
    goes on.
    """

    def __init__(
        self,
        cuda: Cuda,
        shape: tuple[int, int, int],
        capacity: int,
        rows: int,
        dtype: str,
    ) -> None:
        """Make an empty cache.

        Args:
            cuda: the device.
            shape: layers, key/value heads, features of a head.
            capacity: rows that may be used.
            rows: rows that there are.
            dtype: the engine's.
        """
        layers, kv_heads, head_dim = shape
        stored = stored_dtype(dtype)
        super().__init__(layers, kv_heads, head_dim, capacity, stored)  # pages of the host that nothing writes
        self._cuda, self._dtype, self._rows = cuda, dtype, rows
        self._shape = (layers, 2, 1, kv_heads, rows, head_dim)
        self._row_bytes = head_dim * np.dtype(stored).itemsize
        self._heads = layers * 2 * kv_heads
        size = self._heads * rows * self._row_bytes
        self._memory = device_memory(cuda, size)
        self._scratch: Owned | None = None
        self._scratch_rows = 0
        self._stream = Owned(cuda.make_stream(), cuda.free_stream)
        self._moved = Owned(cuda.make_event(), cuda.free_event)
        self._moving = threading.Lock()
        cuda.zero(self._memory.address, size, self._stream.address)  # what no row was written to must be a number
        cuda.record(self._moved.address, self._stream.address)

    @property
    def array(self) -> Array:
        """A copy of the rows that may be used, in the layout of `kv_cache`."""
        self._cuda.enter()
        copied = Pinned(self._cuda, self._shape, stored_dtype(self._dtype))
        self._cuda.copy(copied.address, self._memory.address, copied.array.nbytes, self._stream.address)
        self._cuda.record(self._moved.address, self._stream.address)
        self._cuda.wait(self._moved.address)
        return loaded(copied.array[..., : self.capacity, :], self._dtype).copy()

    def addresses(self, index: int) -> tuple[int, int]:
        """Where keys and values of a layer begin."""
        size = self._heads // self._shape[0] // 2 * self._rows * self._row_bytes
        keys = self._memory.address + 2 * index * size
        return keys, keys + size

    def follow(self, stream: int) -> None:
        """Enqueue: wait until rows are where they were moved to."""
        self._cuda.follow(stream, self._moved.address)

    def _move(self, start: int, rows: Sequence[int]) -> None:
        cuda, count = self._cuda, len(rows)
        cuda.enter()
        with self._moving:
            if count > self._scratch_rows:
                self._scratch = device_memory(cuda, self._heads * count * self._row_bytes)
                self._scratch_rows = count
            assert self._scratch is not None
            scratch, to = self._scratch.address, 0
            for first, length in _runs(rows):
                self._copy((scratch, to, self._scratch_rows), (self._memory.address, first, self._rows), length)
                to += length
            self._copy((self._memory.address, start, self._rows), (scratch, 0, self._scratch_rows), count)
            cuda.record(self._moved.address, self._stream.address)

    def _copy(self, target: tuple[int, int, int], source: tuple[int, int, int], count: int) -> None:
        """Rows of every head between two places: an address, the row there, and the rows that each head has there."""
        size = self._row_bytes
        (target_address, to, target_rows), (source_address, at, source_rows) = target, source
        pitches = target_rows * size, source_rows * size
        begin = target_address + to * size, source_address + at * size
        self._cuda.copy_rows(*begin, pitches, count * size, self._heads, self._stream.address)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rows as runs of rows that follow each other: the first and how many."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((row, 1))
    return runs
