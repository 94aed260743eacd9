"""From sampled hidden states to what the choice of boundaries is made from: Gram matrices, entropies, CKA.

Memory besides the model, for S sampled positions of which n pass the filter, L = N + 1 boundaries of width D. With the
defaults (S = 1536, n = 768) and 36 layers of width 4096 (L = 37):

    sampled states, float32, mapped from disk      S L D 4 B               = 1536 * 37 * 4096 * 4  = 0.93 GB
    Gram matrices, float32                         L n n 4 B               = 37 * 768 * 768 * 4    = 0.09 GB
    one boundary's states while its Gram is made   n D (4 + 8 + 8 + 4) B   = 768 * 4096 * 24       = 0.08 GB
    float64 slices for Frobenius and HSIC sums     2 * 64 L n 8 B          = 128 * 37 * 768 * 8    = 0.03 GB
    eigenvalue work space, two sets at once        about 2 * 3 n n 4 B     = 24 * 768 * 768        = 0.01 GB

about 1.2 GB, whatever the number of tokens that are streamed. Four times the tokens (S = 6144, n = 3072) take 1.4 GB of
Gram matrices and 3.7 GB of states, which are a mapped file that the system may page out.

The Gram matrices are n x n over tokens: see `entropy` for why.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.cka import HsicMean
from wavekit_calibration.entropy import SpectrumScorer, frobenius_products, gram, normalise_rows
from wavekit_calibration.measure import Progress

TOKENS_A_CKA_BATCH = 1024


@dataclass(frozen=True)
class Statistics:
    """What the searches and the report need; L = N + 1 boundaries, n tokens."""

    grams: torch.Tensor
    """[L, n, n] float32, trace 1 each."""
    entropy: NDArray[np.float64]
    """[L]: S_alpha of each boundary, nats."""
    concatenation_entropy: NDArray[np.float64]
    """[L]: S_alpha of boundaries 0..k together, nats."""
    frobenius: NDArray[np.float64]
    """[L, L]: tr(K_k K_l)."""
    cka: NDArray[np.float64]
    """[L, L]: debiased CKA."""
    scorer: SpectrumScorer
    """S_alpha of any set of boundaries."""


def gram_stack(
    rows: NDArray[np.float32], kept: NDArray[np.int64], device: torch.device, progress: Progress
) -> torch.Tensor:
    """Trace-1 Gram matrices of the kept tokens, one boundary at a time.

    Args:
        rows: [S, L, D].
        kept: [n] indices into S.
        device: where to compute and keep them.
        progress: told after every boundary.

    Returns:
        [L, n, n] float32.
    """
    count = rows.shape[1]
    grams = torch.empty(count, len(kept), len(kept), device=device)
    for k in range(count):
        states = torch.from_numpy(np.ascontiguousarray(rows[kept, k])).to(device)
        grams[k] = gram(normalise_rows(states))
        progress("comparing tokens", k + 1, count)
    return grams


def compute_statistics(grams: torch.Tensor, alpha: float, progress: Progress) -> Statistics:
    """Entropies, Frobenius products and CKA of a stack of Gram matrices [L, n, n]."""
    count, tokens, _ = grams.shape
    scorer = SpectrumScorer(grams, alpha)
    singles, prefixes = [], []
    for k in range(count):
        singles += scorer([(k,)])
        prefixes += scorer([tuple(range(k + 1))])
        progress("entropy by depth", k + 1, count)
    hsic = HsicMean()
    batches = -(-tokens // TOKENS_A_CKA_BATCH)
    for b in range(batches):
        # every batches-th token: neighbours of one sequence are spread over the batches
        hsic.add(grams[:, b::batches, b::batches])
    return Statistics(grams, np.asarray(singles), np.asarray(prefixes), frobenius_products(grams), hsic.cka(), scorer)
