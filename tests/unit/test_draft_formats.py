"""Draft heads in four formats: what their fields mean, and that reading and writing loses nothing."""

import dataclasses
import json

import draft_checkpoints as made
import numpy as np
import pytest
from draft_checkpoints import IDS, TARGET, TOKENS, config, save, tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from wavekit_engines.draft_formats import FORMATS, drop_copied_embedding, normalized_rope, read_draft, write_draft
from wavekit_engines.draft_spec import Draft, DraftSpec
from wavekit_engines.errors import MisuseError
from wavekit_engines.rope import scaled_rope

ROPES = {
    "eagle": {"rope_type": "default", "rope_theta": 10000.0},
    "specforge": {"rope_type": "default", "rope_theta": 500000.0},
    "modelopt": {
        **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    },
    "speculators": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
}


def named(form):
    """What a reader has to be told of a format: the eagle format states no ids."""
    return {"format": "eagle"} if form == "eagle" else {}


def read_made(form, folder, **changes):
    return read_draft(save(folder, config(form, **changes), tensors(form)), target=TARGET, **named(form))


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_states_under_each_formats_ids(form, tmp_path):
    draft = read_made(form, tmp_path)
    assert draft.spec.boundaries == (2, 4, 6)
    assert draft.spec.target_layers == 9
    assert draft.spec.norm_before_residual == (form == "speculators")
    assert draft.rope_parameters == ROPES[form]
    assert draft.spec.rope == scaled_rope(ROPES[form], 4, 64)
    np.testing.assert_array_equal(np.arange(10) + draft.d2t, TOKENS)


