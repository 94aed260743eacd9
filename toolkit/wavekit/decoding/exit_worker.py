"""Running one early exit: what the rows of its boundary would say if the model ended there (see `exit_spec`)."""

from time import perf_counter
from typing import NamedTuple

import numpy as np

from wavekit_engines.engine import Array, Engine


class ExitScores(NamedTuple):
    """What an exit says after some rows."""

    tokens: Array
    """int64 [n, k]: the best tokens, best first, by the target's ids."""
    logprobs: Array
    """float32 [n, k]: of the distribution over the exit vocabulary."""


class ExitWorker:
    """One exit for up to ``max_rows`` rows a run."""

    def __init__(self, engine: Engine, hidden_size: int, dtype: str, top_k: int, max_rows: int) -> None:
        self.engine_seconds = 0.0
        self.max_rows = max_rows
        self._binding = engine.bind()
        self._hidden = np.zeros((max_rows, hidden_size), dtype)
        self._scores = ExitScores(np.zeros((max_rows, top_k), np.int64), np.zeros((max_rows, top_k), np.float32))
        self._bound = 0

    def run(self, hidden: Array) -> ExitScores:
        """What it says after rows [n, H] of its boundary; overwritten by the next run."""
        count = len(hidden)
        self._hidden[:count] = hidden
        scores = ExitScores(self._scores.tokens[:count], self._scores.logprobs[:count])
        if count != self._bound:
            self._binding.bind_input("hidden", self._hidden[:count])
            self._binding.bind_output("top_tokens", scores.tokens)
            self._binding.bind_output("top_logprobs", scores.logprobs)
            self._bound = count
        start = perf_counter()
        self._binding.run()
        self.engine_seconds += perf_counter() - start
        return scores
