"""Rope frequencies and tables against the functions and modules of transformers."""

import numpy as np
import pytest
import torch
import transformers
from tiny_models import TINY_MODELS

from wavekit_engines.families import decoder_spec
from wavekit_engines.rope import rope_tables

# The shapes of published models: theta, head size, context and scaling decide every frequency.
PUBLISHED = {
    "Llama-3.1-8B": transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "SmolLM2-135M": transformers.LlamaConfig(
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "Qwen2.5-7B with YaRN": transformers.Qwen2Config(
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "DeepSeek's YaRN": transformers.LlamaConfig(
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
    "Phi-4-mini": transformers.Phi3Config(
        hidden_size=3072,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1 + number / 100 for number in range(48)],
            "long_factor": [1 + number**1.1 for number in range(48)],
        },
    ),
    "Gemma-3-4B": transformers.Gemma3TextConfig(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        }
    ),
}
CONFIGS = {**PUBLISHED, **{name: make() for name, make in TINY_MODELS.items() if "olmo3" not in name}}


def rotary_modules(config):
    """The rotary module of `config`, and how to ask it for one kind of layer: (key of the spec, module, arguments)."""
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    modelling = getattr(transformers.models, config.model_type.removesuffix("_text"))
    module = getattr(
        getattr(modelling, f"modeling_{config.model_type.removesuffix('_text')}"), f"{name}RotaryEmbedding"
    )(config)
    kinds = [kind for kind in ("full_attention", "sliding_attention") if kind in config.rope_parameters]
    return [(kind, module, (kind,)) for kind in kinds] or [("full_attention", module, ())]


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_equal_those_of_the_rotary_module(name):
    config = CONFIGS[name]
    spec = decoder_spec(config.to_dict())
    for kind, module, arguments in rotary_modules(config):
        rope = spec.ropes[kind]
        for length in (30, min(config.max_position_embeddings, 6000)):
            is_long = rope.switch_length is not None and length > rope.switch_length
            expected = module(torch.zeros(1), torch.arange(length)[None], *arguments)
            for table, reference in zip(rope_tables(rope, length, is_long), expected, strict=True):
                half = reference[0, :, : rope.rotary_dim // 2].numpy()
                assert table.shape == half.shape
                # Two pow functions may differ in the last place of a frequency, which the position multiplies.
                np.testing.assert_allclose(table, half, atol=1e-6 + 2e-8 * length, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_and_factors_agree_to_the_last_places_of_float32(name):
    config = CONFIGS[name]
    spec = decoder_spec(config.to_dict())
    for kind, module, _ in rotary_modules(config):
        prefix = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
        reference = getattr(module, f"{prefix}original_inv_freq").numpy()
        np.testing.assert_allclose(np.float32(spec.ropes[kind].inv_freq), reference, rtol=3e-7)
        assert spec.ropes[kind].factor == pytest.approx(getattr(module, f"{prefix}attention_scaling"), rel=1e-12)


def test_longrope_switches_where_transformers_does():
    config = TINY_MODELS["phi3-longrope"]()
    rope = decoder_spec(config.to_dict()).ropes["full_attention"]
    ((_, module, _),) = rotary_modules(config)
    assert rope.switch_length == 32
    for length, is_long in ((32, False), (33, True)):
        cos, _ = module(torch.zeros(1), torch.arange(length)[None])
        np.testing.assert_allclose(rope_tables(rope, length, is_long)[0], cos[0, :, :6], atol=1e-5)
        assert np.abs(rope_tables(rope, length, not is_long)[0] - cos[0, :, :6].numpy()).max() > 0.1
