"""Matrix entropy of hidden states: how many directions the tokens' states spread over.

For states Z (one row a token, see `grams`) and K = Z Z^T, with p the eigenvalues of K / tr(K):

    S_alpha = log(sum p^alpha) / (1 - alpha),      S_1 = -sum p log p      (natural log)

exp(S_1) reads as an effective number of directions. A *set* of boundaries has the entropy of the mean of its members'
trace-1 Gram matrices; that mean is the Gram matrix of the concatenation of the members, each scaled to the same total
variance, whereas a raw concatenation would collapse onto the member with the largest norm.

The matrices are n x n over tokens, not D x D over features: both have the same non-zero eigenvalues for one boundary,
but only over tokens do the boundaries of a set share one basis, so that their matrices can be averaged. Memory is
therefore (N + 1) n^2 floats whatever the width.

alpha = 2 needs no eigenvalues: tr(M^2) of a mean M of Gram matrices is the mean of their pairwise Frobenius products,
so one (N + 1) x (N + 1) matrix (`frobenius_products`) scores every set of every size.

Also here: the entropy of next-token distributions, by which tokens are filtered. Knows nothing of models or files.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from wavekit_calibration.sets import BoundarySet
from wavekit_engines.errors import MisuseError


def normalise_rows(states: torch.Tensor) -> torch.Tensor:
    """Subtract the token mean, then scale every row to length 1 (ours; the paper does not say).

    Without the first the mean direction, shared by all tokens, takes most of the spectrum; without the second a few
    tokens of large norm do. The mean is taken in float64. A row equal to the mean stays zero.

    Args:
        states: [n, D], any float dtype.

    Returns:
        [n, D] float32 (float64 stays float64).
    """
    kind = torch.float64 if states.dtype == torch.float64 else torch.float32
    centred = (states.double() - states.double().mean(dim=0, keepdim=True)).to(kind)
    return torch.nn.functional.normalize(centred, dim=1, eps=torch.finfo(kind).tiny)


def gram(rows: torch.Tensor) -> torch.Tensor:
    """K / tr(K) with K = Z Z^T: [n, D] -> [n, n], trace 1. Negative entries are kept: they are part of K.

    Rows that are all zero (every token had the same state) count as n times the same direction: entropy 0.
    """
    product = rows @ rows.T
    trace = product.diagonal().sum(dtype=torch.float64)
    if float(trace) <= 0.0:
        return torch.full_like(product, 1.0 / len(rows))
    return product / trace.to(product.dtype)


def entropy_of_spectrum(eigenvalues: torch.Tensor, alpha: float) -> float:
    """S_alpha in nats of a spectrum [n], scaled to sum 1.

    Values under 8 machine epsilons of the largest are rounding and count as zero: for alpha < 1 they would add up.
    """
    if not (alpha > 0.0 and np.isfinite(alpha)):
        raise MisuseError(f"alpha must be a positive number, got {alpha}")
    p = eigenvalues[eigenvalues > 8 * torch.finfo(eigenvalues.dtype).eps * eigenvalues.max()].double()
    p = p / p.sum()
    if alpha == 1.0:
        return float(-(p * p.log()).sum())
    return float(torch.logsumexp(alpha * p.log(), dim=0) / (1.0 - alpha))


def matrix_entropy(matrix: torch.Tensor, alpha: float = 1.0) -> float:
    """S_alpha in nats of a symmetric positive semi-definite matrix [n, n]; its trace need not be 1."""
    return entropy_of_spectrum(torch.linalg.eigvalsh(matrix), alpha)


def mean_gram(grams: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    """The mean [n, n] of the members of a stack [L, n, n] of trace-1 Gram matrices."""
    return grams[list(members)].mean(dim=0)


def frobenius_products(grams: torch.Tensor, rows_at_once: int = 64) -> NDArray[np.float64]:
    """tr(K_k K_l) for all pairs of a stack of Gram matrices.

    Args:
        grams: [L, n, n], symmetric.
        rows_at_once: rows of every matrix that are held in float64 together.

    Returns:
        [L, L] float64, summed in float64.
    """
    total = torch.zeros(len(grams), len(grams), dtype=torch.float64, device=grams.device)
    for start in range(0, grams.shape[1], rows_at_once):
        flat = grams[:, start : start + rows_at_once].reshape(len(grams), -1).double()
        total += flat @ flat.T
    products: NDArray[np.float64] = total.cpu().numpy()
    return products


class PurityScorer:
    """S_2 of any set from one [L, L] matrix of Frobenius products: -log of the mean over pairs of members."""

    def __init__(self, products: NDArray[np.float64]) -> None:
        """Take `frobenius_products` of trace-1 Gram matrices."""
        self._products = products

    def __call__(self, sets: Sequence[BoundarySet]) -> list[float]:
        """Return S_2 of each set, whose members index the matrix."""
        return [float(-np.log(self._products[np.ix_(s, s)].mean())) for s in sets]


class SpectrumScorer:
    """S_alpha of any set by the eigenvalues of its mean Gram matrix; remembers what it has scored.

    One set costs one n x n symmetric eigenvalue problem (about n^3 operations; 0.05 s for n = 768 on one core). On a
    CPU several sets are solved at once, one thread each: LAPACK gains nothing from two threads on matrices this small.
    """

    def __init__(self, grams: torch.Tensor, alpha: float = 1.0, threads: int | None = None) -> None:
        """Take trace-1 Gram matrices [L, n, n] on any device; ``threads`` None: as many as torch uses."""
        self._grams = grams
        self._alpha = alpha
        self._threads = threads or torch.get_num_threads()
        self._known: dict[BoundarySet, float] = {}

    def __call__(self, sets: Sequence[BoundarySet]) -> list[float]:
        """Return S_alpha of each set, whose members index the stack."""
        missing = [s for s in dict.fromkeys(sets) if s not in self._known]
        scores = each_on_one_thread(self._score, missing, self._threads if self._grams.device.type == "cpu" else 1)
        self._known.update(zip(missing, scores, strict=True))
        return [self._known[s] for s in sets]

    def _score(self, members: BoundarySet) -> float:
        return matrix_entropy(mean_gram(self._grams, members), self._alpha)


def each_on_one_thread(task: Callable[[BoundarySet], float], items: Sequence[BoundarySet], threads: int) -> list[float]:
    """Run ``task`` on every item, ``threads`` items at a time, with torch limited to one thread inside each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if threads <= 1 or len(items) < 2:
            return [task(item) for item in items]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(task, items))
    finally:
        torch.set_num_threads(before)


def next_token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the softmax of logits [P, V]: [P] float64."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1, dtype=torch.float64)
