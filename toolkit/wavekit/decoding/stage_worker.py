"""Running one stage: an engine with the buffers, the cache and the masks of one sequence.

A pass is two steps: `StageWorker.load` copies the new rows' inputs in, takes cache rows and lays out the masks;
`StageWorker.run` runs the engine. Between the two no other worker is involved, so all stages of a tick can be loaded
first and run on lanes of their own. Which rows may see which is the caller's knowledge, given as row numbers.

Kernels of reduced precision round a pass of one row otherwise than passes of several, which agree among themselves.
Where texts must not depend on how many rows a pass has, ``least_rows`` is 2: a shorter pass runs with a copy of its
last row behind it, which no row sees and which takes no cache row: the next pass writes over what it left.
"""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from wavekit.decoding.masks import Mask, mask_columns
from wavekit.decoding.tap_rows import TapRows
from wavekit_engines.bundle import StageInfo
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Engine
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.rope import rope_tables


class StageWorker:
    """One stage of one sequence: up to ``capacity`` cache rows, up to ``max_pass`` new rows a pass."""

    def __init__(
        self, engine: Engine, stage: StageInfo, spec: DecoderSpec, dtype: str, capacity: int, max_pass: int
    ) -> None:
        self.stage = stage
        self.capacity = capacity
        self.engine_seconds = 0.0
        self.least_rows = 1
        self.taps: TapRows | None = None
        """Where the tapped boundaries of every pass are kept, while somebody reads them."""
        self._spec = spec
        self._dtype = dtype
        self._binding = engine.bind()
        self._cache = engine.cache(stage.last - stage.first, spec.num_kv_heads, spec.head_dim, capacity, dtype)
        self._row_positions = np.zeros(capacity, np.int64)
        self._x = np.zeros(max_pass, np.int64) if stage.first == 0 else np.zeros((max_pass, spec.hidden_size), dtype)
        self._positions = np.zeros(max_pass, np.int64)
        self._last_rows = np.zeros(1, np.int32)
        self._total_rows = np.zeros(1, np.int32)
        self._outputs = {k: np.zeros((max_pass, spec.hidden_size), dtype) for k in stage.boundaries}
        self._rows = range(0)
        self._bound = 0
        windows = dict.fromkeys(layer.window for layer in spec.layers[stage.first : stage.last])
        self._masks = [Mask(self._binding, window, max_pass * capacity, dtype) for window in windows]
        self._long = False
        self._bind_fixed()

    def _bind_fixed(self) -> None:
        self._binding.bind_input("last_rows", self._last_rows)
        self._binding.bind_input("total_rows", self._total_rows)
        for index, layer in enumerate(range(self.stage.first, self.stage.last)):
            self._binding.bind_cache(str(layer), self._cache, index)
        self._bind_rope()

    def _bind_rope(self) -> None:
        kinds = {layer.rope for layer in self._spec.layers[self.stage.first : self.stage.last]}
        for kind in kinds - {None}:
            assert kind is not None
            tables = rope_tables(self._spec.ropes[kind], self.capacity, self._long)
            for part, table in zip(("cos", "sin"), tables, strict=True):
                self._binding.bind_input(f"rope_{kind}_{part}", np.ascontiguousarray(table, self._dtype))

    @property
    def long(self) -> bool:
        """Whether it runs with the rotary tables for long sequences."""
        return self._long

    @property
    def length(self) -> int:
        """Cache rows in use."""
        return self._cache.length

    def reset(self, long: bool = False) -> None:
        """Forget every row; ``long`` picks the rotary tables for long sequences (see `RopeSpec`)."""
        self._cache.length = 0
        self.engine_seconds = 0.0
        if self.taps is not None:
            self.taps.clear()
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
        self._rows = rows = self._cache.append(count)
        self._x[:count] = x
        self._positions[:count] = positions
        if count < self.least_rows:
            self._x[count : self.least_rows] = self._x[count - 1]
            self._positions[count : self.least_rows] = positions[-1]
            count = self.least_rows
        run = range(rows.start, rows.start + count)
        self._row_positions[run.start : run.stop] = self._positions[:count]
        self._last_rows[0] = run.stop - 1
        columns = mask_columns(run.stop, self.capacity)
        self._total_rows[0] = columns
        if count != self._bound:
            self._bind_pass(count)
        for mask in self._masks:
            mask.lay_out(run, columns, self._row_positions, visible, committed)
        return rows

    def _bind_pass(self, count: int) -> None:
        name = "token_ids" if self.stage.first == 0 else "hidden"
        self._binding.bind_input(name, self._x[None, :count])
        self._binding.bind_input("positions", self._positions[None, :count])
        for boundary, buffer in self._outputs.items():
            self._binding.bind_output(f"boundary_{boundary}", buffer[None, :count])
        self._bound = count

    def run(self) -> None:
        """Run the loaded pass and wait for it."""
        start = perf_counter()
        self._binding.run()
        self.engine_seconds += perf_counter() - start
        if self.taps is not None:
            self.taps.store(self._rows, [self.output(boundary) for boundary in self.taps.boundaries])

    def output(self, boundary: int) -> Array:
        """Hidden states [S, H] at a boundary this stage puts out, of the last pass; overwritten by the next."""
        rows: Array = self._outputs[boundary][: len(self._rows)]
        return rows

    @property
    def restorable(self) -> bool:
        """Whether rows can be read and written here: they lie in the host's memory."""
        return type(self._cache) is KVCache

    @property
    def rows(self) -> Array:
        """Keys and values of the rows in use, [layers, 2, 1, kv_heads, length, head_dim]; a view."""
        rows: Array = self._cache.array[..., : self.length, :]
        return rows

    def restore(self, rows: Array) -> None:
        """Take over rows, as `rows` gives them, of the tokens at positions 0, 1, ... after a reset."""
        taken = self._cache.append(rows.shape[-2])
        self._cache.array[..., taken.start : taken.stop, :] = rows
        self._row_positions[taken.start : taken.stop] = np.arange(taken.start, taken.stop)
        if self.taps is not None:
            self.taps.skip(taken.stop)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep cache rows 0 to ``start - 1`` and, after them, ``rows`` in this order."""
        if rows and rows[-1] - start >= len(rows):
            self._row_positions[start : start + len(rows)] = self._row_positions[list(rows)]
        self._cache.keep(start, rows)
        if self.taps is not None:
            self.taps.keep(start, rows)
