"""Matrix products at every precision: how their weights are stored and which node multiplies by them.

A weight matrix is [N, K], one row an output feature, as in checkpoints. Floating-point layers store it transposed for
``MatMul``; tables shared between the embedding and the head stay [V, H] and are multiplied by ``Gemm``; 4- and 8-bit
weights use ``MatMulNBits`` with int8 activations (accuracy level 4), the fast path on CPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from wavekit_engines.errors import CheckpointError
from wavekit_engines.graphs.graph_writer import MICROSOFT, GraphWriter, WeightFile
from wavekit_engines.quantization import Precision, bits_of, quantize_rows

_INT8_ACTIVATIONS = 4
_BLOCK_BYTES = 32 << 20


class Rows(Protocol):
    """A weight whose rows are read on demand; `wavekit_engines.weights.WeightRows` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [N] for a vector."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows ``start`` to ``stop``, float32 and C-contiguous."""
        ...


@dataclass(frozen=True)
class ArrayRows:
    """A weight in memory as `Rows`."""

    array: npt.NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows ``start`` to ``stop``."""
        return np.ascontiguousarray(self.array[start:stop], np.float32)


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of one group of matrices are stored."""

    precision: Precision
    block_size: int = 32

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations beside these weights."""
        return "float16" if self.precision == "fp16" else "float32"

    @property
    def stored_bits(self) -> float:
        """Bits a weight takes in a file, its share of a block's scale included."""
        bits = bits_of(self.precision)
        return bits + 32 / self.block_size if bits is not None else 8 * np.dtype(self.compute_dtype).itemsize


def row_blocks(rows: Rows) -> Iterator[npt.NDArray[np.float32]]:
    """The matrix in consecutive blocks of rows, so that a vocabulary table never is in memory whole."""
    count = rows.shape[0]
    step = max(1, _BLOCK_BYTES // (4 * int(np.prod(rows.shape[1:], dtype=np.int64))))
    for start in range(0, count, step):
        yield rows.read(start, min(start + step, count))


def add_vector(file: WeightFile, name: str, rows: Rows, dtype: str) -> None:
    """Store a norm weight or a bias."""
    file.add(name, dtype, rows.shape, [_converted(rows.read(), name, dtype)])


def add_matrix(file: WeightFile, name: str, rows: Rows, form: WeightFormat) -> None:
    """Store a layer's matrix for `multiply`."""
    if bits_of(form.precision) is not None:
        _add_quantized(file, name, rows, form)
    else:
        transposed = _converted(np.ascontiguousarray(rows.read().T), name, form.compute_dtype)
        file.add(name, form.compute_dtype, transposed.shape, [transposed])


def add_table(file: WeightFile, name: str, rows: Rows, form: WeightFormat) -> None:
    """Store a vocabulary table [V, H] for `embed`, for `multiply_table`, or for both at once."""
    if bits_of(form.precision) is not None:
        _add_quantized(file, name, rows, form)
    else:
        dtype = form.compute_dtype
        file.add(name, dtype, rows.shape, (_converted(block, name, dtype) for block in row_blocks(rows)))


def _converted(values: npt.NDArray[np.float32], name: str, dtype: str) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore"):
        converted: npt.NDArray[np.generic] = values.astype(dtype, copy=False)
    _check_finite(converted, name)
    return converted


def _check_finite(values: npt.NDArray[np.generic], name: str) -> None:
    """Raises CheckpointError: one such weight makes NaN of every logit."""
    if not np.isfinite(values).all():
        reason = "values too large for fp16" if values.dtype == np.float16 else "NaN or infinity: its file is damaged"
        raise CheckpointError(f"the weight {name} holds {reason}; export with another precision or another checkpoint")


def _add_quantized(file: WeightFile, name: str, rows: Rows, form: WeightFormat) -> None:
    bits = bits_of(form.precision)
    assert bits is not None
    count, width = rows.shape
    blocks = -(-width // form.block_size)
    scales: list[npt.NDArray[np.float32]] = []

    def values() -> Iterator[npt.NDArray[np.uint8]]:
        for block in row_blocks(rows):
            _check_finite(block, name)
            quantized = quantize_rows(block, bits, form.block_size)
            scales.append(quantized.scales)
            yield quantized.values

    file.add(name, "uint8", (count, blocks, form.block_size * bits // 8), values())
    file.add(f"{name}.scales", "float32", (count, blocks), scales)
    # `embed` gathers the same bytes as a plain table.
    file.view(f"{name}.table", name, (count, blocks * form.block_size * bits // 8))


def multiply(
    graph: GraphWriter, x: ir.Value, name: str, shape: tuple[int, int], form: WeightFormat, bias: str | None = None
) -> ir.Value:
    """X [..., K] times the stored matrix ``name`` of shape [N, K], plus the stored vector ``bias``: [..., N]."""
    if bits_of(form.precision) is None:
        product = graph.op("MatMul", x, graph.stored(name))
        return graph.op("Add", product, graph.stored(bias)) if bias else product
    return _multiply_quantized(graph, x, name, shape, form, bias)


def multiply_table(graph: GraphWriter, x: ir.Value, name: str, shape: tuple[int, int], form: WeightFormat) -> ir.Value:
    """X [n, H] times the stored table ``name`` [V, H]: [n, V]."""
    if bits_of(form.precision) is None:
        return graph.op("Gemm", x, graph.stored(name), transB=1)
    return _multiply_quantized(graph, x, name, shape, form, None)


def _multiply_quantized(
    graph: GraphWriter, x: ir.Value, name: str, shape: tuple[int, int], form: WeightFormat, bias: str | None
) -> ir.Value:
    bits = bits_of(form.precision)
    assert bits is not None
    inputs: list[ir.Value | None] = [x, graph.stored(name), graph.stored(f"{name}.scales")]
    if bias:
        inputs += [None, None, graph.stored(bias)]
    return graph.op(
        "MatMulNBits",
        *inputs,
        domain=MICROSOFT,
        N=shape[0],
        K=shape[1],
        bits=bits,
        block_size=form.block_size,
        accuracy_level=_INT8_ACTIVATIONS,
    )


def embed(graph: GraphWriter, ids: ir.Value, name: str, width: int, form: WeightFormat) -> ir.Value:
    """Rows of the stored table for token ids [B, S]: [B, S, width]."""
    bits = bits_of(form.precision)
    if bits is None:
        return graph.op("Gather", graph.stored(name), ids)
    rows = graph.op(
        "GatherBlockQuantized",
        graph.stored(f"{name}.table"),
        ids,
        graph.stored(f"{name}.scales"),
        domain=MICROSOFT,
        bits=bits,
        block_size=form.block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    if width % form.block_size == 0:
        return rows
    starts, ends, axes = (
        graph.constant(f"embed.{k}", np.array([v], np.int64)) for k, v in (("start", 0), ("end", width), ("axis", 2))
    )
    return graph.op("Slice", rows, starts, ends, axes)
