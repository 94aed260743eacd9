"""Laying a specification over a checkpoint held in memory."""

import numpy as np
import pytest

from wavekit_engines.errors import CheckpointError, UnsupportedModelError
from wavekit_engines.families import decoder_spec
from wavekit_engines.weights import DecoderWeights

CONFIG = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class MemoryCheckpoint:
    """The part of a checkpoint that `DecoderWeights` uses."""

    name = "memory"

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def rows(self, name, start, stop):
        return self.tensors[name][start:stop].copy()


def llama(**changes):
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    for layer in range(2):
        parts = {
            **{"self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8)},
            **{"self_attn.o_proj": (8, 8), "mlp.gate_proj": (6, 8), "mlp.up_proj": (6, 8), "mlp.down_proj": (8, 6)},
            **{"input_layernorm": (8,), "post_attention_layernorm": (8,)},
        }
        shapes.update({f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()})
    noise = np.random.default_rng(0)
    tensors = {name: noise.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors.update(changes)
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def laid_over(tensors, **changes):
    return DecoderWeights(MemoryCheckpoint(tensors), decoder_spec({"model_type": "llama", **CONFIG, **changes}))


def test_rows_of_a_concatenation_cross_its_parts():
    tensors = llama()
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    rows = laid_over(tensors).layer(1, "qkv")
    assert rows.shape == (16, 8)
    for start, stop in ((0, 16), (3, 5), (6, 13), (7, 8), (8, 9), (15, 16), (5, 5), (10, None), (12, 99)):
        np.testing.assert_array_equal(rows.read(start, stop), np.concatenate(parts)[start:stop])


def test_roles_of_a_family_without_biases():
    roles = laid_over(llama()).layer_roles()
    assert sorted(roles) == ["attention_norm_in", "down", "gate_up", "mlp_norm_in", "output", "qkv"]


def test_norm_offset_is_added_and_only_to_norms():
    tensors = llama()
    weights = laid_over(tensors, model_type="gemma", head_dim=2, tie_word_embeddings=False)
    np.testing.assert_array_equal(weights["final_norm"].read(), tensors["model.norm.weight"] + 1)
    np.testing.assert_array_equal(weights["embedding"].read(), tensors["model.embed_tokens.weight"])
    norm = weights.layer(0, "attention_norm_in").read(2, 4)
    np.testing.assert_array_equal(norm, tensors["model.layers.0.input_layernorm.weight"][2:4] + 1)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_prefixes_of_the_ways_models_are_saved(prefix):
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in llama().items()}
    if prefix == "language_model.model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    expected = llama()["lm_head.weight"]
    np.testing.assert_array_equal(laid_over(tensors)["head"].read(), expected)


def test_a_tied_head_is_the_embedding_whether_or_not_it_is_stored_too():
    tensors = llama()
    embedding = tensors["model.embed_tokens.weight"]
    for head in (None, embedding):
        weights = laid_over({**llama(**{"lm_head.weight": head})}, tie_word_embeddings=True)
        np.testing.assert_array_equal(weights["head"].read(), embedding)
        assert weights["head"].names == weights["embedding"].names


def test_a_tied_pair_of_which_only_the_head_is_stored():
    tensors = llama(**{"model.embed_tokens.weight": None})
    weights = laid_over(tensors, tie_word_embeddings=True)
    np.testing.assert_array_equal(weights["embedding"].read(), tensors["lm_head.weight"])


def test_a_tied_pair_that_differs_contradicts_the_configuration():
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        laid_over(llama(), tie_word_embeddings=True)


def test_leftovers_known_to_be_harmless():
    inv_freq = np.ones(1, np.float32)
    laid_over(llama(**{f"model.layers.{n}.self_attn.rotary_emb.inv_freq": inv_freq for n in range(2)}))


def test_a_leftover_is_refused_by_name():
    gate = np.ones(8, np.float32)
    with pytest.raises(
        UnsupportedModelError, match=r"does not account for: model\.layers\.0\.self_attn\.gate\.weight$"
    ):
        laid_over(llama(**{"model.layers.0.self_attn.gate.weight": gate}))


def test_all_problems_are_counted():
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        laid_over(llama(**{"lm_head.weight": None}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[6, 8\], not \[7, 8\].*and 3 more"):
        laid_over(llama(), intermediate_size=7)
