"""The graphs of a bundle and their rewriting in standard ONNX, run side by side, one pass after another.

Both get the same tokens, positions and rows to see; what a graph wants to know of them, by the docstrings of
`stage_graph` and `standard_graph`, is made here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from wavekit_engines.bundle import GraphInfo, Manifest, StageInfo, open_bundle
from wavekit_engines.graphs.standard_graph import write_standard_graph
from wavekit_engines.rope import rope_tables

CAPACITY = 32

Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def in_onnxruntime(graph: Path) -> Run:
    """A graph in ONNX Runtime on the CPU, as it is: its optimizer would round what goes into quantized products."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


def in_reference(graph: Path) -> Run:
    """A graph in ONNX's own evaluator, which knows bfloat16."""
    evaluator = ReferenceEvaluator(str(graph))
    return lambda feed: dict(zip(evaluator.output_names, evaluator.run(None, feed), strict=True))


class Decoding:
    """One sequence through the graphs of a bundle; ``dtype`` None runs them as they are, otherwise rewritten."""

    def __init__(self, bundle: Path, folder: Path, dtype: str | None, opened: Callable[[Path], Run] = in_onnxruntime):
        self.manifest: Manifest = open_bundle(bundle, check_hashes=False).manifest
        self.standard = dtype is not None
        self.dtype = np.dtype(dtype or self.manifest.engine.compute_dtype)
        self._bundle, self._folder, self._opened = bundle, folder, opened
        spec = self.manifest.decoder
        self.stages = [self.open(stage.graph) for stage in self.manifest.stages]
        self.head = self.open(self.manifest.head)
        shape = (1, spec.num_kv_heads, CAPACITY, spec.head_dim)
        layers = range(spec.num_layers)
        self.cache = {f"{kind}_{layer}": np.zeros(shape, self.dtype) for layer in layers for kind in ("key", "value")}
        self.positions = np.zeros(CAPACITY, np.int64)
        self.length = 0

    def open(self, info: GraphInfo) -> Run:
        source = self._bundle / info.file
        if not self.standard:
            return self._opened(source)
        path = self._folder / source.name
        write_standard_graph(source, path, self.dtype.name, CAPACITY)
        return self._opened(path)

    def begin(self, positions: Sequence[int], seen: np.ndarray) -> dict[str, np.ndarray]:
        """What all stages of a pass share; ``seen`` [S, rows so far + S]."""
        start, stop = self.length, self.length + len(positions)
        self.positions[start:stop] = positions
        self.length = stop
        hidden = np.ones((len(positions), CAPACITY), bool)
        hidden[:, :stop] = ~seen
        spec, feed = self.manifest.decoder, {"positions": np.array([positions])}
        for window in {layer.window for layer in spec.layers}:
            mask = hidden.copy()
            if window is not None:
                mask |= self.positions[start:stop, None] - self.positions[None] >= window
            if not self.standard:
                mask[:, stop:] = False  # columns that are not read
            values = np.where(mask, -np.inf, 0).astype(self.dtype)[None, None]
            feed["mask" if window is None else f"mask_{window}"] = values
        for kind, rope in spec.ropes.items():
            for part, table in zip(("cos", "sin"), rope_tables(rope, CAPACITY, False), strict=True):
                feed[f"rope_{kind}_{part}"] = table.astype(self.dtype)
        if self.standard:
            return {**feed, "first_row": np.array([start])}
        return {**feed, "last_rows": np.array([stop - 1], np.int32), "total_rows": np.array([CAPACITY], np.int32)}

    def stage(self, number: int, x: np.ndarray, shared: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Boundaries that a stage puts out for token ids [S] or hidden states [S, H]."""
        info: StageInfo = self.manifest.stages[number]
        x = x[None] if info.first == 0 else x[None].astype(self.dtype)
        feed = {**shared, **self.cache, "token_ids" if info.first == 0 else "hidden": x}
        wanted = {tensor.name for tensor in info.graph.inputs} | {"first_row"}
        found = self.stages[number]({name: array for name, array in feed.items() if name in wanted})
        self.cache |= {name.removesuffix("_out"): found.pop(name) for name in list(found) if name.endswith("_out")}
        return {name: array[0] for name, array in found.items()}

    def run(self, tokens: Sequence[int], positions: Sequence[int], seen: np.ndarray) -> dict[str, np.ndarray]:
        """All boundaries of a pass, and the logits of every row."""
        shared, x, found = self.begin(positions, seen), np.array(tokens), {}
        for number, stage in enumerate(self.manifest.stages):
            found |= self.stage(number, x, shared)
            x = found[f"boundary_{stage.last}"]
        return {**found, "logits": self.head({"hidden": x})["logits"]}


def passes(vocabulary: int, seed: int = 0) -> list[tuple[list[int], list[int], np.ndarray]]:
    """A prompt, single tokens, and trees of any shape, one upon the rows of the other: tokens, positions, seen."""
    generator = np.random.default_rng(seed)
    made, before = [], 0
    trees = [list(range(-1, 10)), [-1], [-1], [-1, 0, 0, 1, 1, 2, 5], [-1, 0, 0, 0, 3]]
    for parents in trees:
        seen = np.zeros((len(parents), before + len(parents)), bool)
        positions = []
        for row, parent in enumerate(parents):
            # A tree's rows stay in the cache, hidden from later passes but for its first branch.
            seen[row] = seen[parent] if parent >= 0 else [*committed(made), *[False] * len(parents)]
            seen[row, before + row] = True
            positions.append(int(seen[row].sum()) - 1)
        made.append((generator.integers(3, vocabulary, len(parents)).tolist(), positions, seen))
        before += len(parents)
    return made


def committed(made: list[tuple[list[int], list[int], np.ndarray]]) -> list[bool]:
    """Which rows so far the next pass sees: those that the longest branch of the last pass saw."""
    if not made:
        return []
    seen = made[-1][2]
    return seen[seen.sum(axis=1).argmax()].tolist()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    expected = expected.astype(np.float64)
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())
