"""Debiased CKA against the definition of its estimator, closed forms and invariances."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavekit_calibration.cka import HsicMean, debiased_cka, hsic_terms
from wavekit_calibration.errors import TooFewTokensError


def linear_grams(*states: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([z @ z.T for z in states]))


def hsic_by_definition(k: np.ndarray, m: np.ndarray) -> float:
    """The U-statistic: the mean over all ordered quadruples of different tokens."""
    n = len(k)
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(n), 4)]
    return float(np.mean(terms))


def hsic_by_formula(k: np.ndarray, m: np.ndarray) -> float:
    """The closed form of the same, as published, in float64."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    one = np.ones(n)
    inner = np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return float((inner - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3)))


def test_is_the_unbiased_estimator_by_definition() -> None:
    generator = np.random.default_rng(0)
    grams = linear_grams(generator.normal(size=(6, 3)), generator.normal(size=(6, 5)) + 1)
    k, m = grams.numpy()
    expected = [[hsic_by_definition(a, b) for b in (k, m)] for a in (k, m)]
    np.testing.assert_allclose(hsic_terms(grams), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [4, 5, 33])
def test_agrees_with_the_published_closed_form(n: int) -> None:
    generator = np.random.default_rng(n)
    grams = linear_grams(*(generator.normal(size=(n, width)) for width in (2, 7, 40)))
    expected = [[hsic_by_formula(a, b) for b in grams.numpy()] for a in grams.numpy()]
    np.testing.assert_allclose(hsic_terms(grams, rows_at_once=8), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(hsic_terms(grams.float()), expected, rtol=1e-4, atol=1e-4)


def test_a_boundary_resembles_itself_and_its_rotated_scaled_copy() -> None:
    generator = np.random.default_rng(1)
    z = generator.normal(size=(20, 6))
    rotation, _ = np.linalg.qr(generator.normal(size=(6, 6)))
    cka = debiased_cka(linear_grams(z, 3.0 * z @ rotation + 5.0))
    np.testing.assert_allclose(cka, np.ones((2, 2)), atol=1e-9)


def test_unrelated_wide_states_do_not_seem_alike() -> None:
    """More features than tokens: the plain estimator calls pure noise similar, the debiased one does not."""
    generator = np.random.default_rng(2)
    a, b = generator.normal(size=(2, 40, 2000))
    centre = np.eye(40) - 1 / 40
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    plain = np.sum(k * m) / np.sqrt(np.sum(k * k) * np.sum(m * m))
    assert plain > 0.9
    assert abs(debiased_cka(linear_grams(a, b))[0, 1]) < 0.2


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 100))
def test_does_not_see_rotation_scale_shift_and_order(seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    a = generator.normal(size=(12, 4))
    b = a @ generator.normal(size=(4, 5)) + generator.normal(size=(12, 5))
    rotation, _ = np.linalg.qr(generator.normal(size=(5, 5)))
    order = generator.permutation(12)
    before = debiased_cka(linear_grams(a, b))
    after = debiased_cka(linear_grams(a[order], scale * (b @ rotation)[order] + scale * generator.normal(size=5)))
    np.testing.assert_allclose(after, before, atol=1e-7)


def test_minibatches_are_averaged_before_the_ratio() -> None:
    generator = np.random.default_rng(3)
    batches = [linear_grams(generator.normal(size=(n, 3)), generator.normal(size=(n, 3))) for n in (5, 9, 7)]
    mean = HsicMean()
    for batch in batches:
        mean.add(batch)
    terms = np.mean(
        [[[hsic_by_formula(a, b) for b in batch.numpy()] for a in batch.numpy()] for batch in batches], axis=0
    )
    expected = terms[0, 1] / np.sqrt(terms[0, 0] * terms[1, 1])
    assert mean.cka()[0, 1] == pytest.approx(expected)
    assert mean.cka()[0, 1] != pytest.approx(np.mean([debiased_cka(b)[0, 1] for b in batches]), abs=1e-3)


def test_a_boundary_without_variance_resembles_nothing() -> None:
    cka = debiased_cka(linear_grams(np.random.default_rng(4).normal(size=(6, 3)), np.zeros((6, 3))))
    np.testing.assert_array_equal(cka, [[1.0, 0.0], [0.0, 1.0]])


def test_three_tokens_are_too_few() -> None:
    with pytest.raises(TooFewTokensError, match="at least 4 tokens"):
        hsic_terms(torch.eye(3)[None])
    with pytest.raises(TooFewTokensError):
        HsicMean().cka()
