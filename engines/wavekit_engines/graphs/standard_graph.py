"""A bundle's graph in standard ONNX operators, for runtimes that lack ONNX Runtime's own.

A bundle's graphs say what is computed: stages, head, draft and exits of every family, written once. They use a handful
of operators that only ONNX Runtime has; here each of those is spelled in operators of ONNX (opset 24), everything else
is copied, and the weights are converted on the way. So the two run the same decoder, from the same stored numbers, and
a bundle is all that this needs. Nothing here knows TensorRT; a graph runs in ONNX Runtime too.

What differs from the source (`stage_graph`, `draft_graph`, `exit_graph`):

- activations, caches, masks and rotary tables are of the dtype asked for; logits and log-probabilities stay float32;
- one sequence (B = 1) and a fixed capacity: C = T = R, so a mask has a column for every row of the cache;
- nothing is causal by itself: the mask hides everything that a row must not see, later rows and rows not in use too;
- ``first_row`` int64 [1], the cache row that the first new row goes to, takes the place of ``last_rows`` and
  ``total_rows``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from wavekit_engines.graphs.graph_writer import Dim, GraphWriter, WeightFile
from wavekit_engines.graphs.standard_attention import AttentionShape, append, attend, rotate
from wavekit_engines.graphs.standard_weights import (
    StoredBlocks,
    add_blocks,
    add_converted,
    add_dequantized,
    dequantize,
)

OPSET = 24
FIRST_ROW = "first_row"
REVISION = 1
"""Of the graphs that are written: raised when another is written for the same source."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_REPLACED_INPUTS = frozenset({"last_rows", "total_rows"})
_SCORES = frozenset({"logits", "top_logprobs"})
_PRODUCTS = frozenset({"Gemm", "MatMulNBits"})


def write_standard_graph(source: Path, path: Path, dtype: str, capacity: int) -> None:
    """Write ``path`` and its weights, ``path`` with the suffix ``.weights``, from a graph of a bundle.

    Args:
        source: the graph of a bundle, its weights beside it.
        path: where to write.
        dtype: of activations and of weights that are not quantized: float32, float16 or bfloat16.
        capacity: cache rows.

    Raises:
        MisuseError: a weight does not fit ``dtype``.
        ValueError: the source has an operator that no graph of a bundle has.
    """
    model = ir.load(source)
    with WeightFile(path.with_suffix(".weights")) as weights:
        graph = GraphWriter(path.stem, weights)
        _Rewriting(model.graph, graph, weights, dtype, capacity).run()
        graph.save(path, model.metadata_props, OPSET)


@dataclass(frozen=True)
class _Operands:
    """Inputs of a node by position, some of them None."""

    values: Sequence[ir.Value | None]

    def __getitem__(self, index: int) -> ir.Value:
        value = self.values[index]
        assert value is not None
        return value

    def has(self, index: int) -> bool:
        return index < len(self.values) and self.values[index] is not None


