"""Matrix entropy against closed forms, a float64 reference written from the formulas, and its invariances."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wavekit_calibration.entropy import (
    PurityScorer,
    SpectrumScorer,
    entropy_of_spectrum,
    frobenius_products,
    gram,
    matrix_entropy,
    mean_gram,
    next_token_entropy,
    normalise_rows,
)
from wavekit_engines.errors import MisuseError

ALPHAS = [0.5, 0.999, 1.0, 1.001, 2.0, 5.0]

states = hnp.arrays(
    np.float64,
    st.tuples(st.integers(4, 12), st.integers(2, 9)),
    elements=st.floats(-4, 4, width=32),
    fill=st.nothing(),
).filter(lambda z: np.linalg.norm(z - z.mean(axis=0), axis=1).min() > 1e-2)


def reference(z: np.ndarray, alpha: float) -> float:
    """S_alpha of raw states by singular values over features, all in float64: no Gram matrix of tokens anywhere."""
    z = z.astype(np.float64) - z.astype(np.float64).mean(axis=0)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    return reference_of_rows(z, alpha)


def reference_of_rows(z: np.ndarray, alpha: float) -> float:
    p = np.linalg.svd(z, compute_uv=False) ** 2
    p = p[p > 1e-14 * p.max()] / p.sum()
    if alpha == 1.0:
        return float(-(p * np.log(p)).sum())
    return float(np.log((p**alpha).sum()) / (1 - alpha))


def measured(z: np.ndarray, alpha: float) -> float:
    return matrix_entropy(gram(normalise_rows(torch.from_numpy(z))), alpha)


def random_grams(count: int, n: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, width, generator=generator, dtype=dtype) @ torch.randn(width, width, dtype=dtype,
            generator=generator) for _ in range(count)]  # fmt: skip
    return torch.stack([gram(normalise_rows(z)) for z in rows])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equal_eigenvalues_give_the_logarithm_of_their_number(alpha: float) -> None:
    assert matrix_entropy(torch.eye(7), alpha) == pytest.approx(np.log(7), abs=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_rank_one_has_no_entropy(alpha: float) -> None:
    v = torch.randn(9, 1, generator=torch.Generator().manual_seed(0))
    assert matrix_entropy(v @ v.T, alpha) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_blocks_of_identical_tokens_count_as_one_direction_each(alpha: float) -> None:
    block = torch.kron(torch.eye(4, dtype=torch.float64), torch.ones(5, 5, dtype=torch.float64))
    assert matrix_entropy(block, alpha) == pytest.approx(np.log(4), abs=1e-6)


def test_opposite_tokens_lie_in_one_direction() -> None:
    """Negative entries of the Gram matrix are part of it: clamping them would report two directions."""
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert matrix_entropy(gram(z)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("n", "width"), [(6, 40), (40, 6)])
def test_agrees_with_singular_values(alpha: float, n: int, width: int) -> None:
    z = np.random.default_rng(1).normal(size=(n, width)) * np.linspace(0.1, 3, width) + 5.0
    assert measured(z, alpha) == pytest.approx(reference(z, alpha), abs=1e-8)


def test_float32_states_are_as_good_as_float64_ones() -> None:
    z = np.random.default_rng(2).normal(size=(60, 30)) * 50 + 1000.0
    assert measured(z.astype(np.float32), 1.0) == pytest.approx(reference(z.astype(np.float32), 1.0), abs=1e-4)


@given(states)
def test_one_is_the_limit_of_its_neighbours(z: np.ndarray) -> None:
    near = [measured(z, 1.0 - 1e-6), measured(z, 1.0 + 1e-6)]
    assert near == pytest.approx([measured(z, 1.0)] * 2, abs=1e-4)


@given(states)
def test_falls_with_alpha(z: np.ndarray) -> None:
    values = [measured(z, alpha) for alpha in ALPHAS]
    assert all(a >= b - 1e-9 for a, b in pairwise(values))


@given(states, st.floats(0.01, 100), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 1.0, 2.0]))
def test_does_not_see_rotation_scale_shift_and_order(z: np.ndarray, scale: float, seed: int, alpha: float) -> None:
    generator = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(generator.normal(size=(z.shape[1], z.shape[1])))
    shift = generator.normal(size=z.shape[1])
    moved = (scale * z @ rotation + shift)[generator.permutation(len(z))]
    assert measured(moved, alpha) == pytest.approx(measured(z, alpha), abs=1e-5)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_set_is_the_concatenation_of_its_equally_scaled_members(alpha: float) -> None:
    generator = np.random.default_rng(3)
    members = [generator.normal(size=(20, width)) * size for width, size in ((5, 1.0), (9, 100.0), (30, 0.01))]
    rows = [normalise_rows(torch.from_numpy(z)) for z in members]
    concatenated = np.concatenate([r.numpy() for r in rows], axis=1)
    stack = torch.stack([gram(r) for r in rows])
    assert SpectrumScorer(stack, alpha)([(0, 1, 2)])[0] == pytest.approx(
        reference_of_rows(concatenated, alpha), abs=1e-8
    )


def test_a_loud_member_does_not_drown_the_others() -> None:
    quiet, loud = np.random.default_rng(4).normal(size=(2, 20, 6))
    stack = torch.stack([gram(normalise_rows(torch.from_numpy(z))) for z in (quiet, loud * 1e4)])
    same = torch.stack([gram(normalise_rows(torch.from_numpy(z))) for z in (quiet, loud)])
    assert SpectrumScorer(stack)([(0, 1)]) == pytest.approx(SpectrumScorer(same)([(0, 1)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_ways_to_the_entropy_of_order_two_agree(dtype: torch.dtype) -> None:
    stack = random_grams(6, 50, 30, dtype=dtype)
    sets = [(0,), (1, 4), (0, 2, 5), (0, 1, 2, 3, 4, 5)]
    fast = PurityScorer(frobenius_products(stack))(sets)
    assert fast == pytest.approx(SpectrumScorer(stack, 2.0)(sets), abs=1e-6)


def test_frobenius_products_are_traces_of_products() -> None:
    stack = random_grams(4, 70, 8)
    expected = np.einsum("kij,lji->kl", stack.numpy(), stack.numpy())
    np.testing.assert_allclose(frobenius_products(stack, rows_at_once=16), expected, rtol=1e-12)


def test_scores_do_not_depend_on_the_number_of_threads() -> None:
    stack = random_grams(6, 30, 12, dtype=torch.float32)
    sets = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    assert SpectrumScorer(stack, threads=1)(sets) == SpectrumScorer(stack, threads=2)(sets)


def test_rows_are_centred_and_of_length_one() -> None:
    z = np.random.default_rng(5).normal(size=(30, 7)) + 100.0
    rows = normalise_rows(torch.from_numpy(z.astype(np.float32))).numpy()
    centred = z.astype(np.float32).astype(np.float64) - z.astype(np.float32).astype(np.float64).mean(axis=0)
    expected = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    assert float(gram(torch.from_numpy(rows)).trace()) == pytest.approx(1.0)


def test_identical_tokens_have_no_entropy() -> None:
    assert matrix_entropy(gram(normalise_rows(torch.full((5, 3), 0.1)))) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_order_is_refused(alpha: float) -> None:
    with pytest.raises(MisuseError, match="alpha must be a positive number"):
        entropy_of_spectrum(torch.ones(3), alpha)


def test_entropy_of_next_token_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [500.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, -1.0]])
    p = np.exp([1.0, 2.0, 3.0, -1.0]) / np.exp([1.0, 2.0, 3.0, -1.0]).sum()
    expected = [np.log(4), 0.0, -(p * np.log(p)).sum()]
    np.testing.assert_allclose(next_token_entropy(logits).numpy(), expected, atol=1e-6)


def test_mean_gram_is_the_mean() -> None:
    stack = random_grams(3, 5, 4)
    np.testing.assert_allclose(mean_gram(stack, (0, 2)).numpy(), (stack[0] + stack[2]).numpy() / 2)
