"""Running the head: an engine with buffers for the rows of one sequence whose logits are wanted."""

from time import perf_counter

import numpy as np

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.engine import Array, Engine


class HeadWorker:
    """The final norm and head for up to ``max_rows`` rows at a time."""

    def __init__(self, engine: Engine, spec: DecoderSpec, dtype: str, max_rows: int) -> None:
        self.engine_seconds = 0.0
        self._binding = engine.bind()
        self._hidden = np.zeros((max_rows, spec.hidden_size), dtype)
        self._logits = np.zeros((max_rows, spec.vocab_size), np.float32)
        self._bound = 0

    def run(self, hidden: Array) -> Array:
        """Logits float32 [n, V] for rows [n, H] of the last boundary; overwritten by the next call."""
        count = len(hidden)
        self._hidden[:count] = hidden
        if count != self._bound:
            self._binding.bind_input("hidden", self._hidden[:count])
            self._binding.bind_output("logits", self._logits[:count])
            self._bound = count
        start = perf_counter()
        self._binding.run()
        self.engine_seconds += perf_counter() - start
        logits: Array = self._logits[:count]
        return logits
