"""Block-wise weight quantization in the layout of ONNX Runtime's ``MatMulNBits``.

A weight matrix [N, K] is cut into blocks of ``block_size`` along K. Each block is stored as unsigned integers of 4 or 8
bits around a fixed midpoint with one float32 scale: ``w = (q - 2^(bits-1)) * scale``. The scale is signed, so that the
entry of largest magnitude lands exactly on the end of the range that has one value more; among the candidate scales
near it, the one with the least squared error over the block is kept.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Precision = Literal["fp32", "fp16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int4")
BLOCK_SIZES = (16, 32, 64, 128, 256)

_BITS: dict[str, int] = {"int8": 8, "int4": 4}
_SHRINK = (1.0, 0.95, 0.9, 0.85)  # candidate scales, as fractions of the one that clips nothing


@dataclass(frozen=True)
class QuantizedBlocks:
    """Rows of a quantized matrix.

    ``values``: uint8 [N, K / block_size, block_size * bits / 8], two 4-bit values a byte with the earlier one in the
    low half. ``scales``: float32 [N, K / block_size].
    """

    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]


def bits_of(precision: Precision) -> int | None:
    """Bits of a stored weight, or None where weights stay floating point."""
    return _BITS.get(precision)


def quantize_rows(rows: npt.NDArray[np.float32], bits: int, block_size: int) -> QuantizedBlocks:
    """Quantize float32 rows [N, K]; a last block that K does not fill is padded with zeros."""
    count, width = rows.shape
    blocks = -(-width // block_size)
    if blocks * block_size != width:
        rows = np.pad(rows, ((0, 0), (0, blocks * block_size - width)))
    grouped = rows.reshape(count, blocks, block_size)
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(-1)[..., None], -1)
    unclipped = largest * np.float32(-1 / middle)
    values, scales = _round(grouped, unclipped, middle, top)
    if bits < 8:  # at 8 bits the rounding error is far below what clipping could win
        error = _squared_error(grouped, values, scales, middle)
        for fraction in _SHRINK[1:]:
            other, other_scales = _round(grouped, unclipped * np.float32(fraction), middle, top)
            other_error = _squared_error(grouped, other, other_scales, middle)
            better = other_error < error
            error = np.where(better, other_error, error)
            values = np.where(better[..., None], other, values)
            scales = np.where(better[..., None], other_scales, scales)
    packed = values if bits == 8 else values[..., 0::2] | (values[..., 1::2] << 4)
    return QuantizedBlocks(np.ascontiguousarray(packed), np.ascontiguousarray(scales[..., 0]))


def dequantize_rows(blocks: QuantizedBlocks, bits: int, width: int) -> npt.NDArray[np.float32]:
    """The float32 rows [N, width] that a quantized matrix stands for."""
    values = blocks.values
    if bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)
    centred = values.astype(np.float32) - (1 << (bits - 1))
    return np.ascontiguousarray((centred * blocks.scales[..., None]).reshape(values.shape[0], -1)[:, :width])


def _round(
    grouped: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], middle: int, top: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    divisible = np.abs(scales) >= np.finfo(np.float32).tiny  # the inverse of a smaller one may be infinite
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=divisible)
    values = np.clip(np.rint(grouped * inverse) + middle, 0, top).astype(np.uint8)
    return values, scales


def _squared_error(
    grouped: npt.NDArray[np.float32], values: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], middle: int
) -> npt.NDArray[np.float32]:
    difference = (values.astype(np.float32) - middle) * scales - grouped
    error: npt.NDArray[np.float32] = np.einsum("...i,...i->...", difference, difference)
    return error
