"""The workers of one sequence, and the pool that lends them to generations.

A set of workers holds the cache of one text: one worker a stage, one for the head, and those of the draft head and of
early exits once they are asked for. Making one binds a buffer for every layer, so finished generations leave theirs for
the next: as many as are usually out at once, since buffers that come and go on many threads leave the heap in pieces.
The lanes on which stages run at once are shared by all sets.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from wavekit.decoding.draft_worker import DraftWorker
from wavekit.decoding.exit_worker import ExitWorker
from wavekit.decoding.head_worker import HEAD_ROWS, HeadWorker
from wavekit.decoding.lanes import Lanes
from wavekit.decoding.lattice import LATTICE_ROWS
from wavekit.decoding.stage_worker import StageWorker
from wavekit.decoding.tap_rows import TapRows
from wavekit_engines.bundle import Manifest
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Engine

PREFILL_CHUNK = 512

_MIN_CAPACITY = 512


@dataclass(frozen=True)
class Engines:
    """The opened graphs of a bundle; those that not every bundle has may be None."""

    stages: Sequence[Engine]
    head: Engine
    greedy_head: Engine | None = None
    draft: Engine | None = None
    exits: Mapping[int, Engine] = field(default_factory=dict)
    """By boundary."""
    context: int | None = None
    """Tokens of a text that the engines have room for, where that is not the model's own affair."""
    rows: int | None = None
    """Nodes explored at once that they have room for."""
    rounds: bool = False
    """Whether they round activations where the bundle would not."""

    def close(self) -> None:
        """Close all of them."""
        for engine in (*self.stages, self.head, self.greedy_head, self.draft, *self.exits.values()):
            if engine is not None:
                engine.close()


class SequenceWorkers:
    """One worker a stage, and one for the head, with room for ``capacity`` cache rows."""

    def __init__(self, manifest: Manifest, engines: Engines, lanes: Lanes, capacity: int) -> None:
        spec, dtype = manifest.decoder, manifest.engine.compute_dtype
        self.capacity = capacity
        self.lanes = lanes
        self.stages = [
            StageWorker(engine, info, spec, dtype, capacity, max(PREFILL_CHUNK, LATTICE_ROWS))
            for engine, info in zip(engines.stages, manifest.stages, strict=True)
        ]
        self.head = HeadWorker(engines.head, spec, dtype, HEAD_ROWS, engines.greedy_head)
        self._manifest = manifest
        self._exit_engines = engines.exits
        self._exits: dict[int, ExitWorker] = {}
        self._draft_engine = engines.draft
        self._draft: DraftWorker | None = None
        self._taps: list[TapRows] = []
        self._least_rows = 1

    def lend(self, least_rows: int) -> None:
        """Begin another generation, whose every pass has at least so many rows, and which has no draft so far."""
        self._least_rows = least_rows
        for worker in self.stages:
            worker.least_rows = least_rows
            worker.taps = None

    def draft(self) -> tuple[DraftWorker, list[TapRows]]:
        """The worker of the draft head, and the rows of the target that it reads: for this generation they are kept."""
        info = self._manifest.draft
        assert info is not None
        assert self._draft_engine is not None
        dtype = self._manifest.engine.compute_dtype
        if self._draft is None:
            self._draft = DraftWorker(self._draft_engine, info, dtype, self.capacity, PREFILL_CHUNK)
            self._taps = [
                TapRows(boundaries, info.spec.hidden_size, PREFILL_CHUNK + 4 * LATTICE_ROWS, dtype)
                for boundaries in _tapped(self._manifest, info.spec.boundaries)
            ]
        tapping = []
        for worker, taps in zip(self.stages, self._taps, strict=True):
            if taps.boundaries:
                taps.clear()
                worker.taps = taps
                tapping.append(taps)
        return self._draft, tapping

    @property
    def drafting(self) -> DraftWorker | None:
        """The worker of the draft head, if this generation has one."""
        return self._draft if any(worker.taps is not None for worker in self.stages) else None

    @property
    def tables(self) -> tuple[bool, bool]:
        """Whether the target and the draft run with their rotary tables for long texts."""
        drafting = self.drafting
        return self.stages[0].long, drafting is not None and drafting.long

    def exits(self, boundaries: Sequence[int], rows: int) -> dict[int, ExitWorker]:
        """The workers of the exits at these boundaries, by number of their stage, for up to ``rows`` rows a run."""
        info = self._manifest.exits
        assert info is not None
        spec, dtype = self._manifest.decoder, self._manifest.engine.compute_dtype
        found = {}
        for number, stage in enumerate(self._manifest.stages):
            if stage.last in boundaries:
                worker = self._exits.get(number)
                if worker is None or worker.max_rows < rows:
                    engine = self._exit_engines[stage.last]
                    worker = self._exits[number] = ExitWorker(engine, spec.hidden_size, dtype, info.top_k, rows)
                found[number] = worker
        return found

    def reset(self, long: bool, length: int = 0) -> None:
        """Forget the text; ``long`` picks the rotary tables for long sequences, the next text has ``length`` tokens."""
        for worker in self.stages:
            worker.reset(long)
        self.head.engine_seconds = 0.0
        for exit_ in self._exits.values():
            exit_.engine_seconds = 0.0
        if self._draft is not None:
            self._draft.reset(length)

    @property
    def engine_seconds(self) -> float:
        """Time inside engine runs since the last reset."""
        stages = sum(worker.engine_seconds for worker in self.stages)
        exits = sum(worker.engine_seconds for worker in self._exits.values())
        return self.head.engine_seconds + stages + exits + self.draft_seconds

    @property
    def draft_seconds(self) -> float:
        """Time inside runs of the draft head since the last reset."""
        return self._draft.engine_seconds if self._draft is not None else 0.0

    def logits(self, hidden: Array) -> Array:
        """Logits float32 [n, V] for rows [n, H] of the last boundary; overwritten by the next call."""
        return self._by_head(self.head.run, hidden)

    def best(self, hidden: Array) -> Array:
        """The token int64 [n] of greatest logit for each row [n, H] of the last boundary, the lowest of equal ones."""
        return self._by_head(self.head.best, hidden)

    def _by_head(self, ask: Callable[[Array], Array], hidden: Array) -> Array:
        count = len(hidden)
        if count > HEAD_ROWS:
            return np.concatenate([ask(hidden[at : at + HEAD_ROWS]).copy() for at in range(0, count, HEAD_ROWS)])
        if count < self._least_rows:
            hidden = np.repeat(hidden, self._least_rows, axis=0)
        return ask(hidden)[:count]

    def prefill(
        self,
        tokens: Sequence[int],
        chunk: int = PREFILL_CHUNK,
        listen: Callable[[int, Array], None] = lambda stage, hidden: None,
    ) -> Iterator[Array]:
        """Run tokens that follow each other, ``chunk`` at a time; yields the last boundary of each chunk [S, H].

        ``listen`` is told the last boundary of every stage, by number, before the next stage runs.
        """
        start = self.stages[0].length
        for offset in range(0, len(tokens), chunk):
            x: Array = np.array(tokens[offset : offset + chunk], np.int64)
            positions = np.arange(start + offset, start + offset + len(x))
            for stage, worker in enumerate(self.stages):
                worker.load(x, positions)
                worker.run()
                x = worker.output(worker.stage.last)
                listen(stage, x)
            yield x


