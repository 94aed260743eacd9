"""A written graph as the manifest describes it."""

from pathlib import Path

import onnx_ir as ir

from wavekit_engines.bundle import GRAPHS, GraphInfo, TensorInfo


def describe_graph(file: Path, parameters: int) -> GraphInfo:
    """What the manifest says of a graph file; its weights are not read."""
    graph = ir.load(file).graph
    weights = [value.const_value for value in graph.initializers.values() if value.const_value is not None]
    return GraphInfo(
        file=f"{GRAPHS}/{file.name}",
        inputs=tuple(map(_describe_tensor, graph.inputs)),
        outputs=tuple(map(_describe_tensor, graph.outputs)),
        parameters=parameters,
        weight_bytes=sum(weight.nbytes for weight in weights),
    )


def _describe_tensor(value: ir.Value) -> TensorInfo:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorInfo(value.name, value.dtype.numpy().name, dims)
