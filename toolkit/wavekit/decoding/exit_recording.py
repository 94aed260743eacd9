"""What exits and the draft head say along texts that were written plainly: the records that a simulator replays.

Each text is decoded plainly; the draft is asked before every token and not heeded. Then one pass over the text tells
what every exit says where a token was about to be written. Knows no files; those are `simulation.trace`'s, in the
calibration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.draft_source import DraftSource
from wavekit.decoding.head_worker import HEAD_ROWS
from wavekit.decoding.sequence_workers import SequenceWorkers, switches_to_long
from wavekit.decoding.sources import Candidates
from wavekit.decoding.speculation import Silence
from wavekit.decoding.speculator import Speculator
from wavekit_engines.engine import Array

NOTHING = -1


@dataclass(frozen=True)
class Recording:
    """One text; entry i is what was said where its token i was about to be written."""

    written: list[int]
    candidates: Array
    """int32 [n, exits, ranks]: the best tokens of every exit, shallow to deep, best first."""
    draft: Array
    """int32 [n, depth]: the chain the draft head proposes, `NOTHING` behind its end."""


def record(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, ends: frozenset[int], draft_depth: int = 0
) -> Recording:
    """Write a text greedily and record what exits, and with ``draft_depth`` the draft head, say along it.

    Raises:
        MisuseError, ContextLengthError: as `Decoder.decode`.
    """
    listener = _Listener(draft_depth)

    def make(workers: SequenceWorkers) -> Speculator:
        listener.source = DraftSource(*workers.draft(), draft_depth, 1, draft_depth)
        return Speculator([listener])

    ticks = decoder.decode(prompt, None, max_new_tokens, None, make if draft_depth else None, ends)
    written = [token for tokens in ticks for token in tokens]
    draft = np.full((len(written), draft_depth), NOTHING, np.int32)
    for at, chain in listener.chains.items():
        draft[at - len(prompt), : len(chain)] = chain
    return Recording(written, _said_by_exits(decoder, [*prompt, *written[:-1]], len(written)), draft)


def _said_by_exits(decoder: Decoder, text: list[int], count: int) -> Array:
    """What each exit says after the last ``count`` tokens of a text."""
    parts = list[Array]()
    with decoder.workers.lent(len(text)) as workers:
        exits = workers.exits(decoder.exit_boundaries, HEAD_ROWS)
        workers.reset(switches_to_long(decoder.spec, len(text)))
        said = dict[int, Array]()

        def listen(stage: int, hidden: Array) -> None:
            if stage in exits:
                said[stage] = exits[stage].run(hidden).tokens.astype(np.int32)

        for _ in workers.prefill(text, HEAD_ROWS, listen):
            parts.append(np.stack([said[stage] for stage in sorted(exits)], axis=1))
    return np.concatenate(parts)[-count:]


@dataclass
class _Listener:
    """A source that notes what a draft proposes for each anchor, and proposes nothing."""

    depth: int
    source: DraftSource | None = None
    chains: dict[int, list[int]] = field(default_factory=dict)
    """By the position that the first token of the chain would have."""

    def follow(self, text: Sequence[int]) -> None:
        assert self.source is not None
        self.source.follow(text)

    def propose(self, candidates: Candidates, text: Sequence[int]) -> Silence | None:
        assert self.source is not None
        apart = Candidates(candidates.depth)
        reason = self.source.propose(apart, text)
        self.chains[len(text)] = apart.chain()
        return reason or "no match"

    def skip(self, text: Sequence[int]) -> None:
        assert self.source is not None
        self.source.skip(text)

    def learn(self, committed: Sequence[int]) -> None:
        assert self.source is not None
        self.source.learn(committed)
