"""Weights streamed to a file: aligned, checked against their declared shape, and what a written graph computes with."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from wavekit_engines.graphs.graph_writer import GraphWriter, WeightFile


def matrix(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 9, shape).astype(dtype)


def run(path: Path, **inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def test_a_graph_computes_with_the_weights_of_several_files(tmp_path: Path) -> None:
    first, second, x = matrix(3, 4), matrix(4, 2), matrix(2, 3)
    with WeightFile(tmp_path / "a.weights") as a, WeightFile(tmp_path / "b.weights") as b:
        a.add("first", "float32", (3, 4), [first[:1], first[1:]])
        b.add("unused", "float32", (5,), [matrix(5)])
        b.add("second", "float32", (4, 2), iter([second]))
        graph = GraphWriter("graph", a, b)
        product = graph.op("MatMul", graph.input("x", "float32", ("n", 3)), graph.stored("first"))
        scaled = graph.op("Mul", product, graph.constant("two", np.array(2, np.float32)))
        graph.output("y", graph.op("MatMul", scaled, graph.stored("second")), "float32", ("n", 2))
        graph.save(tmp_path / "graph.onnx", {"made": "here"})
    np.testing.assert_array_equal(run(tmp_path / "graph.onnx", x=x)[0], 2 * x @ first @ second)
    assert (tmp_path / "graph.onnx").stat().st_size < 2000


@pytest.mark.parametrize("twice", ["input", "output"])
def test_a_value_that_is_an_output_already_can_be_one_more(twice: str, tmp_path: Path) -> None:
    graph = GraphWriter("graph")
    x = graph.input("x", "float32", ("n",))
    value = x if twice == "input" else graph.op("Add", x, x)
    graph.output("y", value, "float32", ("n",))
    graph.output("z", value, "float32", ("n",))
    graph.save(tmp_path / "graph.onnx", {})
    y, z = run(tmp_path / "graph.onnx", x=np.arange(3, dtype=np.float32))
    np.testing.assert_array_equal(y, z)


def test_one_weight_under_two_names_and_shapes_is_stored_once(tmp_path: Path) -> None:
    table, ids = matrix(6, 4), np.array([5, 0])
    with WeightFile(tmp_path / "w.weights") as file:
        file.add("table", "float32", (6, 4), [table])
        file.view("flat", "table", (24,))
        graph = GraphWriter("graph", file)
        ids_in = graph.input("ids", "int64", ("n",))
        graph.output("rows", graph.op("Gather", graph.stored("table"), ids_in), "float32", ("n", 4))
        graph.output("values", graph.op("Gather", graph.stored("flat"), ids_in), "float32", ("n",))
        graph.save(tmp_path / "graph.onnx", {})
    rows, values = run(tmp_path / "graph.onnx", ids=ids)
    np.testing.assert_array_equal(rows, table[ids])
    np.testing.assert_array_equal(values, table.ravel()[ids])
    assert (tmp_path / "w.weights").stat().st_size == table.nbytes


def test_tensors_begin_on_pages_of_their_own(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "w.weights") as file:
        for number, size in enumerate((1, 4096, 4097, 3)):
            file.add(str(number), "uint8", (size,), [matrix(size, dtype="uint8")])
        offsets = [file[str(number)].offset for number in range(4)]
    assert offsets == [0, 4096, 8192, 16384]


@pytest.mark.parametrize(
    ("blocks", "line"),
    [
        ([matrix(2, 4)], "needs 48 bytes, its blocks have 32"),
        ([matrix(3, 4), matrix(1, 4)], "needs 48 bytes, its blocks have 64"),
        ([], "needs 48 bytes, its blocks have 0"),
        ([matrix(3, 4, dtype="float64")], "holds float32, a block has float64"),
        ([matrix(3, 4, dtype="int32")], "holds float32, a block has int32"),
    ],
)
def test_blocks_that_are_not_the_tensor_declared_are_an_error(
    blocks: list[np.ndarray], line: str, tmp_path: Path
) -> None:
    with WeightFile(tmp_path / "w.weights") as file, pytest.raises(ValueError, match=line):
        file.add("w", "float32", (3, 4), blocks)


def test_a_name_is_written_once(tmp_path: Path) -> None:
    with WeightFile(tmp_path / "w.weights") as file:
        file.add("w", "float32", (4,), [matrix(4)])
        with pytest.raises(ValueError, match="'w' is written twice"):
            file.add("w", "float32", (4,), [matrix(4)])


def test_blocks_that_are_not_contiguous_are_written_in_order(tmp_path: Path) -> None:
    table = matrix(4, 6)
    with WeightFile(tmp_path / "w.weights") as file:
        file.add("w", "float32", (6, 4), [table.T])
    np.testing.assert_array_equal(np.fromfile(tmp_path / "w.weights", np.float32).reshape(6, 4), table.T)


def test_blocks_are_asked_for_one_at_a_time(tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "w.weights")

    def blocks() -> Iterator[np.ndarray]:
        for number in range(4):
            assert (tmp_path / "w.weights").stat().st_size >= number * 4 * 2**20
            yield matrix(2**20)

    file.add("w", "float32", (4, 2**20), blocks())
    file.close()
