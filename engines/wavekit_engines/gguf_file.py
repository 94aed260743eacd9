"""The container of a GGUF file: metadata, and tensors read row by row and dequantized.

The header is parsed here, since the reader of the ``gguf`` package maps the whole file and keeps every string of a
vocabulary as an array of its own (seconds, and hundreds of megabytes). That package supplies what changes with time:
the layout of quantized blocks and their dequantization. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
(versions 2 and 3, little-endian). It knows no model.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError
from wavekit_engines.plain_reads import digest_file, read_bytes

_STRING, _ARRAY = 8, 9
_SCALARS = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class _Tensor:
    kind: int
    """Number of the block format (``GGMLQuantizationType``)."""
    shape: tuple[int, ...]
    """Outermost dimension first, unlike in the file."""
    begin: int


class GgufFile:
    """One GGUF file: `metadata`, whose arrays of numbers are numpy arrays, and tensors by name."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            MisuseError: the ``gguf`` package is missing.
            CheckpointError: the file is truncated or damaged.
            UnsupportedModelError: it is of a version, byte order or block format that cannot be read.
        """
        try:
            import gguf
        except ImportError as error:
            raise MisuseError(f"to read {path.name}: pip install gguf") from error
        self._gguf = gguf
        self.path = path
        try:
            self._size = path.stat().st_size
            with path.open("rb") as file:
                self.metadata, self._tensors, self._data_start = _Header(path, self._size, file).parse()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        self._check_extents()

    def names(self) -> list[str]:
        """Names of all tensors, as the file spells them."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first."""
        return self._tensors[name].shape

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` of the first axis, dequantized to float32, C-contiguous."""
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:  # the blocks of a vector run along the only axis it has
            return self._dequantized(tensor, 0, 1, tensor.shape)[start:stop]
        return self._dequantized(tensor, start, stop, (stop - start, *tensor.shape[1:]))

    def update_digest(self, digest: "hashlib._Hash") -> None:
        """Add to `digest` what identifies the file, whatever it is called; see `plain_reads.digest_file`."""
        digest_file(digest, self.path, self._size, self._data_start, "")

    def _dequantized(self, tensor: _Tensor, start: int, stop: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        row_bytes = self._row_bytes(tensor)
        data = read_bytes(self.path, tensor.begin + start * row_bytes, (stop - start) * row_bytes)
        kind = self._gguf.GGMLQuantizationType(tensor.kind)
        values = self._gguf.dequantize(data.reshape(stop - start, row_bytes), kind)
        return np.ascontiguousarray(values, np.float32).reshape(shape)

    def _row_bytes(self, tensor: _Tensor) -> int:
        """Bytes of everything under one index of the first axis, of the whole of a vector."""
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(tensor.kind)]
        values = math.prod(tensor.shape[1:]) if len(tensor.shape) > 1 else tensor.shape[0]
        return int(values // block * block_bytes)

    def _check_extents(self) -> None:
        readable: set[int] = set()
        for name, tensor in self._tensors.items():
            if tensor.kind not in readable:
                self._check_readable(name, tensor.kind)
                readable.add(tensor.kind)
            block = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(tensor.kind)][0]
            if tensor.shape[-1] % block:
                raise CheckpointError(f"{self.path} gives {name} a row of {tensor.shape[-1]}, no multiple of {block}")
            rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
            if tensor.begin + rows * self._row_bytes(tensor) > self._size:
                raise CheckpointError(f"{self.path} is truncated: {name} lies beyond its end; download it again")

    def _check_readable(self, name: str, kind: int) -> None:
        try:
            known = self._gguf.GGMLQuantizationType(kind)
            block_bytes = self._gguf.GGML_QUANT_SIZES[known][1]
            self._gguf.dequantize(np.zeros((1, block_bytes), np.uint8), known)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"{name} in {self.path} has the block format {kind}, which the installed gguf package cannot "
                "dequantize; take another quantization of the model"
            ) from error


class _Header:
    """Parses the part of a file before its tensors' data."""

    def __init__(self, path: Path, size: int, file: BinaryIO) -> None:
        self._path, self._size, self._file = path, size, file

    def parse(self) -> tuple[dict[str, Any], dict[str, _Tensor], int]:
        """Metadata, tensors by name, and where the data starts."""
        if self._take(4) != b"GGUF":
            raise CheckpointError(f"{self._path} is no GGUF file")
        version = self._number("<u4")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self._path} is a GGUF file of version {version}; readable versions: 2, 3")
        tensor_count, entry_count = self._number("<u8"), self._number("<u8")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._number("<u4"))
        entries = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged()
        start = -(-self._file.tell() // alignment) * alignment
        return metadata, {name: _Tensor(kind, shape, start + begin) for name, kind, shape, begin in entries}, start

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged()
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        if min(shape) == 0:
            raise self._damaged()
        return name, self._number("<u4"), shape, self._number("<u8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._number("<u4"), self._number("<u8")
            if item in _SCALARS:
                dtype = np.dtype(_SCALARS[item])
                return np.frombuffer(self._take(count * dtype.itemsize), dtype)
            if item == _STRING:
                return [self._string() for _ in range(count)]
            raise UnsupportedModelError(f"{self._path} has nested arrays in its metadata, which wavekit does not read")
        if kind not in _SCALARS:
            raise self._damaged()
        return self._number(_SCALARS[kind])

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._take(int(dtype[-1])), dtype)[0].item()

    def _string(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged() from error

    def _take(self, count: int) -> bytes:
        # Checked first: a damaged length must not become an allocation.
        data = self._file.read(count) if count <= self._size else b""
        if len(data) != count:
            raise CheckpointError(f"{self._path} is truncated, or its header is damaged: download it again")
        return data

    def _damaged(self) -> CheckpointError:
        return CheckpointError(f"{self._path} has a damaged header: download it again")
