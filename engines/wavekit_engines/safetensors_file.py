"""One safetensors file: its header checked when opened, its tensors read row by row.

Format: 8 bytes little-endian header size, a JSON header that gives dtype,
shape and byte range of each tensor, then the data (https://github.com/huggingface/safetensors). It knows no model.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavekit_engines import bfloat16
from wavekit_engines.errors import CheckpointError, UnsupportedModelError
from wavekit_engines.plain_reads import digest_file, read_bytes

_HEADER_LIMIT = 100_000_000
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_STORED = {**_NUMPY, "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|u1"}


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Position of the first byte in the file."""
    bytes: int


class SafetensorsFile:
    """The tensors of one file, by name."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: the file cannot be read, is truncated, or its header contradicts it.
        """
        self.path = path
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                self._header = self._read_header(file.read(8), file)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        self._tensors = self._parse(self._header)

    def names(self) -> list[str]:
        """Names of all tensors, in the order of the header."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            UnsupportedModelError: the tensor's number format cannot be read.
        """
        tensor = self._tensors[name]
        if tensor.dtype not in _BYTES:
            known = ", ".join(_BYTES)
            raise UnsupportedModelError(f"{name} in {self.path} is {tensor.dtype}; readable formats: {known}")
        return tensor.shape

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` of the first axis, float32, C-contiguous; only their bytes are read."""
        shape = self.shape(name)
        tensor = self._tensors[name]
        row_bytes = math.prod(shape[1:]) * _BYTES[tensor.dtype]
        data = read_bytes(self.path, tensor.begin + start * row_bytes, (stop - start) * row_bytes)
        return _as_float32(data, tensor.dtype).reshape(stop - start, *shape[1:])

    def stored(self, name: str) -> tuple[str, NDArray[Any]]:
        """A whole tensor as it is stored, with the format's name for its type; bfloat16 is uint16, BOOL is uint8.

        Raises:
            UnsupportedModelError: the tensor's type cannot be read.
            CheckpointError: its byte range does not fit its shape.
        """
        tensor = self._tensors[name]
        if tensor.dtype not in _STORED:
            known = ", ".join(_STORED)
            raise UnsupportedModelError(f"{name} in {self.path} is {tensor.dtype}; readable formats: {known}")
        kind = np.dtype(_STORED[tensor.dtype])
        if tensor.bytes != math.prod(tensor.shape) * kind.itemsize:
            raise CheckpointError(f"{name} in {self.path} has a byte range that does not fit its shape")
        return tensor.dtype, read_bytes(self.path, tensor.begin, tensor.bytes).view(kind).reshape(tensor.shape)

    def update_digest(self, digest: "hashlib._Hash") -> None:
        """Add to `digest` what identifies the file; see `plain_reads.digest_file`."""
        digest_file(digest, self.path, self._size, 8 + len(self._header), self.path.name)

    def _read_header(self, prefix: bytes, file: Any) -> bytes:
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > self._size - 8:
            raise CheckpointError(f"{self.path} is truncated, or no safetensors file: download it again")
        if length > _HEADER_LIMIT:
            raise CheckpointError(f"{self.path} is no safetensors file: its header would be {length} bytes long")
        header: bytes = file.read(length)
        return header

    def _parse(self, header: bytes) -> dict[str, _Tensor]:
        data_start = 8 + len(header)
        tensors: dict[str, _Tensor] = {}
        end_of_data = 0
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                begin, end = (int(offset) for offset in entry["data_offsets"])
                dtype, shape = str(entry["dtype"]), entry["shape"]
                if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
                    raise ValueError(f"{name} has the shape {shape!r}")
                if not 0 <= begin <= end or (dtype in _BYTES and end - begin != math.prod(shape) * _BYTES[dtype]):
                    raise ValueError(f"{name} has a byte range that does not fit its shape")
                end_of_data = max(end_of_data, end)
                tensors[name] = _Tensor(dtype, tuple(shape), data_start + begin, end - begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a damaged header ({error}): download it again") from error
        if data_start + end_of_data > self._size:
            missing = data_start + end_of_data - self._size
            raise CheckpointError(f"{self.path} is truncated: {missing} bytes are missing; download it again")
        return tensors


def _as_float32(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    values = data.view(_NUMPY[dtype])
    return bfloat16.widened(values) if dtype == "BF16" else values.astype(np.float32, copy=False)
