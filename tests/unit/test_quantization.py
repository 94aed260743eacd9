"""Quantized blocks against float64 arithmetic: what is exact is exact, and the error of the rest has a bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from wavekit_engines.quantization import BLOCK_SIZES, bits_of, dequantize_rows, quantize_rows

BITS = (4, 8)
WIDTHS = st.sampled_from([1, 7, 16, 33, 64, 100])


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.tuples(st.integers(1, 3), WIDTHS))
    kind = draw(st.sampled_from(["normal", "any"]))
    if kind == "normal":
        return np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(shape).astype(np.float32)
    return draw(npst.arrays(np.float32, shape, elements=st.floats(-1e4, 1e4, width=32)))


def blocks_of(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows [N, K] in float64, cut into blocks [N, blocks, size] behind zeros."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // size) * size))
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(len(rows), -1, size)


def round_trip(rows: np.ndarray, bits: int, size: int) -> np.ndarray:
    return dequantize_rows(quantize_rows(rows, bits, size), bits, rows.shape[1])


@pytest.mark.parametrize("bits", BITS)
@given(rows=matrices(), size=st.sampled_from(BLOCK_SIZES))
def test_an_error_is_at_most_one_step_of_the_block(bits: int, rows: np.ndarray, size: int) -> None:
    largest = np.abs(blocks_of(rows, size)).max(-1, keepdims=True)
    step = largest / 2 ** (bits - 1)
    error = np.abs(blocks_of(round_trip(rows, bits, size), size) - blocks_of(rows, size))
    # Nothing is further off than half a step, but what a shrunk scale or the shorter end of the range cuts off.
    cut_off = largest * (0.15 if bits == 4 else 0)
    assert (error <= np.maximum(step, cut_off + step / 2) * (1 + 1e-6) + 1e-37).all()


@pytest.mark.parametrize("bits", BITS)
@given(rows=matrices(), size=st.sampled_from(BLOCK_SIZES))
def test_no_block_is_worse_than_plain_rounding_around_its_largest_entry(bits: int, rows: np.ndarray, size: int) -> None:
    exact, middle = blocks_of(rows, size), 2 ** (bits - 1)
    largest = np.take_along_axis(exact, np.abs(exact).argmax(-1)[..., None], -1)
    scale = -largest / middle
    steps = np.divide(exact, scale, out=np.zeros_like(exact), where=scale != 0)
    plain = np.clip(np.rint(steps), -middle, middle - 1) * scale
    found = blocks_of(round_trip(rows, bits, size), size)
    errors, plain_errors = (np.sqrt(((values - exact) ** 2).sum(-1)) for values in (found, plain))
    rounding = np.sqrt(size) * np.finfo(np.float32).eps * np.abs(largest[..., 0])  # of scales and products in float32
    assert (errors <= plain_errors * (1 + 1e-5) + rounding + 1e-35).all()


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_values_on_a_grid_that_uses_its_longer_end_are_exact(bits: int, size: int) -> None:
    generator = np.random.default_rng(size)
    steps = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 3, size))
    steps[..., generator.integers(size)] = -(2 ** (bits - 1))
    scales = (generator.standard_normal((5, 3, 1)) * 10.0 ** generator.integers(-6, 3, (5, 3, 1))).astype(np.float32)
    rows = (steps.astype(np.float32) * scales).reshape(5, -1)
    np.testing.assert_array_equal(round_trip(rows, bits, size), rows)


@pytest.mark.parametrize("bits", BITS)
@given(rows=matrices(), size=st.sampled_from(BLOCK_SIZES))
def test_the_sign_of_a_matrix_makes_no_difference(bits: int, rows: np.ndarray, size: int) -> None:
    np.testing.assert_array_equal(round_trip(-rows, bits, size), -round_trip(rows, bits, size))


@pytest.mark.parametrize("bits", BITS)
@given(rows=matrices(), size=st.sampled_from(BLOCK_SIZES))
def test_a_last_block_that_is_not_full_is_one_with_zeros(bits: int, rows: np.ndarray, size: int) -> None:
    padded = blocks_of(rows, size).reshape(len(rows), -1).astype(np.float32)
    short, full = quantize_rows(rows, bits, size), quantize_rows(padded, bits, size)
    np.testing.assert_array_equal(short.values, full.values)
    np.testing.assert_array_equal(short.scales, full.scales)


@pytest.mark.parametrize("bits", BITS)
def test_a_block_of_zeros_stays_zero_beside_others(bits: int) -> None:
    rows = np.ones((2, 64), np.float32)
    rows[0, :32] = 0
    assert (round_trip(rows, bits, 32)[0, :32] == 0).all()
    assert (round_trip(np.zeros((2, 64), np.float32), bits, 32) == 0).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-38, 1e-37, 1e18])
@pytest.mark.parametrize("bits", BITS)
def test_blocks_at_the_ends_of_float32_are_quantized_without_a_warning(bits: int, largest: float) -> None:
    rows = (np.linspace(-1, 1, 64) * largest).astype(np.float32)[None]
    with np.errstate(all="raise", under="ignore"):
        found = round_trip(rows, bits, 32)
    assert (np.abs(found.astype(np.float64) - rows) <= largest / 2 ** (bits - 1) + 1.3e-37).all()


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_layout_is_that_of_matmulnbits(size: int) -> None:
    """Blocks of unsigned bytes, of two values each at 4 bits, the earlier in the lower half; one scale a block."""
    rows = np.random.default_rng(1).standard_normal((3, 2 * size)).astype(np.float32)
    four, eight = quantize_rows(rows, 4, size), quantize_rows(rows, 8, size)
    assert (four.values.dtype, four.values.shape) == (np.uint8, (3, 2, size // 2))
    assert (eight.values.dtype, eight.values.shape) == (np.uint8, (3, 2, size))
    assert four.scales.dtype == eight.scales.dtype == np.float32
    assert four.scales.shape == eight.scales.shape == (3, 2)
    for row, block, column in np.ndindex(3, 2, size):
        byte = int(four.values[row, block, column // 2])
        value = (byte >> 4 if column % 2 else byte & 15) - 8
        expected = np.float32(value) * four.scales[row, block]
        assert dequantize_rows(four, 4, 2 * size)[row, block * size + column] == expected
        wide = np.float32(int(eight.values[row, block, column]) - 128) * eight.scales[row, block]
        assert dequantize_rows(eight, 8, 2 * size)[row, block * size + column] == wide


def test_the_largest_entry_of_a_block_lands_on_the_end_of_the_range() -> None:
    rows = np.random.default_rng(2).standard_normal((50, 32)).astype(np.float32)
    values = quantize_rows(rows, 8, 32).values[:, 0]
    assert (values[np.arange(50), np.abs(rows).argmax(1)] == 0).all()


def test_only_int_precisions_have_bits() -> None:
    assert [bits_of(precision) for precision in ("fp32", "fp16", "int8", "int4")] == [None, None, 8, 4]
