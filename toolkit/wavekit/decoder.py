"""The lattice decoder: one loop of ticks over K stages that commits what the target itself would have written.

A tick loads every stage that has nodes waiting, runs them, and commits as far as the target's choices are known. With
one stage and no proposals it is plain decoding; proposals only ever save passes, since what is committed is the choice
made from the final logits of the committed prefix. The loop knows token ids only: no text, no files.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from wavekit.lattice import Lattice, Node
from wavekit.sequence_workers import LATTICE_ROWS, SequenceWorkers, WorkerPool, switches_to_long
from wavekit.stage_worker import StageWorker
from wavekit_engines.bundle import Manifest
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Engine
from wavekit_engines.errors import ContextLengthError, MisuseError

Chooser = Callable[[Array, int], int]
"""The target's choice: logits float32 [V] for a position, and that position, to a token id."""


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
        self._engines = (*stages, head)
        self.workers = WorkerPool(manifest, stages, head)

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
        with self.workers.lent(len(prompt) + room) as workers:
            yield from _Generation(workers, self.spec, list(prompt), choose, room, stats).ticks()

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
        with self.workers.lent(len(tokens)) as workers:
            workers.reset(switches_to_long(self.spec, len(tokens)))
            return np.concatenate([workers.head.run(hidden).copy() for hidden in workers.prefill(tokens, LATTICE_ROWS)])

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines:
            engine.close()


class _Generation:
    """One text being written."""

    def __init__(
        self,
        workers: SequenceWorkers,
        spec: DecoderSpec,
        prompt: list[int],
        choose: Chooser,
        room: int,
        stats: DecodeStats,
    ) -> None:
        self._workers = workers
        self._spec = spec
        self._tokens = prompt
        self._choose = choose
        self._room = room
        self._stats = stats
        self._hidden: dict[Node, Array] = {}

    def ticks(self) -> Iterator[list[int]]:
        """Yield the tokens each tick commits; ticks that commit nothing yield nothing."""
        stats, start = self._stats, perf_counter()
        self._long = switches_to_long(self._spec, len(self._tokens))
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
        if not self._long and switches_to_long(self._spec, len(self._tokens)):
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
