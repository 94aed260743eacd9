"""Draft heads that would run wrong without a word elsewhere are one line here: what is wrong and what to do."""

import json
import re

import numpy as np
import pytest
from draft_checkpoints import IDS, TARGET, TARGET_CONFIG, TOKENS, VOCABULARY, config, save, tensors

from wavekit_engines.draft_formats import read_draft
from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError, WavekitError
from wavekit_engines.families import decoder_spec

FLAT = ("specforge", "modelopt")
LLAMA3 = config("modelopt")["rope_scaling"]


def refuse(folder, message, error=WavekitError, target=TARGET, **options):
    """Reading the folder fails with one line that names the folder and matches ``message``."""
    with pytest.raises(error, match=message) as caught:
        read_draft(folder, target=target, **options)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_ids(form, nested=..., top=...):
    """The configuration of a flat format with ids in the places given."""
    fields = config(form, **{IDS: top})
    if nested is ...:
        fields["eagle_config"].pop(IDS)
    else:
        fields["eagle_config"][IDS] = nested
    return fields


# Layer ids (peers: two conventions, off by one, none, beyond the last layer)


@pytest.mark.parametrize("form", FLAT)
def test_ids_in_a_place_where_tools_disagree_are_not_guessed(form, tmp_path):
    fields = with_ids(form, top=[2, 4, 6])
    message = refuse(save(tmp_path, fields, tensors(form)), "tools disagree on what it counts", MisuseError)
    assert "wavekit convert-draft --boundaries" in message
    del fields["eagle_config"]
    refuse(save(tmp_path, fields, tensors(form)), "tools disagree on what it counts", MisuseError)
    assert read_draft(tmp_path, boundaries=(2, 4, 6)).spec.boundaries == (2, 4, 6)


@pytest.mark.parametrize("form", FLAT)
@pytest.mark.parametrize("top", [[1, 3, 5], [3, 5, 7]])
def test_ids_that_are_off_by_one_between_two_places(form, top, tmp_path):
    fields = with_ids(form, nested=[1, 3, 5], top=top)
    refuse(save(tmp_path, fields, tensors(form)), r"outputs of layers and so boundaries \[2, 4, 6\]", CheckpointError)
    assert read_draft(tmp_path, boundaries=(2, 4, 6)).spec.boundaries == (2, 4, 6)


def test_the_same_states_in_both_places_are_no_contradiction(tmp_path):
    folder = save(tmp_path, with_ids("modelopt", nested=[1, 3, 5], top=[2, 4, 6]), tensors("modelopt"))
    assert read_draft(folder).spec.boundaries == (2, 4, 6)


@pytest.mark.parametrize("missing", [..., None, []])
@pytest.mark.parametrize("form", [*FLAT, "speculators"])
def test_a_head_without_ids(form, missing, tmp_path):
    fields = config(form, **{IDS: missing}) if form == "speculators" else with_ids(form, nested=missing)
    message = refuse(save(tmp_path, fields, tensors(form)), "no layer ids are stated", MisuseError)
    assert "wavekit convert-draft --boundaries" in message


def test_a_head_of_eagle_without_ids_says_how_its_rule_is_asked_for(tmp_path):
    folder = save(tmp_path, config("eagle"), tensors("eagle"))
    message = refuse(folder, "no layer ids are stated", MisuseError)
    assert "--from eagle --target MODEL" in message
    refuse(folder, "no layer ids are stated", MisuseError, target=None, format="eagle")


def test_the_rule_does_not_hold_for_a_model_of_few_layers(tmp_path):
    few = decoder_spec({**TARGET_CONFIG, "num_hidden_layers": 4})
    refuse(save(tmp_path, config("eagle"), tensors("eagle")), "no layer ids", MisuseError, few, format="eagle")


def test_ids_in_what_is_read_as_the_eagle_format(tmp_path):
    refuse(save(tmp_path, config("specforge"), tensors("specforge")), "does not have", CheckpointError, format="eagle")


@pytest.mark.parametrize(
    ("form", "ids"), [("specforge", [1, 4, 9]), ("modelopt", [5, 7, 9]), ("speculators", [2, 4, 10])]
)
def test_ids_beyond_the_last_layer(form, ids, tmp_path):
    fields = config(form, **{IDS: ids}) if form == "speculators" else with_ids(form, nested=ids)
    message = refuse(save(tmp_path, fields, tensors(form)), "has none beyond 9", MisuseError)
    assert "boundary numbers already" in message


