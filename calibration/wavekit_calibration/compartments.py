"""Compartments: the contiguous runs of depths within which boundaries resemble each other.

Dynamic programming cuts the depths into m runs so that

    sum over runs of  (1 / |run|) * sum over i, j in the run of CKA[i, j]

is largest: the mean within-block CKA, every depth counted once (ours; the paper asks for compartments and does not
publish how they are cut). It is exact, in O(m L^2) steps.

Knows CKA matrices only, no models.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wavekit_engines.errors import MisuseError


def segment(similarity: NDArray[np.float64], count: int) -> tuple[list[range], float]:
    """Cut the indices of ``similarity`` into ``count`` contiguous runs of largest mean within-block similarity.

    Args:
        similarity: [L, L], symmetric.
        count: number of runs, 1 <= count <= L.

    Returns:
        The runs in order, and the objective divided by L (1 when every run is uniform). Ties cut earlier.

    Raises:
        MisuseError: more runs than depths, or none.
    """
    size = len(similarity)
    if not 1 <= count <= size:
        raise MisuseError(f"cannot cut {size} boundaries into {count} compartments; ask for 1 to {size}")
    gain = _block_gains(similarity)
    best = np.full((count + 1, size + 1), -np.inf)
    cut = np.zeros((count + 1, size + 1), dtype=int)
    best[0, 0] = 0.0
    for runs in range(1, count + 1):
        for stop in range(runs, size + 1):
            # rounding makes ties exact, so that the earliest cut wins whatever the summation order
            options = np.round(best[runs - 1, :stop] + gain[:stop, stop], 9)
            cut[runs, stop] = int(np.argmax(options))
            best[runs, stop] = options[cut[runs, stop]]
    edges = [size]
    for runs in range(count, 0, -1):
        edges.append(int(cut[runs, edges[-1]]))
    edges.reverse()
    return [range(a, b) for a, b in pairwise(edges)], float(best[count, size]) / size


def _block_gains(similarity: NDArray[np.float64]) -> NDArray[np.float64]:
    """gain[a, b]: the sum over i, j in a..b-1 of similarity, divided by b - a; zero where b <= a."""
    size = len(similarity)
    integral = np.zeros((size + 1, size + 1))
    integral[1:, 1:] = similarity.cumsum(axis=0).cumsum(axis=1)
    start, stop = np.meshgrid(np.arange(size + 1), np.arange(size + 1), indexing="ij")
    total = integral[stop, stop] - integral[start, stop] - integral[stop, start] + integral[start, start]
    return np.where(stop > start, total / np.maximum(stop - start, 1), 0.0)
