"""A vocabulary table in 8 bits, with a proof of how far each logit it gives may be from the true one.

With w_v a row of the table and x a row after the final norm, every row is stored as w_v = m + (t_v q_v + e_v) / d: m
the mean row, d a power of two for each feature that evens out the features' spread, q_v integers from -127 to 127, e_v
what rounding left. The mean moves all logits of x alike, so their order is that of (w_v - m) . x = (t_v q_v + e_v) . y
with y = x / d. Cauchy and Schwarz bound what is not known: |e_v . y| <= ||e_v|| ||y||.

y becomes integers too, two digits of base ``DIGIT`` a feature: y = s (DIGIT a + b) + r with a and b from -HALF to
HALF, s = max |y| / STEPS and |r| <= RESIDUE s, which adds ||t_v q_v|| ||r|| to the bound. The products of integers are
exact: the digits are 7 bits wide so that kernels that add pairs of products in 16 bits cannot saturate.

Everything else is float32, u = 2^-24. A sum of n products in any order is off by at most n u / (1 - n u) times the sum
of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), which Cauchy and Schwarz
bound again by ||w_v d|| ||y||. ``_EXTRA_TERMS`` more terms stand for the few roundings around such a sum.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from wavekit_engines.graphs.linear import Rows, row_blocks

Floats = npt.NDArray[np.float32]

DIGIT = 127
HALF = 63
STEPS = HALF * DIGIT + HALF
RESIDUE = 0.505
"""Bound of |r| / s: rounding to the nearest integer, and the roundings before it."""

COARSENESS = 120
"""``Screen.errors`` is at least ||t_v q_v|| over this, so that ||r|| can be weighed with it: about what 8 bits give."""

_UNIT = 2.0**-24
_EXTRA_TERMS = 32
_TOP = 127
_PIECE = 1024  # rows that are quantized at a time, within the cache
_WIDEST = 10  # exponents of d
_FLOOR = np.float32(1e-16)  # far below any weight, far above what float32 loses to underflow
_SMALLEST_SCALE = np.float32(1e-30)


class Screen:
    """What `graphs.screened_head` needs of a table of rows [V, H] besides the table.

    ``mean`` float32 [H]: m d. ``inverse`` float32 [H]: 1 / d. The rest is there once `values` has run through:
    ``scales`` float32 [V]: t. ``errors`` float32 [V]: by how much a logit differs from its approximation at most,
    float32 included, per unit of ||y|| + COARSENESS ||r||. ``noise`` float32 [V]: by how much two float32 evaluations
    of the logit w_v . x differ at most, per unit of ||y||. ``largest``: bounds all that is multiplied with ||y||,
    infinite where float32 cannot hold it.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        count, width = rows.shape
        self._mean, self._spread = _features(rows)
        self.mean, self.inverse = self._mean * self._spread, 1 / self._spread
        self.scales, self.errors, self.noise = (np.empty(count, np.float32) for _ in range(3))
        self.largest = math.inf
        self._relative = rounding_bound(width)

    def values(self) -> Iterator[npt.NDArray[np.int8]]:
        """q, in blocks of rows."""
        start, largest = 0, 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # `largest` tells
            for piece in _pieces(self._rows):
                part = slice(start, start := start + len(piece))
                yield self._quantize(piece, part)
                largest = max(largest, *(float(bounds[part].max()) for bounds in (self.errors, self.noise)))
        # Relative to what they bound, the errors are at least 1 / COARSENESS, the noise 2 * relative.
        largest *= max(COARSENESS, 1 / self._relative)
        self.largest = largest if np.isfinite([self.errors, self.noise]).all() else math.inf

    def _quantize(self, piece: Floats, part: slice) -> npt.NDArray[np.int8]:
        centred = (piece - self._mean) * self._spread
        scale = np.abs(centred).max(1) / np.float32(_TOP)
        scale[scale < _SMALLEST_SCALE] = 1
        whole = np.rint(centred / scale[:, None])
        known = whole * scale[:, None]
        lost, kept, full = _norms(centred - known), _norms(known), _norms(piece * self._spread)
        sums = self._relative * (full + _norms(self.mean[None]) + kept)
        grown = np.float32(1 + 2 * self._relative)  # the norms are float32 sums themselves
        self.scales[part] = scale
        self.errors[part] = (np.maximum(lost, kept / COARSENESS) + sums) * grown + _FLOOR
        self.noise[part] = 2 * self._relative * full * grown + _FLOOR
        values: npt.NDArray[np.int8] = whole.astype(np.int8)
        return values


def rounding_bound(width: int) -> float:
    """How far a float32 sum of ``width`` products may be off, relative to the sum of their magnitudes."""
    terms = (width + _EXTRA_TERMS) * _UNIT
    return terms / (1 - terms)


def _features(rows: Rows) -> tuple[Floats, Floats]:
    """The mean row, and d: powers of two, inverse to the spread of each feature."""
    count, width = rows.shape
    total, squares = np.zeros(width), np.zeros(width)
    for piece in _pieces(rows):
        total += piece.sum(0, dtype=np.float64)
        squares += np.square(piece, dtype=np.float64).sum(0)
    mean = total / count
    spread = np.sqrt(np.maximum(squares / count - mean**2, 0))
    typical = float(np.median(spread)) or 1.0
    with np.errstate(divide="ignore"):
        exponents = np.rint(np.log2(typical / spread))
    return mean.astype(np.float32), np.exp2(np.clip(exponents, -_WIDEST, _WIDEST)).astype(np.float32)


def _pieces(rows: Rows) -> Iterator[Floats]:
    for block in row_blocks(rows):
        for start in range(0, len(block), _PIECE):
            yield block[start : start + _PIECE]


def _norms(rows: Floats) -> Floats:
    squares: Floats = np.einsum("ij,ij->i", rows, rows)
    return np.sqrt(squares)
