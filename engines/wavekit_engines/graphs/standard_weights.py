"""The weights of a bundle's graph in the forms that standard ONNX nodes take.

Floating-point tensors change their format on the way from one file to the other. Blocks of `quantization` become the
two tensors of a block-wise ``DequantizeLinear``: the same integers around zero instead of a midpoint, transposed for
``MatMul``, and their scales. So what is multiplied by is the bundle's number, up to the rounding of the scale's format.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np
import numpy.typing as npt

from wavekit_engines.errors import MisuseError
from wavekit_engines.graphs.graph_writer import WeightFile
from wavekit_engines.quantization import QuantizedBlocks, dequantize_rows

Array = npt.NDArray[np.generic]

_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredBlocks:
    """A quantized matrix [N, width] as a bundle stores it: see `quantization.QuantizedBlocks`."""

    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    bits: int
    width: int

    def row_blocks(self) -> Iterator[QuantizedBlocks]:
        """All rows, a few at a time."""
        step = max(1, _BLOCK_BYTES // (4 * self.width))
        for start in range(0, len(self.values), step):
            yield QuantizedBlocks(self.values[start : start + step], self.scales[start : start + step])


def add_converted(file: WeightFile, name: str, array: Array, dtype: str) -> None:
    """Store an array, floating-point numbers as ``dtype``, integers as they are.

    Raises:
        MisuseError: a number is too large for ``dtype``.
    """
    if array.dtype.kind == "i":
        file.add(name, array.dtype.name, array.shape, [array])
    else:
        file.add(name, dtype, array.shape, (_converted(block, name, dtype) for block in _row_blocks(array)))


def add_dequantized(file: WeightFile, name: str, blocks: StoredBlocks, dtype: str) -> None:
    """Store the table [N, width] that the blocks stand for."""
    dequantized = (dequantize_rows(rows, blocks.bits, blocks.width) for rows in blocks.row_blocks())
    shape = (blocks.values.shape[0], blocks.width)
    file.add(name, dtype, shape, (_converted(rows, name, dtype) for rows in dequantized))


def add_blocks(file: WeightFile, name: str, blocks: StoredBlocks, dtype: str) -> None:
    """Store ``name``, int4 or int8 [K, N], and ``name.scales`` [blocks, N]; K is the width in whole blocks."""
    values = blocks.values.reshape(len(blocks.values), -1)
    if blocks.bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(values.shape[0], -1)
    centred = np.ascontiguousarray((values.astype(np.int16) - (1 << (blocks.bits - 1))).astype(np.int8).T)
    stored: Array = _packed(centred) if blocks.bits == 4 else centred
    file.add(name, f"int{blocks.bits}", centred.shape, [stored])
    add_converted(file, f"{name}.scales", np.ascontiguousarray(blocks.scales.T), dtype)


def _packed(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two 4-bit values a byte, the earlier one in the low half; whole blocks of them are an even number."""
    nibbles = values.ravel().view(np.uint8) & np.uint8(15)
    packed: npt.NDArray[np.uint8] = nibbles[0::2] | nibbles[1::2] << np.uint8(4)
    return packed


def _row_blocks(array: Array) -> Iterator[Array]:
    step = max(1, _BLOCK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        yield array[start : start + step]


def _converted(values: Array, name: str, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        converted: Array = values.astype(dtype, copy=False)
    if not np.isfinite(converted).all():
        raise MisuseError(f"the weight {name} holds values too large for {dtype}: build with another precision")
    return converted
