"""Faults planted in copies of exported bundles: files are changed, and the manifest sealed anew as if all were well."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from wavekit_engines.bundle import MANIFEST, Manifest, decode_manifest, describe_files

Change = Callable[[Path], dict[str, Any] | None]
"""Changes the files of a copy; returns what to put into its manifest instead of what is there."""


def planted(bundle: Path, copy: Path, change: Change) -> Path:
    """A copy of a bundle with one fault."""
    shutil.copytree(bundle, copy)
    fields = change(copy) or {}
    replaced = dataclasses.replace(manifest_of(copy), **fields)
    (copy / MANIFEST).write_bytes(dataclasses.replace(replaced, files=describe_files(copy)).encode())
    return copy


def manifest_of(bundle: Path) -> Manifest:
    """The manifest, whether or not it goes with the files."""
    return decode_manifest((bundle / MANIFEST).read_bytes(), MANIFEST)


def stored(bundle: Path, graph: str, name: str) -> np.ndarray:
    """A weight of a graph, to be changed in place in the file that holds it."""
    tensor = ir.load(bundle / "graphs" / f"{graph}.onnx").graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    file, dtype = bundle / "graphs" / tensor.location, tensor.dtype.numpy()
    return np.memmap(file, dtype, "r+", offset=tensor.offset or 0, shape=tuple(tensor.shape.numpy()))


def edit(bundle: Path, graph: str, change: Callable[[ir.Graph], None]) -> None:
    """Change a graph; its weights stay where they are."""
    file = bundle / "graphs" / f"{graph}.onnx"
    model = ir.load(file)
    change(model.graph)
    ir.save(model, file)


def reader(graph: ir.Graph, weight: str) -> ir.Node:
    """The node that reads a weight."""
    return graph.initializers[weight].uses()[0].node


def bypass(graph: ir.Graph, weight: str) -> None:
    """Take the node that reads a weight out: what went in comes out."""
    node = reader(graph, weight)
    before = next(value for value in node.inputs if value is not None and value.const_value is None)
    for usage in tuple(node.outputs[0].uses()):
        usage.node.replace_input_with(usage.idx, before)
    graph.remove(node)
    del graph.initializers[weight]


def keys_of_single_tokens_lost(graph: ir.Graph, layer: int, query: int, packed: int) -> None:
    """Keys and values of a layer are zero in passes of one token, as if their cache row had never been written."""
    attention = next(node for node in graph if node.op_type == "GroupQueryAttention" and _feeds(node, f"key_{layer}"))
    value = attention.inputs[0]
    assert value is not None
    constants = {"one": np.array(1, np.int64), "at": np.array([1], np.int64)}
    constants["query"] = (np.arange(packed) < query).astype(np.float32)
    named = {}
    for name, array in constants.items():
        named[name] = ir.Value(name=f"planted_{name}", const_value=ir.Tensor(array, name=f"planted_{name}"))
        named[name].type, named[name].shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
        graph.register_initializer(named[name])

    def add(kind: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        node = ir.node(kind, inputs, attributes=attributes)
        node.outputs[0].name = f"planted:{kind}"
        graph.insert_before(attention, node)
        return node.outputs[0]

    rows = add("Gather", [add("Shape", [value]), named["at"]])
    several = add("Cast", [add("Greater", [rows, named["one"]])], to=int(ir.DataType.FLOAT))
    kept = add("Max", [named["query"], several])
    attention.replace_input_with(0, add("Mul", [value, kept]))


def _feeds(node: ir.Node, name: str) -> bool:
    return any(value is not None and value.name == name for value in node.inputs)