def test_the_last_boundary_is_a_state_like_any_other(tmp_path):
    folder = save(tmp_path, with_ids("modelopt", nested=[1, 3, 8]), tensors("modelopt"))
    assert read_draft(folder, target=TARGET).spec.boundaries == (2, 4, 9)


@pytest.mark.parametrize("ids", [[5, 3, 1], [1, 1, 5]])
def test_ids_that_do_not_ascend(ids, tmp_path):
    refuse(save(tmp_path, with_ids("modelopt", nested=ids), tensors("modelopt")), "do not ascend", MisuseError)


@pytest.mark.parametrize(
    ("ids", "message"), [([-1, 3, 5], "negative ids"), ([1.5, 3, 5], "whole numbers"), (7, "whole")]
)
def test_ids_that_are_no_layers(ids, message, tmp_path):
    refuse(save(tmp_path, with_ids("modelopt", nested=ids), tensors("modelopt")), message, MisuseError)


def test_another_number_of_ids_than_fc_takes(tmp_path):
    refuse(save(tmp_path, with_ids("modelopt", nested=[1, 5]), tensors("modelopt")), "for 3 states", CheckpointError)
    folder = save(tmp_path, config("modelopt", num_aux_hidden_states=2), tensors("modelopt"))
    refuse(folder, "num_aux_hidden_states is 2", CheckpointError)
    refuse(folder, "num_aux_hidden_states is 2", MisuseError, boundaries=(2, 4, 6))


# Norms and rope (peers: flags ignored on load)


@pytest.mark.parametrize("form", [*FLAT, "speculators"])
@pytest.mark.parametrize(
    ("option", "added"),
    [("norm_before_fc", ["input_norm.weight"]), ("fc_norm", [f"fc_norm.{i}.weight" for i in range(3)])],
)
def test_a_norm_that_only_the_configuration_or_only_the_weights_have(form, option, added, tmp_path):
    refuse(
        save(tmp_path / "named", config(form, **{option: True}), tensors(form)),
        rf"{option} is set, but {added[0]} is missing.*run the head wrong",
        CheckpointError,
    )
    extra = {name: np.ones(24 if option == "norm_before_fc" else 8, np.float32) for name in added}
    refuse(
        save(tmp_path / "there", config(form), {**tensors(form), **extra}),
        rf"{option} is not set, but {added[0]} is there",
        CheckpointError,
    )


def test_options_that_two_places_state_differently(tmp_path):
    fields = config("modelopt", norm_before_fc=False)
    fields["eagle_config"]["norm_before_fc"] = True
    refuse(save(tmp_path, fields, tensors("modelopt")), "norm_before_fc: true in one place and false", CheckpointError)
    fields = config("modelopt", norm_output=False)
    fields["eagle_config"]["return_hidden_post_norm"] = True
    refuse(save(tmp_path, fields, tensors("modelopt")), "norm_output and return_hidden_post_norm", CheckpointError)


def test_both_kinds_of_norm_before_fc(tmp_path):
    folder = save(tmp_path, config("specforge", norm_before_fc=True, fc_norm=True), tensors("specforge"))
    refuse(folder, "one or the other", UnsupportedModelError)


def test_the_residual_of_speculators_has_no_default(tmp_path):
    folder = save(tmp_path, config("speculators", norm_before_residual=...), tensors("speculators"))
    refuse(folder, "norm_before_residual is missing", CheckpointError)


def test_an_option_that_is_neither_true_nor_false(tmp_path):
    folder = save(tmp_path, config("specforge", norm_output="yes"), tensors("specforge"))
    refuse(folder, "must be true or false, not 'yes'", MisuseError)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**LLAMA3, "rope_theta": 500000.0}, "rope_theta is 10000.0 by rope_theta and rope_scaling but 500000.0"),
        ({"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}, "factor is 8.0 .* but 2.0 by rope_parameters"),
        ({"rope_theta": 10000.0, "rope_type": "default"}, "but None by rope_parameters"),
    ],
)
def test_spellings_of_the_rope_that_differ(rope, message, tmp_path):
    folder = save(tmp_path, config("modelopt", rope_parameters=rope), tensors("modelopt"))
    refuse(folder, f"{message}.*remove the spelling that is wrong", CheckpointError)


def test_spellings_of_the_rope_that_agree(tmp_path):
    fields = config("modelopt")
    fields["rope_parameters"] = {**fields["rope_scaling"], "rope_theta": 10000}
    assert read_draft(save(tmp_path, fields, tensors("modelopt"))).spec.rope.factor == 1.0


