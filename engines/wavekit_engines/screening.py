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

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Screen:
    """What `graphs.screened_head` needs of a table [V, H] besides the table.

    ``values`` int8 [H, V]: q. ``scales`` float32 [V]: t. ``errors`` float32 [V]: ||e_v|| and the float32 roundings, by
    which a logit differs from its approximation at most, per unit of ||y|| + COARSENESS ||r||. ``noise`` float32 [V]:
    by which two float32 evaluations of the logit w_v . x differ at most, per unit of ||y||. ``mean`` float32 [H]: m d.
    ``inverse`` float32 [H]: 1 / d. ``largest``: a bound of all that is multiplied with ||y||, infinite if it overflows.
    """

    values: npt.NDArray[np.int8]
    scales: Floats
    errors: Floats
    noise: Floats
    mean: Floats
    inverse: Floats
    largest: float


def screen_table(rows: Rows) -> Screen:
    """Quantize a table of float32 rows [V, H]; they are read twice, in blocks."""
    count, width = rows.shape
    mean, spread = _features(rows)
    relative = rounding_bound(width)
    mean_norm = float(np.linalg.norm(mean.astype(np.float64) * spread))
    values = np.empty((width, count), np.int8)
    scales, errors, noise = (np.empty(count, np.float32) for _ in range(3))
    start = 0
    with np.errstate(over="ignore", invalid="ignore"):  # `largest` tells
        for piece in _pieces(rows):
            part = slice(start, start := start + len(piece))
            centred = (piece - mean) * spread
            scale = np.abs(centred).max(1) / np.float32(_TOP)
            scale[scale < _SMALLEST_SCALE] = 1
            whole = np.rint(centred / scale[:, None])
            values[:, part] = whole.T
            known = whole * scale[:, None]
            lost, kept, full = _norms(centred - known), _norms(known), _norms(piece * spread)
            scales[part], noise[part] = scale, 2 * relative * full
            errors[part] = np.maximum(lost, kept / COARSENESS) + relative * (full + mean_norm + kept)
        largest = float(errors.max()) * COARSENESS + float(noise.max()) / relative + mean_norm
    grown = np.float32(1 + 2 * relative)  # the norms are float32 sums themselves
    return Screen(
        values,
        scales,
        errors * grown + _FLOOR,
        noise * grown + _FLOOR,
        mean * spread,
        1 / spread,
        largest if np.isfinite(largest) else np.inf,
    )


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
