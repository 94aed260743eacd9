"""The lattice decoder: one loop of ticks over K stages that commits what the target itself would have written.

A tick loads every stage that has nodes waiting, runs them, and commits as far as the target's choices are known. With
one stage and no proposals it is plain decoding; proposals only ever save passes, since what is committed is the choice
made from the final logits of the committed prefix. The loop knows token ids only: no text, no files.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from wavekit_engines.bundle import Manifest
from wavekit_engines.engine import Array, Engine
from wavekit_engines.errors import ContextLengthError, MisuseError

from wavekit.lattice import Lattice, Node
from wavekit.stage_worker import HeadWorker, StageWorker, switches_to_long

Chooser = Callable[[Array, int], int]
"""The target's choice: logits float32 [V] for a position, and that position, to a token id."""

PREFILL_CHUNK = 512
_MIN_CAPACITY = 512
_LATTICE_ROWS = 64  # rows beyond the text that unfinished nodes may occupy
_KEPT_SETS = 2  # workers of finished generations kept for the next ones


@dataclass
class DecodeStats:
    """Where the time of one generation went, in seconds, and how many ticks it took.

    ``prefill_seconds`` ends with the first token. ``decode_engine_seconds`` is spent inside engine runs after that.
    """

    prefill_seconds: float = 0.0
    decode_engine_seconds: float = 0.0
    ticks: int = 0


class Decoder:
    """The opened engines of a bundle. Safe to share between threads: every generation has workers of its own."""

    def __init__(self, manifest: Manifest, stages: Sequence[Engine], head: Engine) -> None:
        self.manifest = manifest
        self.spec = manifest.decoder
        self._stages = stages
        self._head = head
        self._free: list[_Workers] = []
        self._lock = threading.Lock()

    def decode(
        self, prompt: Sequence[int], choose: Chooser, max_new_tokens: int, stats: DecodeStats | None = None
    ) -> Generator[list[int], None, None]:
        """Yield committed tokens, tick by tick, until ``max_new_tokens`` or the end of the context.

        The caller ends a text early by closing the iterator. ``choose`` is called once a position, in order.

        Raises:
            MisuseError: an empty prompt, or a token id outside the vocabulary.
            ContextLengthError: the prompt leaves no room for a new token.
        """
        self.check_prompt(prompt)
        room = min(max_new_tokens, self.spec.max_positions - len(prompt))
        stats = stats if stats is not None else DecodeStats()
        workers = self._take(len(prompt) + room)
        try:
            yield from _Generation(workers, self, list(prompt), choose, room, stats).ticks()
        finally:
            self._give_back(workers)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises what `decode` raises for a prompt it cannot continue."""
        if not prompt:
            raise MisuseError("the prompt is empty; give at least one token")
        worst = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= worst < self.spec.vocab_size:
            raise MisuseError(f"token id {worst} is outside the vocabulary of {self.spec.vocab_size}")
        if len(prompt) >= self.spec.max_positions:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the model's context holds {self.spec.max_positions}; shorten it"
            )

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits float32 [len(tokens), V] at every position of a text, as `verify` and tests compare them."""
        self.check_prompt(tokens)
        workers = self._take(len(tokens))
        try:
            workers.reset(switches_to_long(list(self.spec.ropes.values()), len(tokens)))
            parts = [workers.head.run(hidden).copy() for hidden in workers.prefill(tokens, _LATTICE_ROWS)]
            return np.concatenate(parts)
        finally:
            self._give_back(workers)

    def close(self) -> None:
        """Close the engines."""
        for engine in (*self._stages, self._head):
            engine.close()

    def _take(self, length: int) -> "_Workers":
        needed = length + _LATTICE_ROWS
        with self._lock:
            fitting = [workers for workers in self._free if workers.capacity >= needed]
            if fitting:
                workers = min(fitting, key=lambda workers: workers.capacity)
                self._free.remove(workers)
                return workers
        capacity = max(_MIN_CAPACITY, 1 << (needed - 1).bit_length())
        return _Workers(self, min(capacity, self.spec.max_positions + _LATTICE_ROWS))

    def _give_back(self, workers: "_Workers") -> None:
        with self._lock:
            self._free.append(workers)
            del self._free[:-_KEPT_SETS]


