"""Writing one ONNX graph node by node, its weights streamed to a file beside it.

`WeightFile` receives tensors a few rows at a time and only remembers where they went, so a graph of any size is written
with the memory of one block of rows. `GraphWriter` collects inputs, nodes and outputs with onnx-ir and saves the graph
with its initializers pointing into the weight file. Neither knows what a transformer is.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

OPSET = 21
IR_VERSION = 10
MICROSOFT = "com.microsoft"
_ALIGNMENT = 4096  # whole pages, so that ONNX Runtime can map an initializer instead of copying it

Dim = int | str
AttributeValue = int | float | str | Sequence[int]

DTYPES: dict[str, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int4": ir.DataType.INT4,
    "int8": ir.DataType.INT8,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "uint8": ir.DataType.UINT8,
}


class StoredWeights(Protocol):
    """Tensors by name that lie in files beside a graph; `WeightFile` is one, a dict another."""

    def __contains__(self, name: str, /) -> bool: ...

    def __getitem__(self, name: str, /) -> ir.ExternalTensor: ...


class WeightFile:
    """An external-data file being written front to back.

    Several graphs in the same folder may point into one weight file, which is how tied weights are stored once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._tensors: dict[str, ir.ExternalTensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> ir.ExternalTensor:
        return self._tensors[name]

    def add(self, name: str, dtype: str, shape: Sequence[int], blocks: Iterable[npt.NDArray[np.generic]]) -> None:
        """Append one tensor from consecutive C-contiguous blocks that together fill ``shape``.

        Blocks of int4 are uint8, two values a byte with the earlier one in the low half.

        Raises:
            ValueError: the name is taken, or the blocks do not add up to the shape.
        """
        if name in self._tensors:
            raise ValueError(f"weight {name!r} is written twice")
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        expected = -(-int(np.prod(shape)) * DTYPES[dtype].bitwidth // 8)
        held = np.dtype("uint8" if dtype == "int4" else dtype)
        for block in blocks:
            if block.dtype != held:
                raise ValueError(f"weight {name!r} holds {dtype}, a block has {block.dtype}")
            self._file.write(np.ascontiguousarray(block).view(np.uint8).data)
        length = self._file.tell() - offset
        if length != expected:
            raise ValueError(f"weight {name!r} needs {expected} bytes, its blocks have {length}")
        self._tensors[name] = ir.ExternalTensor(
            self.path.name,
            offset,
            length,
            DTYPES[dtype],
            shape=ir.Shape(shape),
            name=name,
            base_dir=str(self.path.parent),
        )

    def view(self, name: str, of: str, shape: Sequence[int]) -> None:
        """Give the bytes of the tensor ``of`` a second name and shape."""
        tensor = self._tensors[of]
        self._tensors[name] = ir.ExternalTensor(
            self.path.name,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=str(self.path.parent),
        )

    def close(self) -> None:
        """Flush to disk. Pointers given out stay valid."""
        self._file.close()

    def __enter__(self) -> "WeightFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class GraphWriter:
    """One graph under construction; nodes are in execution order as they are added."""

    def __init__(self, name: str, *weights: StoredWeights) -> None:
        self.name = name
        self._weights = weights
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> ir.Value:
        """Declare a graph input; string dimensions are free."""
        value = ir.Value(name=name, type=ir.TensorType(DTYPES[dtype]), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: str, shape: Sequence[Dim]) -> None:
        """Make ``value`` a graph output under ``name``; a value that already is one is passed through an Identity."""
        if value in self._outputs or value in self._inputs:
            value = self.op("Identity", value)
        value.name = name
        value.type = ir.TensorType(DTYPES[dtype])
        value.shape = ir.Shape(shape)
        self._outputs.append(value)

    def stored(self, name: str) -> ir.Value:
        """The tensor of that name in one of the weight files, as an initializer of this graph."""
        tensor = next(file[name] for file in self._weights if name in file)
        return self._initializer(name, tensor, tensor.shape)

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """A small constant kept inside the graph file; the same name must always stand for the same value."""
        return self._initializer(name, ir.Tensor(array, name=name), ir.Shape(array.shape))

    def _initializer(self, name: str, tensor: ir.TensorProtocol, shape: ir.Shape) -> ir.Value:
        if name not in self._initializers:
            self._initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor
            )
        return self._initializers[name]

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: AttributeValue) -> ir.Value:
        """Append a node with one output that is used."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: AttributeValue
    ) -> Sequence[ir.Value]:
        """Append a node with several outputs."""
        node = ir.Node(
            domain,
            op_type,
            inputs,
            attributes=_attributes(attributes),
            num_outputs=outputs,
            name=f"{self.name}/{op_type}_{len(self._nodes)}",
        )
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}:{index}"
        self._nodes.append(node)
        return node.outputs

    def save(self, path: Path, metadata: Mapping[str, str], opset: int = OPSET) -> None:
        """Write the graph file. The weight file must have been closed, or be closed before the graph is loaded."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": opset, MICROSOFT: 1},
            name=self.name,
        )
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="wavekit", metadata_props=dict(metadata))
        ir.save(model, path)


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[ir.Attr]:
    kinds = {int: ir.AttributeType.INT, float: ir.AttributeType.FLOAT, str: ir.AttributeType.STRING}
    return [ir.Attr(key, kinds.get(type(value), ir.AttributeType.INTS), value) for key, value in attributes.items()]