@pytest.mark.parametrize("form", FORMATS)
def test_every_weight_has_its_role(form, tmp_path):
    draft = read_made(form, tmp_path)
    stored = tensors(form)
    names = {
        "fc": "fc.weight",
        "embedding_norm": "{}input_layernorm.weight",
        "hidden_norm": "{}hidden_norm.weight",
        "mlp_norm": "{}post_attention_layernorm.weight",
        **{role: f"{{}}self_attn.{role}_proj.weight" for role in "qkvo"},
        **{role: f"{{}}mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
        "norm": "norm.weight",
        "head": "lm_head.weight",
    }
    assert draft.weights.keys() == names.keys()
    for role, name in names.items():
        np.testing.assert_array_equal(draft.weights[role], stored[name.format(made.LAYER[form])])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_reading_and_writing_a_format_keeps_every_bit(form, dtype, tmp_path):
    source = save(tmp_path / "source", config(form), tensors(form, dtype=dtype))
    draft = read_draft(source, target=TARGET, **named(form))
    write_draft(tmp_path / "copy", draft, form)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert (values.dtype, values.shape) == (after[name].dtype, after[name].shape)
        assert values.tobytes() == after[name].tobytes(), name
    assert_same_draft(read_draft(tmp_path / "copy", target=TARGET), draft)


@pytest.mark.parametrize("to_form", FORMATS)
@pytest.mark.parametrize("from_form", FORMATS)
def test_converting_keeps_weights_map_taps_and_rope(from_form, to_form, tmp_path):
    changes = {"norm_before_residual": False} if from_form == "speculators" else {}
    draft = read_made(from_form, tmp_path / "source", **changes)
    write_draft(tmp_path / "converted", draft, to_form)
    assert_same_draft(read_draft(tmp_path / "converted"), draft)
    stored = load_file(tmp_path / "converted" / "model.safetensors")
    assert {name.partition("self_attn")[0] for name in stored if "self_attn" in name} == {made.LAYER[to_form]}
    np.testing.assert_array_equal(stored["lm_head.weight"], tensors(from_form)["lm_head.weight"])
    written = json.loads((tmp_path / "converted" / "config.json").read_text())
    ids = {
        "eagle": (None, None),
        "specforge": ([1, 3, 5], [2, 4, 6]),
        "modelopt": ([1, 3, 5], [2, 4, 6]),
        "speculators": (None, [2, 4, 6]),
    }[to_form]
    assert (written.get("eagle_config", {}).get(IDS), written.get(IDS)) == ids


def test_what_only_one_format_has_a_field_for_survives_the_others(tmp_path):
    draft = read_made("speculators", tmp_path / "source", norm_before_residual=False)
    for form in ("modelopt", "eagle", "specforge", "speculators"):
        write_draft(tmp_path / form, draft, form)
        draft = read_draft(tmp_path / form)
    written = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert written["speculators_config"] == config("speculators")["speculators_config"]
    assert draft.spec.target_layers == 9


def test_both_spellings_of_the_rope_are_written(tmp_path):
    draft = read_made("modelopt", tmp_path / "source")
    write_draft(tmp_path / "copy", draft, "specforge")
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert written["rope_parameters"] == ROPES["modelopt"]
    assert written["rope_theta"] == 10000.0
    scaling = written["rope_scaling"]
    assert scaling.pop("type") == "llama3"
    assert {**scaling, "rope_theta": 10000.0} == ROPES["modelopt"]


def test_a_plain_rope_has_no_scaling(tmp_path):
    draft = read_made("specforge", tmp_path / "source")
    write_draft(tmp_path / "copy", draft, "modelopt")
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (500000.0, None)


@pytest.mark.parametrize("where", ["norm_before_fc", "eagle_config"])
def test_a_joint_norm_before_fc_may_be_stated_in_two_places(where, tmp_path):
    fields = config("modelopt")
    (fields if where == "norm_before_fc" else fields["eagle_config"])["norm_before_fc"] = True
    weights = {**tensors("modelopt"), "input_norm.weight": np.arange(24, dtype=np.float32)}
    draft = read_draft(save(tmp_path / "source", fields, weights))
    assert draft.spec.fc_norm == "joint"
    np.testing.assert_array_equal(draft.weights["fc_norm"], np.arange(24))
    write_draft(tmp_path / "copy", draft, "speculators")
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["norm_before_fc"] is True


def test_norms_of_each_tap_and_states_fed_back_after_the_norm(tmp_path):
    weights = tensors("specforge") | {f"fc_norm.{i}.weight": np.full(8, i, np.float32) for i in range(3)}
    draft = read_draft(save(tmp_path, config("specforge", fc_norm=True, norm_output=True), weights))
    assert (draft.spec.fc_norm, draft.spec.norm_output) == ("each", True)
    assert [draft.weights[f"fc_norm.{i}"][0] for i in range(3)] == [0, 1, 2]


def test_a_head_over_the_whole_vocabulary_needs_no_map(tmp_path):
    weights = {name: values for name, values in tensors("modelopt").items() if name != "d2t"}
    weights["lm_head.weight"] = np.ones((40, 8), np.float32)
    draft = read_draft(save(tmp_path / "source", config("modelopt", draft_vocab_size=None), weights))
    np.testing.assert_array_equal(draft.d2t, np.zeros(40))
    write_draft(tmp_path / "copy", draft, "specforge")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "copy" / "model.safetensors").keys()


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_any_number_of_taps(taps, tmp_path):
    fields = config("speculators", **{IDS: list(range(3, 3 + taps))})
    draft = read_draft(save(tmp_path / "source", fields, tensors("speculators", taps)), target=TARGET)
    assert draft.spec.boundaries == tuple(range(3, 3 + taps))
    write_draft(tmp_path / "copy", draft, "modelopt")
    assert read_draft(tmp_path / "copy").spec == draft.spec


def test_boundaries_that_are_given_count(tmp_path):
    folder = save(tmp_path, config("eagle"), tensors("eagle"))
    assert read_draft(folder, boundaries=(1, 2, 3)).spec.boundaries == (1, 2, 3)
    folder = save(tmp_path, config("modelopt"), tensors("modelopt"))
    assert read_draft(folder, boundaries=[1, 3, 5]).spec.boundaries == (1, 3, 5)


def test_a_tables_copy_is_not_kept_and_another_is(tmp_path):
    table = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    weights = {**tensors("speculators", dtype=np.float16), "embed_tokens.weight": table.astype(np.float16)}
    draft = read_draft(save(tmp_path / "source", config("speculators"), weights))
    write_draft(tmp_path / "copy", draft, "speculators")
    stored = load_file(tmp_path / "copy" / "model.safetensors")["embed_tokens.weight"]
    assert stored.tobytes() == table.astype(np.float16).tobytes()

    class Rows:
        shape = (40, 8)

        def __init__(self, values):
            self.values = values

        def read(self, start, stop):
            return self.values[start:stop]

    assert drop_copied_embedding(draft, Rows(table)).embedding is None
    assert drop_copied_embedding(draft, Rows(table + 1)).embedding is draft.embedding


