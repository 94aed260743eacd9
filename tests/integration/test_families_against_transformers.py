"""Every family against transformers: the checkpoint it writes, read by wavekit, is the same model."""

import json

import numpy as np
import pytest
import torch
import transformers
from numpy_decoder import logits
from tiny_models import CONTEXT, TINY_MODELS, fill_with_noise, save_tiny

from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import CheckpointError, UnsupportedModelError
from wavekit_engines.families import FAMILIES, decoder_spec
from wavekit_engines.weights import DecoderWeights

TOKEN_IDS = [int(token) for token in np.random.default_rng(0).integers(3, 320, 90)]


def opened(folder):
    checkpoint = open_checkpoint(folder)
    spec = decoder_spec(checkpoint.config)
    return spec, DecoderWeights(checkpoint, spec)


def reference_logits(model, token_ids):
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_spec_describes_the_arithmetic_of_transformers(name, tmp_path):
    model = save_tiny(name, tmp_path, seed=1)
    spec, weights = opened(tmp_path)
    for length in (20, 90):  # within and beyond windows and original contexts
        difference = logits(spec, weights, TOKEN_IDS[:length]) - reference_logits(model, TOKEN_IDS[:length])
        assert np.abs(difference).max() < 5e-5


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_stored_value_is_reachable_by_role(name, tmp_path):
    state = save_tiny(name, tmp_path, seed=2).state_dict()
    spec, weights = opened(tmp_path)
    read = {"lm_head.weight": weights["head"], "embed_tokens.weight": weights["embedding"]}
    for part, rows in read.items():
        (expected,) = (tensor for key, tensor in state.items() if key.endswith(part))
        np.testing.assert_array_equal(rows.read(), expected.numpy())
    for number in range(spec.num_layers):
        modules = {key: state[key].numpy() for key in state if f".layers.{number}." in key}
        values = [weights.layer(number, role).read() for role in weights.layer_roles()]
        assert sum(value.size for value in values) == sum(value.size for value in modules.values())
        parts = ("qkv_proj",) if "phi3" in name else ("q_proj", "k_proj", "v_proj")
        expected = np.concatenate([modules[f"model.layers.{number}.self_attn.{part}.weight"] for part in parts])
        np.testing.assert_array_equal(weights.layer(number, "qkv").read(), expected)


@pytest.mark.parametrize("name", ["llama-biases", "phi3-untied", "gemma3-tied"])
def test_rows_read_in_pieces_are_the_rows_read_at_once(name, tmp_path):
    save_tiny(name, tmp_path)
    _, weights = opened(tmp_path)
    for role in weights.layer_roles():
        rows = weights.layer(1, role)
        whole = rows.read()
        assert whole.shape == rows.shape
        assert whole.dtype == np.float32
        assert whole.flags.c_contiguous
        pieces = [rows.read(start, start + 7) for start in range(0, rows.shape[0], 7)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_every_row_of_the_table_has_a_tiny_model():
    assert {make().model_type for make in TINY_MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_assumed_defaults_are_those_of_transformers(model_type):
    config = transformers.CONFIG_MAPPING[model_type]()
    for key, value in FAMILIES[model_type].defaults.items():
        if key in ("rope_theta", "rope_local_base_freq"):
            kind = "full_attention" if key == "rope_theta" else "sliding_attention"
            parameters = config.rope_parameters.get(kind, config.rope_parameters)
            assert parameters["rope_theta"] == value
        elif key == "sliding_window" and hasattr(config, "use_sliding_window"):
            fields = {field.name: field.default for field in type(config).__dataclass_fields__.values()}
            assert fields[key] == value  # the instance has None, since the switch is off
        elif hasattr(config, key):
            assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_old_spelling_of_rope_settings_means_the_same(name, tmp_path):
    save_tiny(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    new = decoder_spec(config)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if config["model_type"] == "olmo3":
            del config["rope_local_base_freq"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["partial_rotary_factor"] = rope.pop("partial_rotary_factor", None)
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    if config["model_type"] == "olmo3":
        new = new.ropes["full_attention"]
        assert decoder_spec(config).ropes["full_attention"] == new
    else:
        assert decoder_spec(config) == new


def test_a_gemma_3_that_takes_images_is_read_as_its_text_model(tmp_path):
    text = TINY_MODELS["gemma3-tied"]()
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    fill_with_noise(model, seed=3)
    model.save_pretrained(tmp_path)
    spec, weights = opened(tmp_path)
    assert spec.family == "gemma3_text"
    np.testing.assert_allclose(
        logits(spec, weights, TOKEN_IDS[:30]), reference_logits(model, TOKEN_IDS[:30]), atol=5e-5
    )


def test_a_sharded_checkpoint_reads_like_one_file(tmp_path):
    model = save_tiny("llama-untied", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    _, one = opened(tmp_path / "one")
    _, many = opened(tmp_path / "many")
    for role in one.layer_roles():
        np.testing.assert_array_equal(one.layer(3, role).read(), many.layer(3, role).read())


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_reduced_precision_checkpoints_are_widened_exactly(dtype, name, tmp_path):
    model = save_tiny("llama-untied", tmp_path).to(dtype)
    model.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).config["dtype"] == name
    _, weights = opened(tmp_path)
    np.testing.assert_array_equal(weights["head"].read(), model.lm_head.weight.detach().float().numpy())


def test_a_head_that_should_be_tied_but_differs_is_an_error(tmp_path):
    save_tiny("llama-untied", tmp_path)
    set_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        opened(tmp_path)


def test_an_untied_model_without_a_head_is_an_error(tmp_path):
    save_tiny("llama-tied", tmp_path)
    set_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        opened(tmp_path)


def test_weights_that_the_configuration_leaves_out_are_refused_by_name(tmp_path):
    save_tiny("llama-biases", tmp_path)
    set_config(tmp_path, attention_bias=False)
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.self_attn.k_proj.bias.* and 13 more"):
        opened(tmp_path)


def test_layers_beyond_the_configured_number_are_refused(tmp_path):
    save_tiny("llama-untied", tmp_path)
    set_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.3\."):
        opened(tmp_path)


def test_shapes_that_contradict_the_configuration_are_named(tmp_path):
    save_tiny("llama-untied", tmp_path)
    set_config(tmp_path, intermediate_size=95)
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight is \[96, 64\], not \[95, 64\]"):
        opened(tmp_path)


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_context_is_what_the_configuration_states(tmp_path):
    save_tiny("llama-untied", tmp_path)
    assert opened(tmp_path)[0].max_positions == CONTEXT
