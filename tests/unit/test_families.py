"""What a configuration means, and what is refused: by name, before anything is computed from it."""

import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavekit_engines.decoder_spec import LayerSpec
from wavekit_engines.errors import MisuseError, UnsupportedModelError, WavekitError
from wavekit_engines.families import FAMILIES, decoder_spec

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def small(model_type="llama", **changes):
    return {"model_type": model_type, **SMALL, **changes}


def windows(spec):
    return [layer.window for layer in spec.layers]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_reads_a_minimal_configuration(model_type):
    spec = decoder_spec(small(model_type))
    assert spec.family == model_type
    assert spec.num_layers == 4
    assert spec.num_heads == 4
    assert set(spec.ropes) == {layer.rope for layer in spec.layers} - {None}


def test_an_unknown_model_type_is_refused_with_the_supported_ones():
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; supported: llama, .*olmo2"):
        decoder_spec(small("mamba"))


def test_a_configuration_without_model_type_is_misuse():
    with pytest.raises(MisuseError, match="no model_type"):
        decoder_spec(SMALL)


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_required_field_is_named(key):
    config = small()
    del config[key]
    with pytest.raises(MisuseError, match=key):
        decoder_spec(config)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True])
def test_a_size_that_is_no_positive_integer_is_named(value):
    with pytest.raises(MisuseError, match="hidden_size"):
        decoder_spec(small(hidden_size=value))


def test_key_value_heads_must_divide_the_heads():
    with pytest.raises(MisuseError, match="num_key_value_heads"):
        decoder_spec(small(num_key_value_heads=3))


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("llama", {"attn_gate": True}),
        ("llama", {"num_experts": 8}),
        ("llama", {"sliding_window": 128}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"quantization_config": {"quant_method": "awq"}}),
        ("llama", {"hidden_act": "relu2"}),
        ("llama", {"residual_multiplier": 0.5}),
        ("mistral", {"attention_bias": True}),
        ("mistral", {"layer_types": ["full_attention"] * 4}),
        ("qwen2", {"mlp_bias": True}),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}),
        ("phi3", {"attention_bias": True}),
        ("phi3", {"full_attn_mod": 2}),
        ("olmo2", {"clip_qkv": 8.0}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_what_is_not_understood_is_refused_by_name(model_type, change):
    (key,) = change
    with pytest.raises(UnsupportedModelError, match=key):
        decoder_spec(small(model_type, **change))


@pytest.mark.parametrize("value", [None, False, 0, [], {}, ""])
def test_an_unknown_setting_that_is_off_passes(value):
    assert decoder_spec(small(attn_gate=value)) == decoder_spec(small())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "proportional"},
        {"type": "mrope", "mrope_section": [1, 2, 3]},
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_is_refused(rope, spelling):
    with pytest.raises(UnsupportedModelError, match=r"rope type .* is not supported; supported: default, linear"):
        decoder_spec(small(**{spelling: rope}))


def test_a_rope_parameter_its_type_has_no_use_for_is_refused():
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        decoder_spec(small(rope_scaling={"type": "default", "mrope_section": [2, 3, 3]}))


@pytest.mark.parametrize(
    ("rope", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 8}, "short_factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 7, "short_factor": [1.0] * 8}, "long_factor"),
        ({"rope_type": "linear", "factor": "twice"}, "factor"),
    ],
)
def test_a_rope_parameter_that_is_missing_or_wrong_is_named(rope, missing):
    with pytest.raises(MisuseError, match=missing):
        decoder_spec(small(rope_scaling=rope))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "yarn", "longrope", "gelu"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "rope_theta"]), inner, max_size=2)
    ),
    max_leaves=4,
)
ROPES = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "mscale": 1.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)


