"""Running one stage: an engine with the buffers, the cache and the masks of one sequence.

A pass is two steps: `StageWorker.load` copies the new rows' inputs in, takes cache rows and lays out the masks;
`StageWorker.run` runs the engine. Between the two no other worker is involved, so all stages of a tick can be loaded
first and run on lanes of their own. Which rows may see which is the caller's knowledge, given as row numbers.
"""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from wavekit_engines.bundle import StageInfo
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Binding, Engine
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.rope import rope_tables

_HIDDEN = -np.inf
_MASK_COLUMNS = 64


class StageWorker:
    """One stage of one sequence: up to ``capacity`` cache rows, up to ``max_pass`` new rows a pass."""

    def __init__(
        self, engine: Engine, stage: StageInfo, spec: DecoderSpec, dtype: str, capacity: int, max_pass: int
    ) -> None:
        self.stage = stage
        self.capacity = capacity
        self.engine_seconds = 0.0
        self._spec = spec
        self._dtype = dtype
        self._binding = engine.bind()
        self._cache = KVCache(stage.last - stage.first, spec.num_kv_heads, spec.head_dim, capacity, dtype)
        self._row_positions = np.zeros(capacity, np.int64)
        self._x = np.zeros(max_pass, np.int64) if stage.first == 0 else np.zeros((max_pass, spec.hidden_size), dtype)
        self._positions = np.zeros(max_pass, np.int64)
        self._last_rows = np.zeros(1, np.int32)
        self._total_rows = np.zeros(1, np.int32)
        self._outputs = {k: np.zeros((max_pass, spec.hidden_size), dtype) for k in stage.boundaries}
        self._loaded = 0
        windows = dict.fromkeys(layer.window for layer in spec.layers[stage.first : stage.last])
        self._masks = [_Mask(self._binding, window, max_pass * capacity, dtype) for window in windows]
        self._long = False
        self._bind_fixed()

    def _bind_fixed(self) -> None:
        self._binding.bind_input("last_rows", self._last_rows)
        self._binding.bind_input("total_rows", self._total_rows)
        for index, layer in enumerate(range(self.stage.first, self.stage.last)):
            for name, rows in (
                (f"key_{layer}", self._cache.keys(index)),
                (f"value_{layer}", self._cache.values(index)),
            ):
                self._binding.bind_input(name, rows)
                self._binding.bind_output(f"{name}_out", rows)
        self._bind_rope()

    def _bind_rope(self) -> None:
        kinds = {layer.rope for layer in self._spec.layers[self.stage.first : self.stage.last]}
        for kind in kinds - {None}:
            assert kind is not None
            tables = rope_tables(self._spec.ropes[kind], self.capacity, self._long)
            for part, table in zip(("cos", "sin"), tables, strict=True):
                self._binding.bind_input(f"rope_{kind}_{part}", np.ascontiguousarray(table, self._dtype))

    @property
    def length(self) -> int:
        """Cache rows in use."""
        return self._cache.length

    def reset(self, long: bool = False) -> None:
        """Forget every row; ``long`` picks the rotary tables for long sequences (see `RopeSpec`)."""
        self._cache.length = 0
        self.engine_seconds = 0.0
        if long != self._long:
            self._long = long
            self._bind_rope()

    def load(
        self, x: Array, positions: Array, visible: Sequence[Sequence[int]] | None = None, committed: int = 0
    ) -> range:
        """Prepare a pass of S new rows and return the cache rows they take.

        Args:
            x: token ids [S] for the first stage, hidden states [S, H] for the others.
            positions: rotary positions [S].
            visible: for each new row the rows from ``committed`` on that it attends to, besides itself; they must be
                lower than its own. None: every earlier row, as in a prompt.
            committed: rows below this are seen by every new row.
        """
        count = len(positions)
        rows = self._cache.append(count)
        self._row_positions[rows.start : rows.stop] = positions
        self._x[:count] = x
        self._positions[:count] = positions
        self._last_rows[0] = rows.stop - 1
        columns = min(-(-rows.stop // _MASK_COLUMNS) * _MASK_COLUMNS, self.capacity)
        self._total_rows[0] = columns
        if count != self._loaded:
            self._bind_pass(count)
        for mask in self._masks:
            mask.lay_out(rows, columns, self._row_positions, visible, committed)
        return rows

    def _bind_pass(self, count: int) -> None:
        name = "token_ids" if self.stage.first == 0 else "hidden"
        self._binding.bind_input(name, self._x[None, :count])
        self._binding.bind_input("positions", self._positions[None, :count])
        for boundary, buffer in self._outputs.items():
            self._binding.bind_output(f"boundary_{boundary}", buffer[None, :count])
        self._loaded = count

    def run(self) -> None:
        """Run the loaded pass and wait for it."""
        start = perf_counter()
        self._binding.run()
        self.engine_seconds += perf_counter() - start

    def output(self, boundary: int) -> Array:
        """Hidden states [S, H] at a boundary this stage puts out, of the last pass; overwritten by the next."""
        rows: Array = self._outputs[boundary][: self._loaded]
        return rows

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep cache rows 0 to ``start - 1`` and, after them, ``rows`` in this order."""
        if rows and rows[-1] - start >= len(rows):
            self._row_positions[start : start + len(rows)] = self._row_positions[list(rows)]
        self._cache.keep(start, rows)


class _Mask:
    """What is added to the scores of the layers with one attention window: [1, 1, S, T], 0 or minus infinity.

    Causality by row number is the attention's own, so a continuation whose rows are all within the window needs only
    zeros. T is rounded up, since binding another shape costs more than the pass's whole host work; the attention never
    reads the columns of rows not in use.
    """

    def __init__(self, binding: Binding, window: int | None, cells: int, dtype: str) -> None:
        self._binding, self._window = binding, window
        # Pages that are not written take no memory.
        self._zeros = np.zeros(cells, dtype)
        self._cells = np.zeros(cells, dtype)
        self._bound: tuple[bool, tuple[int, ...]] | None = None

    def lay_out(
        self,
        rows: range,
        columns: int,
        row_positions: Array,
        visible: Sequence[Sequence[int]] | None,
        committed: int,
    ) -> None:
        """Write and bind the mask of a pass; arguments as for `StageWorker.load`."""
        count, window = len(rows), self._window
        beyond_window = window is not None and rows.stop > window
        written = visible is not None or beyond_window
        shape = (1, 1, count, columns)
        cells = (self._cells if written else self._zeros)[: count * columns].reshape(shape)
        if (written, shape) != self._bound:
            self._binding.bind_input(mask_name(window), cells)
            self._bound = (written, shape)
        if not written:
            return
        mask = cells[0, 0]
        mask[:] = 0
        if visible is not None:
            mask[:, committed:] = _HIDDEN
            for index, seen in enumerate(visible):
                mask[index, [*seen, rows.start + index]] = 0
        if window is not None and beyond_window:
            first_seen = row_positions[rows.start : rows.stop, None] - window + 1
            mask[:, : rows.stop][row_positions[None, : rows.stop] < first_seen] = _HIDDEN


def mask_name(window: int | None) -> str:
    """The graph input that masks the layers of this window."""
    return "mask" if window is None else f"mask_{window}"
