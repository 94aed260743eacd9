"""The draft head of a bundle run by hand, pair by pair, and its drafts on a text that is given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavekit.decoding.decoder import Decoder, DecodeStats
from wavekit.decoding.speculation import Speculation
from wavekit_engines.engine import Array


@dataclass
class Counts:
    """Passes of the target on fixed texts, the tokens they committed, and in how many the k-th drafted one was."""

    tokens: int
    passes: int
    right: list[int]

    @property
    def tau(self) -> float:
        """Tokens a pass, the bonus token counted."""
        return self.tokens / self.passes if self.passes else 1.0


def fed_rows(decoder: Decoder, tokens: Sequence[int], taps: Array) -> tuple[Array, Array, Array]:
    """Feed pairs of a text one by one.

    Args:
        decoder: the bundle's.
        tokens: the text, one more than there are pairs.
        taps: [count, taps, H], the target's states for every pair.

    Returns:
        What each pair feeds back [count, H], the best tokens after it [count, k], their log-probabilities [count, k].
    """
    dtype = decoder.manifest.engine.compute_dtype
    fed, best, logprobs = list[Array](), list[Array](), list[Array]()
    with decoder.workers.lent(len(tokens)) as workers:
        worker, _ = workers.draft()
        workers.reset(False, len(tokens))
        for row in range(len(taps)):
            scores = worker.feed([taps[row : row + 1].astype(dtype)], [tokens[row + 1]])
            fed.append(scores.states[0].astype(np.float32))
            best.append(scores.tokens[0].copy())
            logprobs.append(scores.logprobs[0].copy())
    return np.stack(fed), np.stack(best), np.stack(logprobs)


def drafted_through(decoder: Decoder, texts: Sequence[tuple[int, Sequence[int]]], depth: int) -> Counts:
    """Write given texts with chains of ``depth`` drafted tokens: each is its prompt's length and all of its tokens."""
    maker = decoder.speculator(Speculation("draft", depth=depth, top_k=1, tokens=depth, adaptive=False))
    counts = Counts(0, 0, [0] * depth)
    for prompt, tokens in texts:

        def choose(_: Array, position: int, tokens: Sequence[int] = tokens) -> int:
            return tokens[position]

        stats = DecodeStats()
        for _ in decoder.decode(tokens[:prompt], choose, len(tokens) - prompt, stats, maker):
            pass
        counts.tokens += len(tokens) - prompt - 1
        counts.passes += stats.passes
        for place, accepted in enumerate(stats.speculation.accepted_at):
            counts.right[place] += accepted
    return counts
