"""Vocabulary tables whose tokens are hard to tell apart, and hidden states for them, as hypothesis draws them.

`tables` gives float32 [V, H], `hidden_rows` float32 [n, H].
"""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

Floats = np.ndarray
_Maker = Callable[[np.random.Generator, int, int], Floats]


def _random(rng: np.random.Generator, count: int, width: int) -> Floats:
    return rng.standard_normal((count, width))


def _nearly_equal(rng: np.random.Generator, count: int, width: int) -> Floats:
    return rng.standard_normal(width) + 10.0 ** rng.integers(-9, -1) * rng.standard_normal((count, width))


def _clustered(rng: np.random.Generator, count: int, width: int) -> Floats:
    """Crowds of tokens that differ by less than 8 bits can tell, or by no more than float32 can."""
    centres = rng.standard_normal((count // 20 + 1, width))
    apart = 10.0 ** rng.uniform(-8, -1)
    return centres[rng.integers(0, len(centres), count)] + apart * rng.standard_normal((count, width))


def _of_all_sizes(rng: np.random.Generator, count: int, width: int) -> Floats:
    return 10.0 ** rng.uniform(-8, 6, (count, 1)) * rng.standard_normal((count, width))


def _with_duplicates(rng: np.random.Generator, count: int, width: int) -> Floats:
    return rng.standard_normal((max(1, count // 7), width))[rng.integers(0, max(1, count // 7), count)]


def _mostly_zeros(rng: np.random.Generator, count: int, width: int) -> Floats:
    return rng.standard_normal((count, width)) * (rng.random((count, width)) < 0.03)


def _signs(rng: np.random.Generator, count: int, width: int) -> Floats:
    """All entries at an end of their row's range: the largest sums of integers there are."""
    return rng.choice([-1.0, 1.0], (count, width))


def _one_loud_feature(rng: np.random.Generator, count: int, width: int) -> Floats:
    rows = rng.standard_normal((count, width))
    rows[:, rng.integers(width)] *= 1e4
    return rows


def _tiny(rng: np.random.Generator, count: int, width: int) -> Floats:
    return 1e-30 * rng.standard_normal((count, width))


def _huge(rng: np.random.Generator, count: int, width: int) -> Floats:
    return 1e12 * rng.standard_normal((count, width))


_TABLES: tuple[_Maker, ...] = (
    _random,
    _nearly_equal,
    _clustered,
    _of_all_sizes,
    _with_duplicates,
    _mostly_zeros,
    _signs,
    _one_loud_feature,
    _tiny,
    _huge,
)


@st.composite
def tables(draw: st.DrawFn) -> Floats:
    width = draw(st.sampled_from((1, 2, 3, 17, 64, 130)))
    count = draw(st.integers(33, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return draw(st.sampled_from(_TABLES))(rng, count, width).astype(np.float32)


@st.composite
def hidden_rows(draw: st.DrawFn, table: Floats) -> Floats:
    """Rows that point anywhere, along rows of the table, between two of them, or at one feature; of any size, or 0."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, width = table.shape
    first, second = rng.integers(0, count, (2, 6))
    rows = [
        *rng.standard_normal((2, width)),
        *table[first[:2]].astype(np.float64),
        table[first[2]].astype(np.float64) + table[second[2]],
        np.eye(width)[rng.integers(width)],
        rng.choice([-1.0, 1.0], width),
        np.zeros(width),
    ]
    sizes = 10.0 ** rng.uniform(-10, 10, (len(rows), 1)) if draw(st.booleans()) else 1.0
    return (np.array(rows) * sizes).astype(np.float32)
