"""The rows of a vocabulary table that an export has stored, read back from the file where they lie.

A bundle's own table is all that is left of a checkpoint's once it is exported, so what is added to a bundle later takes
its rows from there: as the very bytes where the format stays, otherwise by the numbers that they stand for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from wavekit_engines.graphs.graph_writer import WeightFile
from wavekit_engines.graphs.linear import WeightFormat, add_table
from wavekit_engines.quantization import QuantizedBlocks, bits_of, dequantize_rows

_COPIED_ROWS = 4096


def stored_tensors(graph: Path) -> dict[str, ir.ExternalTensor]:
    """The tensors by name that a graph file has in weight files beside it."""
    values = ir.load(graph).graph.initializers.values()
    tensors = [value.const_value for value in values]
    return {tensor.name: tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor) and tensor.name}


@dataclass(frozen=True)
class StoredTable:
    """Rows ``ids`` of the table ``name`` [V, width] that `linear.add_table` stored as ``form``; a `linear.Rows`."""

    tensors: Mapping[str, ir.ExternalTensor]
    name: str
    form: WeightFormat
    width: int
    ids: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, width]."""
        return len(self.ids), self.width

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows ``start`` to ``stop`` of those that ``ids`` names, float32 and C-contiguous."""
        ids, bits = self.ids[start:stop], bits_of(self.form.precision)
        stored = self._array(self.name)[ids]
        if bits is None:
            return np.ascontiguousarray(stored, np.float32)
        return dequantize_rows(QuantizedBlocks(stored, self._array(f"{self.name}.scales")[ids]), bits, self.width)

    def store(self, file: WeightFile, name: str, form: WeightFormat) -> None:
        """Store these rows as a table of their own, in another format or byte for byte in the same."""
        if form != self.form:
            add_table(file, name, self, form)
            return
        for part in ("", ".scales") if bits_of(form.precision) is not None else ("",):
            array = self._array(self.name + part)
            file.add(name + part, array.dtype.name, (len(self.ids), *array.shape[1:]), self._copied(array))

    def _array(self, name: str) -> npt.NDArray[Any]:
        return self.tensors[name].numpy()  # mapped: only the rows that are taken are read

    def _copied(self, array: npt.NDArray[np.generic]) -> Iterator[npt.NDArray[np.generic]]:
        for start in range(0, len(self.ids), _COPIED_ROWS):
            yield array[self.ids[start : start + _COPIED_ROWS]]
