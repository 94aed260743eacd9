"""Running the head: logits of the rows that want them, or only each row's best token.

The best token is the one that greedy choice takes from the logits. Where the bundle has a head for greedy choice it
tells most of them for a fraction of the cost; the few rows that it leaves open get their logits.
"""

from time import perf_counter

import numpy as np
import numpy.typing as npt

from wavekit.decoding.sampling import Sampler, SamplingParams
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Binding, Engine

HEAD_ROWS = 64
"""The most rows that a worker of a decoder runs at a time."""

_MOST_SCREENED = 4  # rows; the products in 8 bits grow with every row, reading the whole table costs the same for a few
_TRIAL = 64
_LEAST_CERTAIN = 0.5


class HeadWorker:
    """The final norm and head for up to ``max_rows`` rows at a time, and the head for greedy choice if there is one."""

    def __init__(
        self, engine: Engine, spec: DecoderSpec, dtype: str, max_rows: int, greedy: Engine | None = None
    ) -> None:
        self.engine_seconds = 0.0
        self._binding = engine.bind()
        self._hidden = np.zeros((max_rows, spec.hidden_size), dtype)
        self._logits = np.zeros((max_rows, spec.vocab_size), np.float32)
        self._bound = 0
        self._sampler = Sampler(SamplingParams(), spec.vocab_size)
        self._greedy = _GreedyHead(greedy, self._hidden) if greedy is not None else None

    def run(self, hidden: Array) -> Array:
        """Logits float32 [n, V] for rows [n, H] of the last boundary; overwritten by the next call."""
        count = len(hidden)
        self._hidden[:count] = hidden
        if count != self._bound:
            self._binding.bind_input("hidden", self._hidden[:count])
            self._binding.bind_output("logits", self._logits[:count])
            self._bound = count
        self._timed(self._binding)
        logits: Array = self._logits[:count]
        return logits

    def best(self, hidden: Array) -> npt.NDArray[np.int64]:
        """Token ids int64 [n] that greedy choice takes from the logits of rows [n, H]; the lowest of equal ones.

        Raises WavekitError for logits that are not finite numbers.
        """
        greedy, count = self._greedy, len(hidden)
        if greedy is None or greedy.fails or count > _MOST_SCREENED:
            return self._best_of_logits(hidden)
        self._hidden[:count] = hidden
        self._timed(greedy.bound(count))
        tokens, open_rows = greedy.read(count)
        if open_rows.size:
            tokens[open_rows] = self._best_of_logits(hidden[open_rows])
        return tokens

    def _best_of_logits(self, hidden: Array) -> npt.NDArray[np.int64]:
        return np.array([self._sampler.choose(logits, 0) for logits in self.run(hidden)], np.int64)

    def _timed(self, binding: Binding) -> None:
        start = perf_counter()
        binding.run()
        self.engine_seconds += perf_counter() - start


class _GreedyHead:
    """Buffers of the head for greedy choice, and a count of the rows it could not tell."""

    def __init__(self, engine: Engine, hidden: Array) -> None:
        self._binding = engine.bind()
        self._hidden = hidden
        self._tokens = np.zeros(_MOST_SCREENED, np.int64)
        self._bound = self._asked = self._certain = 0

    @property
    def fails(self) -> bool:
        """Whether it leaves so many rows open that it costs more than it saves: the table's rows are too alike."""
        return self._asked >= _TRIAL and self._certain < _LEAST_CERTAIN * self._asked

    def bound(self, count: int) -> Binding:
        """The buffers for ``count`` rows."""
        if count != self._bound:
            self._binding.bind_input("hidden", self._hidden[:count])
            self._binding.bind_output("tokens", self._tokens[:count])
            self._bound = count
        return self._binding

    def read(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """The tokens of the last run, and which of its rows it left open."""
        tokens = self._tokens[:count].copy()
        open_rows = np.flatnonzero(tokens < 0)
        self._asked += count
        self._certain += count - open_rows.size
        return tokens, open_rows