def test_a_rope_that_is_not_understood(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    folder = save(tmp_path, config("modelopt", rope_scaling=scaling), tensors("modelopt"))
    refuse(folder, "rope type 'dynamic' is not supported", UnsupportedModelError)


# The map (peers: misunderstood, made anew, missing)


def refuse_map(folder, message, form="specforge", **changes):
    arrays = {**tensors(form), **changes}
    arrays = {name: values for name, values in arrays.items() if values is not None}
    refuse(save(folder, config(form), arrays), message, CheckpointError)


def test_a_map_of_target_ids_instead_of_offsets(tmp_path):
    refuse_map(tmp_path / "with-t2d", "d2t holds target ids, but it must hold offsets", d2t=TOKENS)
    refuse_map(
        tmp_path / "without", r"target ids 0 to 48, outside 0 to 39; it must hold offsets", "modelopt", d2t=TOKENS
    )


@pytest.mark.parametrize("form", ["eagle", "specforge", "modelopt", "speculators"])
def test_a_map_that_is_missing(form, tmp_path):
    arrays = {name: values for name, values in tensors(form).items() if name != "d2t"}
    refuse(save(tmp_path, config(form), arrays), "d2t is missing", CheckpointError, boundaries=(2, 4, 6))


def test_a_map_that_was_made_anew(tmp_path):
    other = TOKENS.copy()
    other[3] = 6
    refuse_map(tmp_path, r"name different target tokens \(the first is 6\)", d2t=other - np.arange(10))


def test_a_map_that_does_not_ascend(tmp_path):
    refuse_map(tmp_path, "do not ascend", "modelopt", d2t=TOKENS[::-1] - np.arange(10))


def test_a_map_for_another_head(tmp_path):
    refuse_map(tmp_path / "short", "but the head has 10 rows", d2t=(TOKENS - np.arange(10))[:9])
    refuse_map(tmp_path / "floats", "must be integers", d2t=np.zeros(10, np.float32))
    refuse_map(tmp_path / "t2d", r"must be BOOL \[40\]", t2d=np.ones(41, bool))
    refuse_map(
        tmp_path / "rows", r"lm_head.weight has the shape \[11, 8\]", **{"lm_head.weight": np.ones((11, 8), "f4")}
    )


def test_a_draft_vocabulary_larger_than_the_targets(tmp_path):
    arrays = {**tensors("modelopt"), "lm_head.weight": np.ones((41, 8), np.float32)}
    refuse(save(tmp_path, config("modelopt", draft_vocab_size=41), arrays), "more than the 40", CheckpointError)


# Another model's head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "a hidden size of 8, but this model's is 16"),
        ({"vocab_size": 48}, "a vocabulary of 40, but this model's is 48"),
        ({"num_hidden_layers": 5}, r"taps boundaries \[2, 4, 6\], but a model of 5 layers has none beyond 5"),
    ],
)
def test_a_head_of_another_model(changes, message, tmp_path):
    target = decoder_spec({**TARGET_CONFIG, **changes})
    refuse(save(tmp_path, config("modelopt"), tensors("modelopt")), message, MisuseError, target)


def test_a_head_that_says_how_many_layers_its_target_has(tmp_path):
    folder = save(tmp_path, config("modelopt", wavekit={"target_layers": 12}), tensors("modelopt"))
    refuse(folder, "a number of layers of 12, but this model's is 9", MisuseError)


def test_a_head_narrower_than_its_target(tmp_path):
    folder = save(tmp_path, config("specforge", target_hidden_size=16), tensors("specforge"))
    refuse(folder, "as wide as their target", UnsupportedModelError)


# Other kinds of drafts, and files that are not whole


@pytest.mark.parametrize(
    ("changes", "added", "message"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, (), "latent attention"),
        ({"kv_lora_rank": 4}, (), "latent attention"),
        ({"architectures": ["Qwen3MoeForCausalLMEagle3"]}, (), "mixture of experts"),
        ({}, ("layers.0.mlp.experts.0.up_proj.weight",), "mixture of experts"),
        ({"num_hidden_layers": 2}, (), "has 2 layers"),
        ({}, ("parallel_draft_heads.lm_head.weight",), "drafts in parallel"),
        ({}, ("layers.0.self_attn.q_norm.weight",), "normalises its queries and keys"),
        ({"architectures": ["LlamaForCausalLM"]}, (), r"architectures is \['LlamaForCausalLM'\]"),
        ({"model_type": "qwen2"}, (), "model_type 'qwen2' is not supported"),
        ({"quantization_config": {"quant_algo": "FP8"}}, (), "quantized"),
        ({"hidden_act": "relu"}, (), "hidden_act='relu' is not supported"),
        ({"tie_word_embeddings": True}, (), "score with the embedding instead of the head"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, (), "with a window"),
        ({"mystery": 3}, (), "mystery=3"),
        ({"num_attention_heads": None}, (), "lacks num_attention_heads"),
        ({"attention_bias": True}, (), "attention_bias or mlp_bias is set, but .*bias is missing"),
        ({}, ("layers.0.mlp.up_proj.bias",), "is not set, but layers.0.mlp.up_proj.bias is there"),
        ({}, ("layers.0.extra.weight",), "layers.0.extra.weight is no part of an EAGLE-3 head"),
    ],
)
def test_a_head_that_is_not_read(changes, added, message, tmp_path):
    arrays = {**tensors("modelopt"), **{name: np.ones(8, np.float32) for name in added}}
    refuse(save(tmp_path, config("modelopt", **changes), arrays), message)


