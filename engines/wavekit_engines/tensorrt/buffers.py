"""What goes to the device and comes back: every input and output of a graph in pinned memory and on the device.

Arrays of the host may be float32 where the engine's are float16 or bfloat16; they are converted here. Rows are filled
up by repeating the last one, so that a pass always has the same number of them.
"""

from typing import Any

import numpy as np

from wavekit_engines import bfloat16
from wavekit_engines.bundle import TensorInfo
from wavekit_engines.engine import Array
from wavekit_engines.tensorrt.cuda import Cuda, Pinned, device_memory

_BFLOAT16 = "bfloat16"
HIDDEN = -30000.0
"""Hides a cache row, to the last bit: less infinite than minus infinity, whose differences are no numbers, in kernels
that go through the cache piece by piece and find a piece with nothing to see. float16 holds it."""


def stored_dtype(dtype: str) -> str:
    """What numpy calls numbers of a dtype; bfloat16, which it lacks, by its bits."""
    return "uint16" if dtype == _BFLOAT16 else dtype


def store(target: Array, array: Array | float, dtype: str) -> None:
    """Write numbers into an array of `stored_dtype`."""
    target[...] = bfloat16.rounded(np.asarray(array, np.float32)) if dtype == _BFLOAT16 else array


def loaded(array: Array, dtype: str) -> Array:
    """Numbers of an array of `stored_dtype`."""
    return bfloat16.widened(array) if dtype == _BFLOAT16 else array


class Rows:
    """An input or output with a free dimension, for up to ``most`` of it."""

    def __init__(self, cuda: Cuda, tensor: TensorInfo, most: int) -> None:
        self._cuda, self._dtype, self._shape = cuda, tensor.dtype, tensor.shape
        self._axis = next(axis for axis, dim in enumerate(tensor.shape) if isinstance(dim, str))
        self.dim = str(tensor.shape[self._axis])
        rest = tuple(int(dim) for dim in tensor.shape[self._axis + 1 :])
        self._pinned = Pinned(cuda, (most, *rest), stored_dtype(tensor.dtype))
        self._row_bytes = self._pinned.array[:1].nbytes if most else 0
        self._memory = device_memory(cuda, self._pinned.array.nbytes)
        self.address = self._memory.address

    def shape(self, rows: int) -> tuple[int, ...]:
        """With so many rows."""
        return tuple(rows if isinstance(dim, str) else dim for dim in self._shape)

    def count(self, array: Array) -> int:
        """Rows of an array that is bound to this."""
        return int(array.shape[self._axis])

    def send(self, array: Array, rows: int, stream: int) -> None:
        """Enqueue: the rows of an array to the device, and the last of them again up to ``rows``."""
        count, host = self.count(array), self._pinned.array
        if not rows:
            return
        store(host[:count], array.reshape(host[:count].shape), self._dtype)
        host[count:rows] = host[count - 1]
        self._cuda.copy(self.address, self._pinned.address, rows * self._row_bytes, stream)

    def fetch(self, array: Array, stream: int) -> None:
        """Enqueue: the first rows from the device, as many as an array has; `read` them once that is done."""
        size = self.count(array) * self._row_bytes
        if size:
            self._cuda.copy(self._pinned.address, self.address, size, stream)

    def read(self, array: Array) -> None:
        """Write what was fetched into the array."""
        array[...] = loaded(self._pinned.array[: self.count(array)], self._dtype).reshape(array.shape)


class Masks:
    """A mask [1, 1, S, C]: what is bound says it for the rows in use, causality and hiding the others is added here."""

    def __init__(self, cuda: Cuda, tensor: TensorInfo, most: int, stream: int) -> None:
        self._cuda, self._dtype = cuda, tensor.dtype
        columns = tensor.shape[-1]
        assert isinstance(columns, int)
        self._columns = columns
        self._pinned = Pinned(cuda, (most, columns), stored_dtype(tensor.dtype))
        store(self._pinned.array, HIDDEN, tensor.dtype)
        self._memory = device_memory(cuda, self._pinned.array.nbytes)
        self.address = self._memory.address
        self._written = 0  # columns that may show something, in any row
        cuda.copy(self.address, self._pinned.address, self._pinned.array.nbytes, stream)

    def shape(self, rows: int) -> tuple[int, ...]:
        """With so many rows."""
        return (1, 1, rows, self._columns)

    def send(self, array: Array, first: int, rows: int, stream: int) -> None:
        """Enqueue: the mask of a pass whose new rows begin at cache row ``first``, filled up to ``rows`` rows.

        Every row that fills up sees what the last row sees. Only columns that may have changed are copied.
        """
        host, given = self._pinned.array, array[0, 0, :, : self._columns]
        count, width = given.shape
        if width < self._written:
            store(host[:, width:], HIDDEN, self._dtype)
            self._copy(slice(width, self._written), len(host), stream)
        self._written = width
        shown = np.maximum(given, HIDDEN)
        later = np.arange(first, width)[None] > np.arange(first, first + count)[:, None]
        shown[:, first:][later] = HIDDEN
        store(host[:count, :width], shown, self._dtype)
        host[count:rows, :width] = host[count - 1, :width]
        self._copy(slice(0, width), rows, stream)

    def _copy(self, columns: slice, rows: int, stream: int) -> None:
        size = self._pinned.array.itemsize
        pitch, offset = self._columns * size, columns.start * size
        width = (columns.stop - columns.start) * size
        source = self._pinned.address + offset
        self._cuda.copy_rows(self.address + offset, source, (pitch, pitch), width, rows, stream)


class Table:
    """An input of fixed shape that is sent when it is bound, not at every pass: nobody writes into rotary tables."""

    def __init__(self, cuda: Cuda, tensor: TensorInfo, stream: int) -> None:
        self._cuda, self._dtype = cuda, tensor.dtype
        shape: Any = tensor.shape
        self._pinned = Pinned(cuda, shape, stored_dtype(tensor.dtype))
        self._pinned.array[...] = 0
        self._memory = device_memory(cuda, self._pinned.array.nbytes)
        self.address = self._memory.address
        self._send(stream)

    def write(self, array: Array, stream: int) -> None:
        """Enqueue: the first rows; there may be more in the engine's table, which no position asks for."""
        store(self._pinned.array[: len(array)], array, self._dtype)
        self._send(stream)

    def _send(self, stream: int) -> None:
        self._cuda.copy(self.address, self._pinned.address, self._pinned.array.nbytes, stream)
