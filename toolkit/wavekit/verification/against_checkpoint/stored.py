"""The weights that a bundle stores, read back from its files, and how they differ from those they should be.

Matrices come as [out, in] in float32, whatever the graph keeps: transposed floats, or blocks of integers with scales.
One block of rows is in memory at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from wavekit_engines.engine import Array
from wavekit_engines.quantization import Precision, QuantizedBlocks, bits_of, dequantize_rows

ROUNDING: dict[Precision, float] = {"fp32": 0.0, "fp16": 2e-3, "int8": 3e-2, "int4": 3.5e-1}
"""What rounding may do to one row of weights: norm of the difference over the row's. Half a step in every weight; rows
with one large weight a block come close to it.
"""

_ROWS, _MOST_COMPARED = 4096, 4096
_TINY = 1e-30


class Rows(Protocol):
    """Weights that are read a few rows at a time; `wavekit_engines.weights.WeightRows` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [N] for a vector."""

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Float32 rows."""


class StoredWeights:
    """The weights of one graph of a bundle."""

    def __init__(self, file: Path) -> None:
        graph = ir.load(file).graph
        self._tensors = {
            name: value.const_value for name, value in graph.initializers.items() if value.const_value is not None
        }
        self._used = {name for name, value in graph.initializers.items() if value.uses()}

    def has(self, name: str) -> bool:
        """Whether the graph stores and uses a weight of this name."""
        return bool({name, f"{name}.table"} & self._used)

    def array(self, name: str) -> Array:
        """A tensor as it is stored."""
        array: Array = self._tensors[name].numpy()
        return array

    def rows(self, name: str, width: int, precision: Precision, start: int, stop: int, table: bool) -> Array:
        """Float32 rows [stop - start, width]; ``table`` for those of the vocabulary, which are not transposed."""
        bits = bits_of(precision)
        if bits is not None and f"{name}.scales" in self._tensors:
            scales = self.array(f"{name}.scales")[start:stop]
            values = self.array(name if name in self._tensors else f"{name}.table")[start:stop]
            blocks = QuantizedBlocks(values.reshape(*scales.shape, -1), scales)
            return dequantize_rows(blocks, bits, width)
        stored = self.array(name)
        rows: Array = (stored[start:stop] if table else stored[:, start:stop].T).astype(np.float32)
        return rows


@dataclass(frozen=True)
class Weight:
    """One weight to compare: how the bundle stores it, and what it should be."""

    name: str
    expected: Rows
    precision: Precision
    table: bool = False


def difference(stored: StoredWeights, weight: Weight, block_size: int) -> str | None:
    """How a stored weight differs from what it should be; None where rounding explains it.

    Raises nothing for a weight that is missing or has another shape: that is a difference.
    """
    if not stored.has(weight.name):
        return "is missing, or nothing in the graph reads it"
    shape = weight.expected.shape
    if len(shape) == 1:
        return _vector_difference(
            stored.array(weight.name).astype(np.float32), weight.expected.read(), weight.precision
        )
    allowed = ROUNDING[weight.precision]
    found, rows, total = list[tuple[Array, Array]](), list[Array](), 0
    for start, stop in _pieces(shape[0]):
        try:
            ours = stored.rows(weight.name, shape[1], weight.precision, start, stop, weight.table)
        except (ValueError, KeyError):
            return "has another shape"
        theirs = weight.expected.read(start, stop)
        if ours.shape != theirs.shape:
            return f"has the shape {list(ours.shape)}, not {list(theirs.shape)}"
        bad = np.flatnonzero(_row_errors(ours, theirs) > allowed)
        total += bad.size
        if bad.size and sum(map(len, rows)) < _MOST_COMPARED:
            found.append((ours[bad], theirs[bad]))
            rows.append(bad + start)
    if not total:
        return None
    ours, theirs = (np.concatenate([pair[side] for pair in found]) for side in (0, 1))
    return _name(ours, theirs, np.concatenate(rows), (total, shape[0]), allowed, block_size)


def _name(ours: Array, theirs: Array, rows: Array, counts: tuple[int, int], allowed: float, block_size: int) -> str:
    """What rows that differ have in common."""
    allowed = max(allowed, 1e-4)
    these = f"{counts[0]} of {counts[1]} rows"
    order = _order(ours, theirs, allowed)
    if order is not None:
        return f"has its rows permuted: {these} are others', row {rows[0]} holds what belongs in row {rows[order[0]]}"
    factors = (ours * theirs).sum(1) / np.maximum((theirs * theirs).sum(1), _TINY)
    if (_row_errors(ours, theirs * factors[:, None]) <= allowed).mean() > 0.9:
        if np.ptp(factors) <= allowed * abs(factors.mean()):
            return f"is {factors.mean():.4g} times what it should be ({these})"
        return f"has other scales in {these}, by factors of {factors.min():.2g} to {factors.max():.2g}: scales swapped"
    if _scaled_by_block(ours, theirs, allowed, block_size):
        return f"has the right values but other scales in blocks of {these}: scales swapped"
    similarity = float((_unit(ours) * _unit(theirs)).sum(1).mean())
    if similarity > 0.3:
        return f"is like the checkpoint's but not the same (similarity {similarity:.2f}, {these}): of another fine-tune"
    return f"is unrelated to the checkpoint's ({these})"


def _order(ours: Array, theirs: Array, allowed: float) -> Array | None:
    """For each row the one of the others that it holds; None unless that explains nearly all."""
    if len(ours) < 2:
        return None
    order: Array = (_unit(ours) @ _unit(theirs).T).argmax(1)
    explained = (_row_errors(ours, theirs[order]) <= allowed) & (order != np.arange(len(order)))
    return order if explained.mean() > 0.9 else None


def _scaled_by_block(ours: Array, theirs: Array, allowed: float, block_size: int) -> bool:
    width = ours.shape[1] // block_size * block_size
    if not width:
        return False
    a, b = (rows[:, :width].reshape(len(rows) * (width // block_size), block_size) for rows in (ours, theirs))
    factors = (a * b).sum(1) / np.maximum((b * b).sum(1), _TINY)
    return bool((_row_errors(a, b * factors[:, None]) <= 1.5 * allowed).mean() > 0.8)


def _vector_difference(ours: Array, theirs: Array, precision: Precision) -> str | None:
    if ours.shape != theirs.shape:
        return f"has the shape {list(ours.shape)}, not {list(theirs.shape)}"
    allowed = 2e-3 if precision == "fp16" else 0.0
    off = ours - theirs
    scale = max(float(np.abs(theirs).max()), _TINY)
    if float(np.abs(off).max()) <= allowed * scale:
        return None
    if np.ptp(off) <= 1e-3 * scale:
        return f"is {off.mean():+.3g} off in every entry: the norm's offset is added twice or not at all"
    if np.ptp(ours) == 0:
        return f"is {ours[0]:g} in every entry: it was left out"
    return f"is not the checkpoint's in {np.count_nonzero(np.abs(off) > allowed * scale)} of {ours.size} entries"


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _ROWS):
        yield start, min(start + _ROWS, count)


def _row_errors(ours: Array, theirs: Array) -> Array:
    errors: Array = np.linalg.norm(ours - theirs, axis=1) / np.maximum(np.linalg.norm(theirs, axis=1), _TINY)
    return errors


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
    return unit