class WorkerPool:
    """Lends sets of workers; any number may be out at once."""

    def __init__(self, manifest: Manifest, engines: Engines, lanes: Lanes, kept: int) -> None:
        """Keep at most ``kept`` sets that nobody uses."""
        self._manifest, self._engines, self._lanes, self._kept = manifest, engines, lanes, kept
        self._free: list[SequenceWorkers] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, length: int, least_rows: int = 1, nodes: int = LATTICE_ROWS) -> Iterator[SequenceWorkers]:
        """A set with room for a text of ``length`` tokens and a lattice of ``nodes``, for the time of the block.

        Passes have at least ``least_rows`` rows, see `stage_worker`.
        """
        workers = self._take(length + max(nodes, LATTICE_ROWS))
        workers.lend(least_rows)
        try:
            yield workers
        finally:
            with self._lock:
                self._free.append(workers)
                del self._free[: -self._kept]

    def _take(self, rows: int) -> SequenceWorkers:
        with self._lock:
            fitting = [workers for workers in self._free if workers.capacity >= rows]
            if fitting:
                workers = min(fitting, key=lambda workers: workers.capacity)
                self._free.remove(workers)
                return workers
        most = self._manifest.decoder.max_positions + LATTICE_ROWS
        capacity = max(rows, min(max(_MIN_CAPACITY, 1 << (rows - 1).bit_length()), most))
        return SequenceWorkers(self._manifest, self._engines, self._lanes, capacity)


def _tapped(manifest: Manifest, boundaries: Sequence[int]) -> list[list[int]]:
    """For each stage, those of the boundaries that it is the first to put out, ascending."""
    left, tapped = {*boundaries}, list[list[int]]()
    for stage in manifest.stages:
        tapped.append(sorted(left.intersection(stage.boundaries)))
        left -= {*tapped[-1]}
    return tapped


def switches_to_long(spec: DecoderSpec, length: int) -> bool:
    """Whether a text of ``length`` tokens uses the rotary tables for long sequences (see `RopeSpec`)."""
    return any(rope.switch_length is not None and length > rope.switch_length for rope in spec.ropes.values())
