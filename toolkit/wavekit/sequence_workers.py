"""The workers of one sequence, and the pool that lends them to generations.

A set of workers holds the cache of one text: one worker a stage and one for the head. Making one binds a buffer for
every layer, so finished generations leave theirs for the next.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from wavekit.head_worker import HeadWorker
from wavekit.stage_worker import StageWorker
from wavekit_engines.bundle import Manifest
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Engine

PREFILL_CHUNK = 512
LATTICE_ROWS = 64
"""Rows beyond the committed text that unfinished nodes may occupy, and the most rows a pass through the head has."""

_MIN_CAPACITY = 512
_KEPT = 2


class SequenceWorkers:
    """One worker a stage, and one for the head, with room for ``capacity`` cache rows."""

    def __init__(self, manifest: Manifest, stages: Sequence[Engine], head: Engine, capacity: int) -> None:
        spec, dtype = manifest.decoder, manifest.engine.compute_dtype
        self.capacity = capacity
        self.stages = [
            StageWorker(engine, info, spec, dtype, capacity, max(PREFILL_CHUNK, LATTICE_ROWS))
            for engine, info in zip(stages, manifest.stages, strict=True)
        ]
        self.head = HeadWorker(head, spec, dtype, LATTICE_ROWS)

    def reset(self, long: bool) -> None:
        """Forget the text; ``long`` picks the rotary tables for long sequences."""
        for worker in self.stages:
            worker.reset(long)
        self.head.engine_seconds = 0.0

    @property
    def engine_seconds(self) -> float:
        """Time inside engine runs since the last reset."""
        return self.head.engine_seconds + sum(worker.engine_seconds for worker in self.stages)

    def prefill(self, tokens: Sequence[int], chunk: int = PREFILL_CHUNK) -> Iterator[Array]:
        """Run tokens that follow each other, ``chunk`` at a time; yields the last boundary of each chunk [S, H]."""
        start = self.stages[0].length
        for offset in range(0, len(tokens), chunk):
            x: Array = np.array(tokens[offset : offset + chunk], np.int64)
            positions = np.arange(start + offset, start + offset + len(x))
            for worker in self.stages:
                worker.load(x, positions)
                worker.run()
                x = worker.output(worker.stage.last)
            yield x


class WorkerPool:
    """Lends sets of workers; any number may be out at once."""

    def __init__(self, manifest: Manifest, stages: Sequence[Engine], head: Engine) -> None:
        self._manifest, self._stages, self._head = manifest, stages, head
        self._free: list[SequenceWorkers] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, length: int) -> Iterator[SequenceWorkers]:
        """A set with room for a text of ``length`` tokens and its lattice, for the time of the block."""
        workers = self._take(length + LATTICE_ROWS)
        try:
            yield workers
        finally:
            with self._lock:
                self._free.append(workers)
                del self._free[:-_KEPT]

    def _take(self, rows: int) -> SequenceWorkers:
        with self._lock:
            fitting = [workers for workers in self._free if workers.capacity >= rows]
            if fitting:
                workers = min(fitting, key=lambda workers: workers.capacity)
                self._free.remove(workers)
                return workers
        capacity = min(
            max(_MIN_CAPACITY, 1 << (rows - 1).bit_length()), self._manifest.decoder.max_positions + LATTICE_ROWS
        )
        return SequenceWorkers(self._manifest, self._stages, self._head, capacity)


def switches_to_long(spec: DecoderSpec, length: int) -> bool:
    """Whether a text of ``length`` tokens uses the rotary tables for long sequences (see `RopeSpec`)."""
    return any(rope.switch_length is not None and length > rope.switch_length for rope in spec.ropes.values())
