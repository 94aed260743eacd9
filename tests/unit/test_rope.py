"""Rope tables from first principles, and the limits in which scalings become simpler ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.decoder_spec import RopeSpec
from wavekit_engines.rope import rope_tables, scaled_rope

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@given(
    theta=st.sampled_from([100.0, 10000.0, 1e6]),
    pairs=st.integers(1, 64),
    position=st.integers(0, 500),
)
def test_a_pair_of_features_turns_at_its_frequency(theta, pairs, position):
    rope = scaled_rope({**PLAIN, "rope_theta": theta}, 2 * pairs, 4096)
    assert rope.rotary_dim == 2 * pairs
    cos, sin = rope_tables(rope, position + 1, long=False)
    angle = position * theta ** (-np.arange(pairs) / pairs)
    np.testing.assert_allclose(cos[position], np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(sin[position], np.sin(angle), atol=1e-4)


def test_tables_are_float32_and_scaled_by_the_factor():
    rope = RopeSpec((1.0, 0.5), factor=1.5)
    cos, sin = rope_tables(rope, 5000, long=True)
    assert cos.shape == sin.shape == (5000, 2)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos**2 + sin**2, 2.25, rtol=1e-6)


def test_linear_scaling_stretches_positions():
    plain = rope_tables(scaled_rope(PLAIN, 16, 256), 50, long=False)
    stretched = rope_tables(scaled_rope({**PLAIN, "rope_type": "linear", "factor": 4.0}, 16, 256), 200, long=False)
    for short, long in zip(plain, stretched, strict=True):
        np.testing.assert_allclose(short, long[::4], atol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 1.0},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        {
            "rope_type": "llama3",
            "factor": 1.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaling_by_one_changes_nothing(scaling):
    rope = scaled_rope({**PLAIN, **scaling}, 16, 256)
    np.testing.assert_allclose(rope.inv_freq, scaled_rope(PLAIN, 16, 256).inv_freq, rtol=1e-6)
    assert rope.factor == 1.0


def test_llama3_and_yarn_keep_high_frequencies_and_stretch_low_ones():
    plain = np.array(scaled_rope(PLAIN, 64, 256).inv_freq)
    original = {"factor": 8.0, "original_max_position_embeddings": 1024}
    llama3 = {**PLAIN, **original, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for parameters in (llama3, {**PLAIN, **original, "rope_type": "yarn"}):
        ratio = plain / np.array(scaled_rope(parameters, 64, 8192).inv_freq)
        assert ratio[0] == pytest.approx(1)
        assert ratio[-1] == pytest.approx(8)
        assert (np.diff(ratio) > -1e-6).all()


def test_longrope_has_two_tables_only_if_a_sequence_can_outgrow_the_first():
    parameters = {**PLAIN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = scaled_rope({**parameters, "original_max_position_embeddings": 64}, 8, 256)
    assert rope.switch_length == 64
    np.testing.assert_allclose(np.array(rope.inv_freq) / np.array(rope.long_inv_freq), 2)
    assert scaled_rope({**parameters, "original_max_position_embeddings": 256}, 8, 256).switch_length is None
