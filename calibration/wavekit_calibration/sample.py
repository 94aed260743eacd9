"""Which positions are measured: a uniform sample of bounded size, the same on every run.

Every eligible position draws a number from a generator keyed by (seed, sequence), and the S smallest win: uniform
without replacement, independent of the order in which sequences come, with memory for S positions only. Because the
texts are complete before the model is run on them, the sample is known before the pass; each position has its slot, and
a batch that is run again after an interruption writes the same slots with the same values.

Knows lengths only, neither tokens nor models.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PositionSample:
    """S sampled positions, sorted by sequence and position; the index is the slot."""

    sequence: NDArray[np.int64]
    """[S]"""
    position: NDArray[np.int64]
    """[S]"""
    order: NDArray[np.int64]
    """[S]: the slots in the order drawn; a prefix of it is a uniform sample of its own."""
    eligible: int
    """How many positions there were to choose from."""

    def __len__(self) -> int:
        """S."""
        return len(self.sequence)


def sample_positions(ranges: Iterable[tuple[int, int]], size: int, seed: int) -> PositionSample:
    """Draw at most ``size`` positions.

    Args:
        ranges: for each sequence the eligible positions start..stop-1.
        size: the most positions to draw.
        seed: of the draw.
    """
    keys = np.empty(0)
    places = np.empty((0, 2), dtype=np.int64)
    eligible = 0
    for number, (start, stop) in enumerate(ranges):
        count = max(stop - start, 0)
        eligible += count
        drawn = np.random.default_rng([seed, number]).random(count)
        here = np.stack([np.full(count, number), np.arange(start, start + count)], axis=1)
        keys, places = np.concatenate([keys, drawn]), np.concatenate([places, here])
        if len(keys) > 4 * size:
            keys, places = _smallest(keys, places, size)
    keys, places = _smallest(keys, places, size)
    by_place = np.lexsort((places[:, 1], places[:, 0]))
    places, keys = places[by_place], keys[by_place]
    return PositionSample(places[:, 0], places[:, 1], np.argsort(keys, kind="stable"), eligible)


def _smallest(
    keys: NDArray[np.float64], places: NDArray[np.int64], size: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    chosen = np.argsort(keys, kind="stable")[:size]
    return keys[chosen], places[chosen]