@settings(max_examples=400)
@given(model_type=st.sampled_from(sorted(FAMILIES)), rope=st.sampled_from(ROPES), value=JSON_VALUES, data=st.data())
def test_whatever_a_value_is_it_is_understood_or_refused(model_type, rope, value, data):
    """No other error escapes: the command line prints one line for these, and a traceback for anything else."""
    rope = dict(rope)
    config = small(model_type, sliding_window=8, layer_types=["full_attention"] * 4, use_sliding_window=True)
    if data.draw(st.booleans()):
        rope[data.draw(st.sampled_from(sorted(rope)))] = value
    else:
        config[data.draw(st.sampled_from([*sorted(config), *FAMILIES[model_type].defaults, "no_rope_layers"]))] = value
    spelling = data.draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    with contextlib.suppress(WavekitError):
        spec = decoder_spec({spelling: rope, **config})
        assert all(math.isfinite(frequency) for rope in spec.ropes.values() for frequency in rope.inv_freq)


def test_mistral_has_one_window_for_all_layers():
    assert windows(decoder_spec(small("mistral", sliding_window=8))) == [8] * 4
    assert windows(decoder_spec(small("mistral", sliding_window=None))) == [None] * 4


def test_qwen_has_a_window_from_a_layer_on_if_it_is_switched_on():
    config = small("qwen2", sliding_window=8, max_window_layers=3)
    assert windows(decoder_spec(config)) == [None] * 4
    assert windows(decoder_spec({**config, "use_sliding_window": True})) == [None, None, None, 8]


def test_gemma_3_alternates_windows_and_their_ropes():
    spec = decoder_spec(small("gemma3_text", sliding_window=8, sliding_window_pattern=2))
    assert windows(spec) == [8, None, 8, None]
    assert [layer.rope for layer in spec.layers] == ["sliding_attention", "full_attention"] * 2
    assert spec.ropes["sliding_attention"].inv_freq[1] > spec.ropes["full_attention"].inv_freq[1]


def test_a_window_no_sequence_outgrows_is_none_but_keeps_its_rope():
    spec = decoder_spec(small("gemma3_text", sliding_window=256, sliding_window_pattern=2))
    assert windows(spec) == [None] * 4
    assert [layer.rope for layer in spec.layers] == ["sliding_attention", "full_attention"] * 2


def test_smollm_3_leaves_every_nth_layer_without_rope():
    spec = decoder_spec(small("smollm3", no_rope_layer_interval=2))
    rotated, plain = LayerSpec("full_attention", None), LayerSpec(None, None)
    assert spec.layers == (rotated, plain, rotated, plain)
    listed = decoder_spec(small("smollm3", no_rope_layers=[1, 1, 0, 1]))
    assert listed.layers == (rotated, rotated, plain, rotated)


def test_granite_scales():
    spec = decoder_spec(
        small(
            "granite",
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
        )
    )
    assert (spec.embedding_scale, spec.residual_scale, spec.attention_scale) == (12.0, 0.22, 0.015625)
    assert spec.logit_scale == 1 / 8


def test_gemma_scales_and_offsets():
    spec = decoder_spec(small("gemma2", query_pre_attn_scalar=144))
    assert spec.embedding_scale == 8.0
    assert spec.attention_scale == pytest.approx(1 / 12)
    assert spec.norm_offset == 1.0
    assert (spec.attention_softcap, spec.logit_softcap) == (50.0, 30.0)
    assert spec.activation == "gelu_tanh"
    assert spec.tied_head


def test_gemma_s_old_name_of_its_activation_means_the_approximation():
    assert decoder_spec(small("gemma", hidden_act="gelu")).activation == "gelu_tanh"


def test_phi_rotates_part_of_a_head():
    assert decoder_spec(small("phi3", partial_rotary_factor=0.75)).ropes["full_attention"].rotary_dim == 12


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_phi_s_old_names_of_longrope(old):
    rope = {"type": old, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spec = decoder_spec(small("phi3", rope_scaling=rope, original_max_position_embeddings=64))
    assert spec.ropes["full_attention"].switch_length == 64
    assert spec.ropes["full_attention"].long_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_rope_scaling_wins_over_rope_parameters():
    both = small(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"})
    assert decoder_spec(both).ropes["full_attention"].inv_freq[0] == 0.5


def test_a_specification_survives_json():
    """The manifest of a bundle stores it."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = decoder_spec(small(rope_scaling=rope))
    frequencies = spec.ropes["full_attention"].inv_freq
    assert tuple(json.loads(json.dumps(frequencies))) == frequencies
