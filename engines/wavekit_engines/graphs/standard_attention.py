"""Attention over a cache of fixed capacity, in standard ONNX.

``TensorScatter`` writes the new rows into the cache, which a runtime may do in place, and one ``Attention`` node reads
all of it: the mask hides the rows that are not in use as well as those that a row must not see. Taking the rows in use
out first would copy them, in every layer. A soft cap is written out, since TensorRT's attention has none.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from wavekit_engines.graphs.graph_writer import DTYPES, GraphWriter
from wavekit_engines.graphs.standard_weights import whole_numbers

Pair = tuple[ir.Value, ir.Value]


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer and what happens to its scores; ``softcap`` is 0 where there is none."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float


def rotate(graph: GraphWriter, x: ir.Value, positions: ir.Value, tables: Pair, heads: int, rotated: int) -> ir.Value:
    """Rotate the leading features of heads x [1, S, heads * D] by rows ``positions`` of the cosine and sine tables."""
    return graph.op("RotaryEmbedding", x, *tables, positions, num_heads=heads, rotary_embedding_dim=rotated)


def append(graph: GraphWriter, cache: Pair, new: Pair, first_row: ir.Value, shape: AttentionShape) -> Pair:
    """The cache [1, kv, C, D] of keys and values with new ones [1, S, kv * D] from row ``first_row`` on."""
    keys, values = (
        graph.op("TensorScatter", past, _apart(graph, x, shape.kv_heads, shape.head_dim), first_row, axis=2)
        for past, x in zip(cache, new, strict=True)
    )
    return keys, values


def attend(
    graph: GraphWriter, query: ir.Value, cache: Pair, mask: ir.Value, shape: AttentionShape, dtype: str
) -> ir.Value:
    """What queries [1, S, heads * D] attend to, through a mask [1, 1, S, C] that is added: [1, S, heads * D]."""
    query = _apart(graph, query, shape.heads, shape.head_dim)
    if shape.softcap:
        attended = _attend_capped(graph, query, cache, mask, shape, dtype)
    else:
        attended = graph.op("Attention", query, *cache, mask, scale=shape.scale)
    attended = graph.op("Transpose", attended, perm=[0, 2, 1, 3])
    return graph.op("Reshape", attended, whole_numbers(graph, (0, 0, shape.heads * shape.head_dim)))


def _attend_capped(
    graph: GraphWriter, query: ir.Value, cache: Pair, mask: ir.Value, shape: AttentionShape, dtype: str
) -> ir.Value:
    """Scores are capped before the mask is added, both in float32."""
    group = shape.heads // shape.kv_heads
    query = graph.op("Reshape", query, whole_numbers(graph, (1, shape.kv_heads, group, -1, shape.head_dim)))
    keys, values = (graph.op("Unsqueeze", x, whole_numbers(graph, (2,))) for x in cache)
    scores = graph.op("MatMul", query, graph.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
    scores = graph.op("Mul", _float32(graph, scores, dtype), _number(graph, shape.scale / shape.softcap))
    scores = graph.op("Mul", graph.op("Tanh", scores), _number(graph, shape.softcap))
    weights = graph.op("Softmax", graph.op("Add", scores, _float32(graph, mask, dtype)), axis=-1)
    weights = weights if dtype == "float32" else graph.op("Cast", weights, to=int(DTYPES[dtype]))
    attended = graph.op("MatMul", weights, values)
    return graph.op("Reshape", attended, whole_numbers(graph, (1, shape.heads, -1, shape.head_dim)))


def _apart(graph: GraphWriter, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
    """Heads [1, S, heads * D] as [1, heads, S, D]."""
    return graph.op(
        "Transpose", graph.op("Reshape", x, whole_numbers(graph, (0, 0, heads, head_dim))), perm=[0, 2, 1, 3]
    )


def _float32(graph: GraphWriter, x: ir.Value, dtype: str) -> ir.Value:
    return x if dtype == "float32" else graph.op("Cast", x, to=int(ir.DataType.FLOAT))


def _number(graph: GraphWriter, number: float) -> ir.Value:
    return graph.constant(f"number.{number!r}", np.array(number, np.float32))
