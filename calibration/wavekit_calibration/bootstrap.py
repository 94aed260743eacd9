"""How far the ranking of sets depends on the sequences that happened to be measured.

Sequences (not tokens: neighbours are dependent) are drawn with replacement, as many as there are, and every set is
scored on the draw: with w the number of times a token's sequence was drawn, the set's matrix becomes
sqrt(w_i w_j) M_ij scaled to trace 1. Tokens not drawn drop out, so a draw is cheaper than a full score. The token mean
and the filter's threshold stay those of all tokens (ours). Repeated tokens add no direction, so entropies of draws
lie below the full one, and so do their differences: only spreads are taken from the draws, levels from all tokens.

All sets see the same draws, which makes differences between them much more certain than each score alone.

Knows matrices and sequence numbers only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.entropy import each_on_one_thread, matrix_entropy, mean_gram
from wavekit_calibration.sets import BoundarySet


@dataclass(frozen=True)
class Bootstrap:
    """Scores of sets over draws of the sequences."""

    sets: tuple[BoundarySet, ...]
    scores: NDArray[np.float64]
    """[draws, sets], nats."""

    def standard_errors(self) -> NDArray[np.float64]:
        """[sets]: the standard deviation of each set's score over the draws."""
        return np.asarray(self.scores.std(axis=0, ddof=1))

    def wins(self, among: Sequence[int]) -> NDArray[np.float64]:
        """[len(among)]: the share of draws in which each of these sets scores highest; the earlier one wins ties."""
        winner = np.argmax(self.scores[:, list(among)], axis=1)
        return np.bincount(winner, minlength=len(among)) / len(self.scores)

    def difference_error(self, first: int, second: int) -> float:
        """Return the standard deviation over the draws of score(first) - score(second)."""
        return float((self.scores[:, first] - self.scores[:, second]).std(ddof=1))


def bootstrap_sets(
    grams: torch.Tensor,
    sequence_of: NDArray[np.int64],
    sets: Sequence[BoundarySet],
    *,
    alpha: float,
    draws: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Bootstrap | None:
    """Score the sets on ``draws`` draws of the sequences.

    Args:
        grams: [L, n, n], trace 1.
        sequence_of: [n], the sequence each token comes from.
        sets: their members index ``grams``.
        alpha: order of the entropy.
        draws: how many draws; at least 2.
        seed: of the draws.
        progress: called with sets done and sets in all.

    Returns:
        None when there are fewer than two sequences, so nothing to draw from.
    """
    names, index = np.unique(sequence_of, return_inverse=True)
    if len(names) < 2:
        return None
    counts = draw_counts(len(names), draws, seed)
    columns = []
    for done, members in enumerate(sets):
        columns.append(_scores_over_draws(mean_gram(grams, members), index, counts, alpha))
        if progress is not None:
            progress(done + 1, len(sets))
    return Bootstrap(tuple(sets), np.stack(columns, axis=1))


def draw_counts(sequences: int, draws: int, seed: int) -> NDArray[np.int64]:
    """[draws, sequences]: how often each sequence is drawn; a draw of a single distinct sequence is drawn again."""
    generator = np.random.default_rng([seed, 0xB007])
    rows: list[NDArray[np.int64]] = []
    while len(rows) < draws:
        row = np.bincount(generator.integers(sequences, size=sequences), minlength=sequences)
        if np.count_nonzero(row) > 1:
            rows.append(row)
    return np.stack(rows)


def _scores_over_draws(
    matrix: torch.Tensor, index: NDArray[np.int64], counts: NDArray[np.int64], alpha: float
) -> NDArray[np.float64]:
    """[draws]: S_alpha of one set's matrix under each draw's weights."""
    if alpha == 2.0:
        return _purity_over_draws(matrix, index, counts)

    def score(item: tuple[int, ...]) -> float:
        weights = torch.from_numpy(counts[item[0]][index]).to(matrix.device)
        drawn = weights.nonzero().squeeze(1)
        root = weights[drawn].to(matrix.dtype).sqrt()
        return matrix_entropy(matrix[drawn][:, drawn] * torch.outer(root, root), alpha)

    threads = torch.get_num_threads() if matrix.device.type == "cpu" else 1
    return np.asarray(each_on_one_thread(score, [(d,) for d in range(len(counts))], threads))


def _purity_over_draws(
    matrix: torch.Tensor, index: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """S_2 without eigenvalues: tr(M_w^2) = w' B w with B the squared entries summed by pairs of sequences."""
    groups = torch.from_numpy(np.eye(counts.shape[1])[index]).to(matrix.device)
    blocks = (groups.T @ matrix.double().square() @ groups).cpu().numpy()
    traces = counts @ (groups.T @ matrix.diagonal().double()).cpu().numpy()
    return np.asarray(-np.log(np.einsum("ds,st,dt->d", counts, blocks, counts) / traces**2))