class _Rewriting:
    """One pass over the nodes of ``source``; every value that was computed has its counterpart in ``graph``."""

    def __init__(self, source: ir.Graph, graph: GraphWriter, weights: WeightFile, dtype: str, capacity: int) -> None:
        self._source, self._graph, self._weights, self._dtype = source, graph, weights, dtype
        self._fixed = {"B": 1, "M": 1, "C": capacity, "T": capacity, "R": capacity}
        self._new: dict[ir.Value, ir.Value] = {}
        self._float32: set[ir.Value] = set()
        self._scoring = _scoring_node(source)
        self._first_row: ir.Value | None = None

    def run(self) -> None:
        """Write inputs, nodes and outputs, in the order of the source."""
        for value in self._source.inputs:
            self._declare_input(value)
        for node in self._source:
            rule = _RULES.get((node.domain, node.op_type))
            if rule is None and (node.domain or node.op_type not in _COPIED):
                raise ValueError(f"{self._source.name}: no standard spelling of {node.domain}::{node.op_type}")
            outputs = rule(self, node, _Operands(node.inputs)) if rule is not None else self._copied(node)
            if node is self._scoring and self._dtype != "float32":
                outputs = [self._graph.op("Cast", outputs[0], to=int(ir.DataType.FLOAT))]
                self._float32.add(outputs[0])
            self._new.update(zip(node.outputs, outputs, strict=True))
        for value in self._source.outputs:
            name, dtype, shape = self._described(value)
            dtype = "float32" if name in _SCORES else dtype
            self._graph.output(name, self._new[value], dtype, shape)

    def _declare_input(self, value: ir.Value) -> None:
        name, dtype, shape = self._described(value)
        if name not in _REPLACED_INPUTS:
            self._new[value] = self._graph.input(name, dtype, shape)
        elif self._first_row is None:
            self._first_row = self._graph.input(FIRST_ROW, "int64", (1,))

    def _described(self, value: ir.Value) -> tuple[str, str, tuple[Dim, ...]]:
        assert value.name is not None
        assert value.dtype is not None
        assert value.shape is not None
        dims = (dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        shape = tuple(self._fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in dims)
        return value.name, self._dtype if value.dtype in _FLOATS else value.dtype.numpy().name, shape

    def _operand(self, value: ir.Value, dtype: str | None = None) -> ir.Value:
        """The counterpart of a value: computed, or stored in the dtype given (that of activations by default)."""
        if value in self._new:
            return self._new[value]
        name, tensor = value.name, value.const_value
        assert name is not None
        assert tensor is not None
        dtype = dtype or self._dtype
        if not isinstance(tensor, ir.ExternalTensor):
            array = tensor.numpy()
            return self._graph.constant(name, array.astype(dtype) if array.dtype.kind == "f" else array)
        if name not in self._weights:
            add_converted(self._weights, name, tensor.numpy(), dtype)
        return self._graph.stored(name)

    def _copied(self, node: ir.Node) -> Sequence[ir.Value]:
        """The same operator on the counterparts; constants take the dtype of what they meet."""
        computed = [value for value in node.inputs if value is not None and value in self._new]
        wide = any(self._new[value] in self._float32 for value in computed)
        operands = [v if v is None else self._operand(v, "float32" if wide else None) for v in node.inputs]
        if node.op_type == "Cast" and wide:
            return operands[:1]  # type: ignore[return-value]
        attributes: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
        outputs = self._graph.ops(node.op_type, *operands, outputs=len(node.outputs), **attributes)
        if wide:
            self._float32.update(outputs)
        return outputs

    def _norm(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        x, weight = self._operand(inputs[0]), self._operand(inputs[1])
        return [self._rms_norm(node, x, weight)]

    def _add_and_norm(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        total = self._graph.op("Add", self._operand(inputs[0]), self._operand(inputs[1]))
        normed = self._rms_norm(node, total, self._operand(inputs[2]))
        return [normed, normed, normed, total]  # the two between are statistics that nothing reads

    def _rms_norm(self, node: ir.Node, x: ir.Value, weight: ir.Value) -> ir.Value:
        epsilon = node.attributes["epsilon"].as_float()
        return self._graph.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon, stash_type=1)

    def _silu(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        x = self._operand(inputs[0])
        return [self._graph.op("Mul", x, self._graph.op("Sigmoid", x))]

    def _rotation(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        x, positions, cosines, sines = (self._operand(inputs[index]) for index in range(4))
        heads = node.attributes["num_heads"].as_int()
        rotated = node.attributes["rotary_embedding_dim"].as_int()
        return [rotate(self._graph, x, positions, (cosines, sines), heads, rotated)]

    def _attention(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        past = self._operand(inputs[3]), self._operand(inputs[4])
        shape = AttentionShape(
            heads=node.attributes["num_heads"].as_int(),
            kv_heads=node.attributes["kv_num_heads"].as_int(),
            head_dim=_last_dim(past[0]),
            scale=node.attributes["scale"].as_float(),
            softcap=node.attributes["softcap"].as_float(),
        )
        query, key, value = self._heads(inputs, shape)
        if inputs.has(7):
            tables, positions = (self._operand(inputs[7]), self._operand(inputs[8])), self._operand(inputs[9])
            rotated = 2 * _last_dim(tables[0])
            query = rotate(self._graph, query, positions, tables, shape.heads, rotated)
            key = rotate(self._graph, key, positions, tables, shape.kv_heads, rotated)
        assert self._first_row is not None
        cache = append(self._graph, past, (key, value), self._first_row, shape)
        attended = attend(self._graph, query, cache, self._operand(inputs[10]), shape, self._dtype)
        return [attended, *cache]

    def _heads(self, inputs: _Operands, shape: AttentionShape) -> Sequence[ir.Value]:
        if inputs.has(1):
            return [self._operand(inputs[index]) for index in range(3)]
        kv_size = shape.kv_heads * shape.head_dim
        sizes = np.array([shape.heads * shape.head_dim, kv_size, kv_size], np.int64)
        packed = self._operand(inputs[0])
        return self._graph.ops("Split", packed, self._graph.constant("packed_sizes", sizes), outputs=3, axis=-1)

    def _quantized_product(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        graph, name, width = self._graph, _name(inputs[1]), node.attributes["K"].as_int()
        blocks = self._blocks(node, inputs[1], inputs[2], width)
        if name not in self._weights:
            add_blocks(self._weights, name, blocks, self._dtype)
        matrix = dequantize(graph, name, blocks, node.attributes["block_size"].as_int(), self._dtype)
        product = graph.op("MatMul", self._operand(inputs[0]), matrix)
        return [graph.op("Add", product, self._operand(inputs[5])) if inputs.has(5) else product]

    def _quantized_rows(self, node: ir.Node, inputs: _Operands) -> Sequence[ir.Value]:
        """Rows of a table that is stored dequantized: a runtime would otherwise dequantize all of it for a few rows."""
        name, scales = _name(inputs[0]), _array(inputs[2])
        width = scales.shape[1] * node.attributes["block_size"].as_int()
        if name not in self._weights:
            add_dequantized(self._weights, name, self._blocks(node, inputs[0], inputs[2], width), self._dtype)
        return [self._graph.op("Gather", self._graph.stored(name), self._operand(inputs[1]))]

    def _blocks(self, node: ir.Node, values: ir.Value, scales: ir.Value, width: int) -> StoredBlocks:
        stored_scales = _array(scales)
        packed = _array(values).reshape(*stored_scales.shape, -1)
        return StoredBlocks(packed, stored_scales, node.attributes["bits"].as_int(), width)


def _scoring_node(source: ir.Graph) -> ir.Node | None:
    """The product with a vocabulary that scores come from, in whatever graph has such."""
    for value in source.outputs:
        node = value.producer() if value.name in _SCORES else None
        while node is not None:
            if node.op_type in _PRODUCTS:
                return node
            first = node.inputs[0]
            node = first.producer() if first is not None else None
    return None


def _last_dim(value: ir.Value) -> int:
    assert value.shape is not None
    dim = value.shape[-1]
    assert isinstance(dim, int)
    return dim


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def _array(value: ir.Value) -> npt.NDArray[Any]:
    assert value.const_value is not None
    return value.const_value.numpy()


_CONTRIB = "com.microsoft"
_Rule = Callable[[_Rewriting, ir.Node, _Operands], Sequence[ir.Value]]
_RULES: dict[tuple[str, str], _Rule] = {
    ("", "SimplifiedLayerNormalization"): _Rewriting._norm,
    (_CONTRIB, "SkipSimplifiedLayerNormalization"): _Rewriting._add_and_norm,
    (_CONTRIB, "QuickGelu"): _Rewriting._silu,
    (_CONTRIB, "RotaryEmbedding"): _Rewriting._rotation,
    (_CONTRIB, "GroupQueryAttention"): _Rewriting._attention,
    (_CONTRIB, "MatMulNBits"): _Rewriting._quantized_product,
    (_CONTRIB, "GatherBlockQuantized"): _Rewriting._quantized_rows,
}
"""Operators that only ONNX Runtime has, one of them in the standard's own domain."""

_COPIED = frozenset(
    {
        *("Add", "Cast", "Concat", "Gather", "Gelu", "Gemm", "Identity", "LogSoftmax", "MatMul", "Mul", "Reshape"),
        *("Slice", "Split", "Squeeze", "Tanh", "TopK"),
    }
)