class _Workers:
    """One worker a stage, and one for the head, for one sequence at a time."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        spec, dtype = decoder.spec, decoder.manifest.engine.compute_dtype
        self.capacity = capacity
        self.stages = [
            StageWorker(engine, info, spec, dtype, capacity, max(PREFILL_CHUNK, _LATTICE_ROWS))
            for engine, info in zip(decoder._stages, decoder.manifest.stages, strict=True)
        ]
        self.head = HeadWorker(decoder._head, decoder.manifest.head, spec, dtype, _LATTICE_ROWS)

    def reset(self, long: bool) -> None:
        for worker in self.stages:
            worker.reset(long)
        self.head.engine_seconds = 0.0

    @property
    def engine_seconds(self) -> float:
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


class _Generation:
    """One text being written."""

    def __init__(
        self, workers: _Workers, decoder: Decoder, prompt: list[int], choose: Chooser, room: int, stats: DecodeStats
    ) -> None:
        self._workers = workers
        self._ropes = list(decoder.spec.ropes.values())
        self._tokens = prompt
        self._choose = choose
        self._room = room
        self._stats = stats
        self._hidden: dict[Node, Array] = {}

    def ticks(self) -> Iterator[list[int]]:
        """Yield the tokens each tick commits; ticks that commit nothing yield nothing."""
        stats, start = self._stats, perf_counter()
        self._long = switches_to_long(self._ropes, len(self._tokens))
        self._workers.reset(self._long)
        committed = self._commit(self._prefill())
        stats.prefill_seconds = perf_counter() - start
        prefill_engine_seconds = self._workers.engine_seconds
        yield committed
        while self._room > 0:
            committed = self._tick()
            stats.ticks += 1
            stats.decode_engine_seconds = self._workers.engine_seconds - prefill_engine_seconds
            if committed:
                yield committed

    def _prefill(self) -> dict[Node, Array]:
        """Run the text so far; the logits after it belong to the anchor of a new lattice."""
        *_, hidden = self._workers.prefill(self._tokens)
        last, stages = len(self._tokens) - 1, len(self._workers.stages)
        self._lattice = Lattice(stages, self._tokens[-1], last, [last] * stages)
        return {self._lattice.anchor: self._workers.head.run(hidden[-1:])[0]}

    def _tick(self) -> list[int]:
        if not self._long and switches_to_long(self._ropes, len(self._tokens)):
            return self._start_over_long()
        stages, lattice = self._workers.stages, self._lattice
        passes = [(worker, nodes) for stage, worker in enumerate(stages) if (nodes := lattice.waiting(stage))]
        for worker, nodes in passes:
            self._load(worker, nodes)
        for worker, _ in passes:
            worker.run()
        logits: dict[Node, Array] = {}
        for worker, nodes in passes:
            hidden = worker.output(worker.stage.last)
            if worker is stages[-1]:
                logits = dict(zip(nodes, self._workers.head.run(hidden), strict=True))
            else:
                self._hidden.update(zip(nodes, hidden.copy(), strict=True))
        return self._commit(logits)

    def _load(self, worker: StageWorker, nodes: list[Node]) -> None:
        lattice, stage = self._lattice, nodes[0].depth
        committed = len(self._tokens) - 1
        x = (
            np.array([node.token for node in nodes])
            if stage == 0
            else np.stack([self._hidden.pop(node) for node in nodes])
        )
        alone = len(nodes) == 1 and nodes[0] is lattice.anchor
        first = worker.length
        for row, node in enumerate(nodes, first):
            node.rows.append(row)
        visible = None if alone else [lattice.visible_rows(node, stage) for node in nodes]
        worker.load(x, np.array([node.position for node in nodes]), visible, committed)

    def _commit(self, logits: dict[Node, Array]) -> list[int]:
        committed: list[int] = []
        lattice = self._lattice
        while self._room > 0 and lattice.anchor in logits:
            token = self._choose(logits[lattice.anchor], lattice.anchor.position + 1)
            committed.append(token)
            self._room -= 1
            lattice.commit(token)
        if committed:
            self._tokens += committed
            start, kept = lattice.collapse()
            for worker, rows in zip(self._workers.stages, kept, strict=True):
                worker.keep(start, rows)
            self._hidden = {node: self._hidden[node] for node in lattice.nodes if node in self._hidden}
        return committed

    def _start_over_long(self) -> list[int]:
        """The text has outgrown the short rotary tables: run it again with the long ones, as transformers does."""
        self._long = True
        engine_seconds = self._workers.engine_seconds
        self._workers.reset(True)
        self._workers.head.engine_seconds = engine_seconds
        return self._commit(self._prefill())