@st.composite
def heads(draw):
    """Any head that a format with ids and options can state."""
    taps = tuple(sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5))))
    tokens = np.array(sorted(draw(st.sets(st.integers(0, 29), min_size=1, max_size=30))))
    rope = normalized_rope(draw(st.sampled_from([*ROPES.values(), {"rope_theta": 1e6, "partial_rotary_factor": 0.5}])))
    biased = draw(st.booleans())
    spec = DraftSpec(
        boundaries=taps,
        target_layers=draw(st.sampled_from([None, 12, 20])),
        hidden_size=8,
        intermediate_size=4,
        num_heads=2,
        num_kv_heads=draw(st.sampled_from([1, 2])),
        head_dim=4,
        vocab_size=30,
        draft_vocab_size=len(tokens),
        max_positions=128,
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope=scaled_rope(rope, 4, 128),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        norm_before_residual=draw(st.booleans()),
        fc_norm=draw(st.sampled_from(["none", "joint", "each"])),
        norm_output=draw(st.booleans()),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=draw(st.booleans()),
        embedding_scale=draw(st.sampled_from([1.0, 2.5])),
    )
    generator = np.random.default_rng(draw(st.integers(0, 9)))
    weights = {
        role: generator.standard_normal(shape).astype(np.float16).astype(np.float32)
        for role, shape in spec.weight_shapes().items()
    }
    return Draft(
        spec,
        weights,
        tokens - np.arange(len(tokens)),
        dtype="float16",
        embedding=np.ones((30, 8), np.float32) if draw(st.booleans()) else None,
        origin=draw(st.sampled_from(["", "someone's"])),
        target_digest=draw(st.sampled_from([None, "abc"])),
        rope_parameters=rope,
        carried=draw(st.sampled_from([{}, {"eos_token_id": [1, 2]}])),
        dtypes=draw(st.sampled_from([{}, {"head": "float32"}])),
    )


@given(head=heads(), path=st.lists(st.sampled_from(FORMATS[1:]), min_size=1, max_size=3))
def test_any_head_survives_any_way_through_the_formats(head, path, tmp_path_factory):
    folder, draft = tmp_path_factory.mktemp("any-head"), head
    for number, form in enumerate(path):
        write_draft(folder / str(number), draft, form)
        draft = read_draft(folder / str(number))
    assert_same_draft(draft, head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"boundaries": (2, 4, 7)},
            r"taps boundaries \[2, 4, 7\], but code that reads the eagle format taps \[2, 4, 6\]",
        ),
        ({"target_layers": None}, r"name that \(--target\)"),
        ({"norm_before_residual": True}, "norm_before_residual, which the eagle format cannot state"),
        ({"norm_output": True}, "norm_output, which the eagle format cannot state"),
    ],
)
def test_what_the_eagle_format_cannot_state_is_not_written_in_it(changes, message, tmp_path):
    draft = read_made("specforge", tmp_path / "source")
    draft = dataclasses.replace(draft, spec=dataclasses.replace(draft.spec, **changes))
    with pytest.raises(MisuseError, match=message):
        write_draft(tmp_path / "out", draft, "eagle")
    assert not (tmp_path / "out").exists()


def test_the_embedding_is_no_layers_output(tmp_path):
    fields = config("speculators", **{IDS: [0, 4, 6]})
    draft = read_draft(save(tmp_path / "source", fields, tensors("speculators")))
    with pytest.raises(MisuseError, match="write it as speculators"):
        write_draft(tmp_path / "out", draft, "modelopt")


def test_frequencies_and_their_parameters_must_agree(tmp_path):
    draft = dataclasses.replace(read_made("specforge", tmp_path / "source"), rope_parameters={"rope_theta": 7.0})
    with pytest.raises(MisuseError, match="make both from one configuration"):
        write_draft(tmp_path / "out", draft, "specforge")


def assert_same_draft(one, other):
    """Equal in everything, weights bit for bit."""
    for field in dataclasses.fields(Draft):
        if field.name not in ("weights", "d2t", "embedding", "spec"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one.spec == other.spec
    assert one.weights.keys() == other.weights.keys()
    for role, values in one.weights.items():
        assert values.tobytes() == other.weights[role].tobytes(), role
    np.testing.assert_array_equal(one.d2t, other.d2t)
    assert (one.embedding is None) == (other.embedding is None)
    if one.embedding is not None:
        np.testing.assert_array_equal(one.embedding, other.embedding)
