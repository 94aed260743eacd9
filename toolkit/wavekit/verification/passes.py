"""The engines of a bundle run by hand: passes of chosen rows over one text, with logits and what the cache then holds.

This is below the decoder: no lattice, no choice of tokens. `Passes` holds the buffers of one text for the time of a
block and gives them back after it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sequence_workers import SequenceWorkers, switches_to_long
from wavekit_engines.engine import Array

_HEAD_ROWS = 32


class Passes:
    """Passes over one text."""

    def __init__(self, workers: SequenceWorkers) -> None:
        self._workers = workers

    @property
    def length(self) -> int:
        """Cache rows in use."""
        return self._workers.stages[0].length

    def prompt(self, tokens: Sequence[int], last: int = 1) -> Array:
        """Run tokens as a prompt is run; the states [last, H] of the last few of them."""
        rows = list[Array]()
        for hidden in self._workers.prefill(tokens):
            rows.append(hidden[-last:].copy())
            del rows[:-2]  # a chunk may end with fewer rows than are asked for
        return np.concatenate(rows)[-last:]

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        visible: Sequence[Sequence[int]] | None = None,
        committed: int = 0,
    ) -> Array:
        """Run one pass and return the states [S, H] of its rows; arguments as for `StageWorker.load`."""
        first = self.length
        at = np.arange(first, first + len(tokens)) if positions is None else np.array(positions)
        x: Array = np.array(tokens, np.int64)
        for worker in self._workers.stages:
            worker.load(x, at, visible, committed)
            worker.run()
            x = worker.output(worker.stage.last)
        states: Array = x.copy()
        return states

    def logits(self, states: Array) -> Array:
        """Logits float32 [S, V] after states [S, H] of the last boundary."""
        rows = (states[at : at + _HEAD_ROWS] for at in range(0, len(states), _HEAD_ROWS))
        return np.concatenate([self._workers.logits(part).copy() for part in rows])

    def best(self, states: Array) -> Array:
        """The greedy choice int64 [S] after states [S, H], each asked for by itself as in decoding."""
        return np.concatenate([self._workers.best(states[row : row + 1]).copy() for row in range(len(states))])

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep cache rows below ``start`` and, after them, ``rows``."""
        for worker in self._workers.stages:
            worker.keep(start, rows)

    def cache(self, start: int, stop: int) -> Array:
        """A copy of cache rows, float32 [layers, keys and values, kv_heads, rows, head_dim]."""
        return np.concatenate(
            [worker._cache.array[:, :, 0, :, start:stop].astype(np.float32) for worker in self._workers.stages]
        )


@contextmanager
def passes(decoder: Decoder, length: int) -> Iterator[Passes]:
    """Passes over a text of up to ``length`` tokens."""
    with decoder.workers.lent(length) as workers:
        workers.reset(switches_to_long(decoder.spec, length), length)
        yield Passes(workers)


def next_logits(decoder: Decoder, tokens: Sequence[int]) -> Array:
    """Logits float32 [V] after a text, from one pass over it."""
    decoder.check_prompt(tokens)
    with passes(decoder, len(tokens)) as one:
        logits: Array = one.logits(one.prompt(tokens))[0]
        return logits


def relative(found: Array, expected: Array) -> float:
    """The largest difference over the largest expected value."""
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), np.finfo(np.float32).tiny))
