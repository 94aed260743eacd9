"""Debiased CKA: how much two boundaries say the same about the same tokens.

With K and L the two Gram matrices over n tokens and their diagonals set to zero,

    HSIC_1(K, L) = [tr(K L) + (1'K1)(1'L1) / ((n-1)(n-2)) - 2 / (n-2) 1'K L1] / (n (n-3))
    CKA(K, L)    = HSIC_1(K, L) / sqrt(HSIC_1(K, K) HSIC_1(L, L))

(Song et al. 2012; Nguyen, Raghu, Kornblith 2021). The plain estimator drifts to 1 as the width grows past the number of
tokens; this one does not, and may be slightly negative for unrelated states. HSIC_1 is unbiased for any n >= 4, the
ratio is not: over several minibatches the HSIC terms are averaged *before* the ratio, which is what `HsicMean` keeps.

Invariant to rotation, scale and the order of tokens. Knows nothing of models or files.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.errors import TooFewTokensError


def hsic_terms(grams: torch.Tensor, rows_at_once: int = 64) -> NDArray[np.float64]:
    """HSIC_1 of all pairs of a stack of Gram matrices over the same tokens.

    Args:
        grams: [L, n, n], symmetric, n >= 4; the diagonals are ignored.
        rows_at_once: rows of every matrix that are held in float64 together.

    Returns:
        [L, L] float64.

    Raises:
        TooFewTokensError: n < 4, where the estimator does not exist.
    """
    count, n, _ = grams.shape
    if n < 4:
        raise TooFewTokensError(f"CKA needs at least 4 tokens and got {n}; give more or longer prompts")
    products = torch.zeros(count, count, dtype=torch.float64, device=grams.device)
    row_sums = torch.empty(count, n, dtype=torch.float64, device=grams.device)
    for start in range(0, n, rows_at_once):
        stop = min(start + rows_at_once, n)
        block = grams[:, start:stop].to(torch.float64, copy=True)
        inside = torch.arange(stop - start, device=grams.device)
        block[:, inside, inside + start] = 0.0
        row_sums[:, start:stop] = block.sum(dim=2)
        flat = block.reshape(count, -1)
        products += flat @ flat.T
    totals = row_sums.sum(dim=1)
    terms = products + torch.outer(totals, totals) / ((n - 1) * (n - 2)) - 2.0 / (n - 2) * (row_sums @ row_sums.T)
    result: NDArray[np.float64] = (terms / (n * (n - 3))).cpu().numpy()
    return result


class HsicMean:
    """HSIC terms of all pairs of boundaries, averaged over minibatches; memory does not grow with their number."""

    def __init__(self) -> None:
        """Start with no minibatch."""
        self._sum: NDArray[np.float64] | None = None
        self._batches = 0

    def add(self, grams: torch.Tensor) -> None:
        """Add one minibatch: Gram matrices [L, n, n] over its tokens."""
        terms = hsic_terms(grams)
        self._sum = terms if self._sum is None else self._sum + terms
        self._batches += 1

    def cka(self) -> NDArray[np.float64]:
        """CKA of all pairs, [L, L] float64 with ones on the diagonal; a boundary without any variance gets zeros.

        Raises:
            TooFewTokensError: no minibatch was added.
        """
        if self._sum is None:
            raise TooFewTokensError("CKA needs at least one batch of 4 tokens")
        mean = self._sum / self._batches
        scale = np.sqrt(np.clip(np.diag(mean), 0.0, None))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: NDArray[np.float64] = mean / np.outer(scale, scale)
        ratio[~np.isfinite(ratio)] = 0.0
        np.fill_diagonal(ratio, 1.0)
        return ratio


def debiased_cka(grams: torch.Tensor) -> NDArray[np.float64]:
    """CKA of all pairs of a stack [L, n, n] taken as one batch: [L, L] float64."""
    mean = HsicMean()
    mean.add(grams)
    return mean.cka()
