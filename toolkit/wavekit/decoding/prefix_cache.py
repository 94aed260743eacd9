"""Beginnings of texts kept between generations: a prompt that begins like an earlier text need not run again that far.

A kept text is its token ids with a copy of their cache rows in every stage, and in the draft head where it was fed; the
least recently used ones go when memory ends. System prompts and chats that grow profit. Contract: texts are those of a
run without. In fp32 rows may come from any pass; where engines round activations, only rows that a prompt's own passes
made are kept, and what is left of a prompt runs in passes of two rows or more, since those agree (see `stage_worker`).
Safe to share between threads: what is kept is never changed.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavekit.decoding.sequence_workers import PREFILL_CHUNK, SequenceWorkers
from wavekit_engines.engine import Array

_LEAST = 16  # tokens; fewer are run again sooner than they are found


@dataclass(frozen=True, eq=False)
class _Kept:
    tokens: npt.NDArray[np.int64]
    rows: tuple[Array, ...]
    """Of each stage, [layers, 2, 1, kv_heads, len(tokens), head_dim]."""
    draft_rows: Array | None
    """Of the draft head, as many as were fed."""
    tables: tuple[bool, bool]
    """Whether the target and the draft ran with their rotary tables for long texts."""

    @property
    def size(self) -> int:
        """Bytes."""
        draft = self.draft_rows.nbytes if self.draft_rows is not None else 0
        return self.tokens.nbytes + draft + sum(rows.nbytes for rows in self.rows)

    def common(self, tokens: npt.NDArray[np.int64]) -> int:
        """Tokens that this text and another begin with."""
        count = min(len(tokens), len(self.tokens))
        differing = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(differing[0]) if differing.size else count


class PrefixCache:
    """What is kept for the decoder of one bundle."""

    def __init__(self, limit: int, rounds: bool) -> None:
        """Keep at most ``limit`` bytes; ``rounds`` for engines that round activations."""
        self._limit, self._rounds = limit, rounds
        self._kept: list[_Kept] = []  # the least recently used first
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(kept.size for kept in self._kept)

    def restore(self, workers: SequenceWorkers, prompt: Sequence[int]) -> int:
        """Fill workers that have just been reset with the longest beginning of ``prompt`` that is known.

        Returns:
            How many of its tokens need not run; at least one is left.
        """
        tokens: npt.NDArray[np.int64] = np.array(prompt, np.int64)
        alone = self._rounds and len(tokens) % PREFILL_CHUNK == 1  # the last row of a run without
        if alone or not workers.stages[0].restorable:
            return 0
        kept, count = self._longest(tokens, workers)
        if kept is None:
            return 0
        for stage, rows in zip(workers.stages, kept.rows, strict=True):
            stage.restore(rows[..., :count, :])
        if kept.draft_rows is not None and workers.drafting is not None:
            workers.drafting.restore(kept.draft_rows[..., :count, :])
        return count

    def store(self, workers: SequenceWorkers, text: Sequence[int], prompt_length: int) -> None:
        """Keep a text whose rows, all but the last token's, are in the workers."""
        count = min(len(text), prompt_length) - 1 if self._rounds else len(text) - 1
        tokens: npt.NDArray[np.int64] = np.array(text[:count], np.int64)
        if count < _LEAST or not workers.stages[0].restorable or self._known(tokens, workers):
            return
        draft = workers.drafting
        kept = _Kept(
            tokens,
            tuple(stage.rows[..., :count, :].copy() for stage in workers.stages),
            draft.fed_rows[..., :count, :].copy() if draft is not None else None,
            workers.tables,
        )
        if kept.size > self._limit:
            return
        with self._lock:
            self._kept = [old for old in self._kept if not _continues(kept, old)]
            self._kept.append(kept)
            while sum(old.size for old in self._kept) > self._limit:
                del self._kept[0]

    def _longest(self, tokens: npt.NDArray[np.int64], workers: SequenceWorkers) -> tuple[_Kept | None, int]:
        """The kept text that spares most tokens of a prompt, and how many."""
        best, most = None, _LEAST - 1
        with self._lock:
            for kept in self._kept:
                count = self._usable(kept, tokens, workers)
                if count > most:
                    best, most = kept, count
            if best is not None:
                self._kept.remove(best)
                self._kept.append(best)
        return best, most

    def _usable(self, kept: _Kept, tokens: npt.NDArray[np.int64], workers: SequenceWorkers) -> int:
        if kept.tables != workers.tables:
            return 0
        count = min(kept.common(tokens), len(tokens) - 1)
        if self._rounds and (len(tokens) - count) % PREFILL_CHUNK == 1:
            count -= 1
        if workers.drafting is None:
            return count
        # A row of the draft belongs to two tokens, so the last one both texts share has none that would do for both.
        fed = kept.draft_rows.shape[-2] if kept.draft_rows is not None else 0
        return min(count, kept.common(tokens) - 1, fed)

    def _known(self, tokens: npt.NDArray[np.int64], workers: SequenceWorkers) -> bool:
        """Whether a kept text goes on where this one ends, and has what the draft needs."""
        with self._lock:
            for kept in self._kept:
                fits = kept.tables == workers.tables and (workers.drafting is None or kept.draft_rows is not None)
                if fits and kept.common(tokens) == len(tokens):
                    self._kept.remove(kept)
                    self._kept.append(kept)
                    return True
        return False


def _continues(new: _Kept, old: _Kept) -> bool:
    """Whether all that an old text spares the new one spares too."""
    has_draft = old.draft_rows is None or new.draft_rows is not None
    return new.tables == old.tables and has_draft and new.common(old.tokens) == len(old.tokens)
