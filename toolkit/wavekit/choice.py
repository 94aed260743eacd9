"""The target's choice in one text: what is added to logits, what may be chosen, the draw, a record of probabilities.

Contract: called once a position, in order, with the model's logits there (see `generation.Chooser`). What is proposed
ahead plays no part, so a text is the same with speculation and without, whatever it is asked to look like.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from wavekit.decoding.sampling import Floats, Sampler, SeenTokens
from wavekit.results import TokenLogprobs


class Constraint(Protocol):
    """A shape that a text must have."""

    def forbid(self, logits: Floats) -> None:
        """Set the logits [V] of tokens that may not come next to minus infinity."""
        ...

    def advance(self, token: int) -> bool:
        """Take in the next token; whether the text is complete with it."""
        ...


class Additions:
    """What is added to the logits of a text before anything else, as OpenAI's API defines it.

    A token that was written c times gets its bias - c * frequency_penalty - (c > 0) * presence_penalty; the prompt does
    not count.
    """

    def __init__(self, vocab_size: int, bias: Mapping[int, float], frequency: float, presence: float) -> None:
        """``bias`` by token id, all of them inside the vocabulary."""
        self.logits: Floats = np.zeros(vocab_size, np.float32)
        """To be added, float32 [V]."""
        self._frequency, self._presence = frequency, presence
        self._written = set[int]()
        for token, value in bias.items():
            self.logits[token] = value

    def count(self, token: int) -> None:
        """Take in a token that was written."""
        self.logits[token] -= self._frequency if token in self._written else self._frequency + self._presence
        self._written.add(token)


class TargetChoice:
    """Chooses the tokens of one text."""

    def __init__(
        self,
        sampler: Sampler,
        prompt: Sequence[int],
        *,
        ends: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        additions: Additions | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> None:
        """None of ``ends`` is chosen among the first ``min_tokens``; ``logprobs`` as in `GenerationOptions`."""
        self._sampler, self._additions, self._constraint = sampler, additions, constraint
        self._ends = sorted(ends)
        self._first, self._min_tokens = len(prompt), min_tokens
        self._logprobs = logprobs
        self._seen = SeenTokens()
        self._seen.add(prompt)
        self._changed: Floats | None = None
        self.record: list[TokenLogprobs] = []
        """Of every token so far, if asked for."""
        self.complete_at: int | None = None
        """After how many tokens the text had its shape and could not go on."""

    def __call__(self, logits: Floats, position: int) -> int:
        """The token for ``position`` from its logits, float32 [V]."""
        token = self._sampler.choose(self._change(logits, position), position, self._seen)
        self._seen.add((token,))
        if self._additions is not None:
            self._additions.count(token)
        if self._logprobs is not None:
            self.record.append(token_logprobs(logits, token, self._logprobs))
        if self._constraint is not None and self.complete_at is None and self._constraint.advance(token):
            self.complete_at = position - self._first + 1
        return token

    def _change(self, logits: Floats, position: int) -> Floats:
        """The logits with additions, and without what may not be chosen."""
        early = position - self._first < self._min_tokens and self._ends
        constraint = self._constraint if self.complete_at is None else None
        if not early and constraint is None and self._additions is None:
            return logits
        if self._changed is None:
            self._changed = np.empty_like(logits)
        if self._additions is not None:
            np.add(logits, self._additions.logits, out=self._changed)
        else:
            np.copyto(self._changed, logits)
        if constraint is not None:
            constraint.forbid(self._changed)
        if early:
            self._changed[self._ends] = -np.inf
        return self._changed


def token_logprobs(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Log probabilities from logits float32 [V]: the token's, and the ``count`` greatest; of equals, low ids first."""
    peak = logits.max()
    norm = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    best: tuple[tuple[int, float], ...] = ()
    count = min(count, len(logits))
    if count:
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= least)
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        best = tuple((int(i), float(logits[i]) - norm) for i in ids)
    return TokenLogprobs(token, float(logits[token]) - norm, best)
