"""The weights of a bundle's graph in the forms that standard ONNX nodes take.

Floating-point tensors change their format on the way from one file to the other. Blocks of `quantization` become the
same integers around zero instead of a midpoint, transposed for ``MatMul``, and their scales. So what is multiplied by
is the bundle's number, up to the rounding of the scale's format.

Scales may be negative or zero. TensorRT takes such for 4-bit blocks, which it multiplies by as they are stored. Blocks
of 8 bits it dequantizes first whatever the graph says, and insists on positive scales there, so they are spelled out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from wavekit_engines.errors import MisuseError
from wavekit_engines.graphs.graph_writer import GraphWriter, WeightFile
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
    scales = np.ascontiguousarray(blocks.scales.T)
    add_converted(file, f"{name}.scales", scales if blocks.bits == 4 else scales[:, None], dtype)


def dequantize(graph: GraphWriter, name: str, blocks: StoredBlocks, block_size: int, dtype: str) -> ir.Value:
    """The matrix [width, N] that `add_blocks` stored."""
    values, scales = graph.stored(name), graph.stored(f"{name}.scales")
    if blocks.bits == 4:
        matrix = graph.op("DequantizeLinear", values, scales, axis=0, block_size=block_size)
    else:
        numbers = graph.op("DequantizeLinear", values, graph.constant("one", np.array(1).astype(dtype)))
        apart = (len(blocks.scales[0]), block_size, len(blocks.values))
        products = graph.op("Mul", graph.op("Reshape", numbers, whole_numbers(graph, apart)), scales)
        matrix = graph.op("Reshape", products, whole_numbers(graph, (-1, apart[2])))
    if blocks.width % block_size == 0:
        return matrix
    return graph.op("Slice", matrix, *(whole_numbers(graph, (n,)) for n in (0, blocks.width, 0)))


def whole_numbers(graph: GraphWriter, numbers: tuple[int, ...]) -> ir.Value:
    """Sizes, axes or limits as a constant."""
    return graph.constant(f"whole.{'_'.join(map(str, numbers))}", np.array(numbers, np.int64))


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