@pytest.mark.parametrize("option", ["use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"])
def test_an_eagle_config_without_what_makes_it_eagle_3(option, tmp_path):
    fields = config("modelopt")
    fields["eagle_config"][option] = False
    refuse(save(tmp_path, fields, tensors("modelopt")), f"{option} is False", UnsupportedModelError)


def test_another_kind_of_speculator(tmp_path):
    folder = save(tmp_path, config("speculators", speculators_model_type="peagle"), tensors("speculators"))
    refuse(folder, "of the kind peagle", UnsupportedModelError)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"boundaries": "2,4,6"}, "must list whole numbers"),
        ({"target_layers": "nine"}, "target_layers .* must be a positive integer"),
        ({"speculators_config": {"algorithm": "mtp"}}, "only eagle3"),
    ],
)
def test_fields_of_wavekit_that_someone_changed(own, message, tmp_path):
    refuse(save(tmp_path, config("eagle", wavekit=own), tensors("eagle")), message, MisuseError)


def test_a_head_of_eagle_1(tmp_path):
    arrays = {
        "embed_tokens.weight": np.ones((VOCABULARY, 8), np.float32),
        "fc.weight": np.ones((8, 16), np.float32),
        "layers.0.self_attn.q_proj.weight": np.ones((8, 8), np.float32),
    }
    refuse(save(tmp_path, config("eagle"), arrays), "is of EAGLE-1 or EAGLE-2", UnsupportedModelError)


def test_a_target_model_is_no_head(tmp_path):
    arrays = {"model.layers.0.mlp.up_proj.weight": np.ones((8, 8), np.float32)}
    refuse(save(tmp_path, TARGET_CONFIG | {"num_hidden_layers": 1}, arrays), "no EAGLE-3 head", UnsupportedModelError)


def test_the_wrong_format_named(tmp_path):
    folder = save(tmp_path, config("modelopt"), tensors("modelopt"))
    refuse(folder, r"looks like modelopt or speculators \(--from\)", CheckpointError, format="specforge")
    with pytest.raises(MisuseError, match="no draft format 'medusa': choose one of eagle, specforge"):
        read_draft(folder, format="medusa")


@pytest.mark.parametrize("lost", ["norm.weight", "layers.0.hidden_norm.weight", "lm_head.weight", "fc.weight"])
def test_a_tensor_that_is_missing(lost, tmp_path):
    arrays = {name: values for name, values in tensors("modelopt").items() if name != lost}
    refuse(
        save(tmp_path, config("modelopt"), arrays),
        f"{re.escape(lost)} missing: the head is incomplete",
        CheckpointError,
    )


def test_weights_that_are_not_finite_or_quantized(tmp_path):
    arrays = tensors("modelopt")
    arrays["norm.weight"][3] = np.nan
    refuse(save(tmp_path, config("modelopt"), arrays), "norm.weight holds numbers that are not finite", CheckpointError)
    arrays["norm.weight"] = np.ones(8, np.uint8)
    refuse(save(tmp_path, config("modelopt"), arrays), "norm.weight is stored as U8", UnsupportedModelError)


def test_what_is_no_checkpoint(tmp_path):
    refuse(tmp_path / "nothing", "is no folder", MisuseError)
    refuse(tmp_path, "no config.json", MisuseError)
    (tmp_path / "config.json").write_text("{")
    refuse(tmp_path, "not valid JSON", CheckpointError)
    (tmp_path / "config.json").write_text(json.dumps(config("modelopt")))
    refuse(tmp_path, "has no weights", CheckpointError)
    (tmp_path / "other.bin").write_bytes(b"")
    refuse(tmp_path, "save them again as model.safetensors", UnsupportedModelError)
