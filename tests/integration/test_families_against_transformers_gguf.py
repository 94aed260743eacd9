"""GGUF files are the models they were converted from."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf_writer import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from numpy_decoder import logits
from tiny_models import TINY_MODELS, fill_with_noise

from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import UnsupportedModelError
from wavekit_engines.families import decoder_spec
from wavekit_engines.gguf_models import ARCHITECTURES
from wavekit_engines.weights import DecoderWeights

TOKEN_IDS = [int(token) for token in np.random.default_rng(0).integers(3, 320, 60)]

# llama.cpp has no architecture for these, or fixes what the variant varies.
NOT_IN_GGUF = {
    *("mistral-window", "mistral-full", "ministral-mixed", "olmo3-yarn", "qwen2-window", "qwen3-window"),
    *(
        "smollm3-tied",
        "smollm3-window",
        "gemma2-tied",
        "gemma2-untied",
        "gemma3-tied",
        "gemma3-untied",
        "gemma3-linear",
    ),
}


def variants():
    """Tiny models that a GGUF file can hold, the last few made to fit what llama.cpp takes for granted."""
    models = {name: make for name, make in TINY_MODELS.items() if name not in NOT_IN_GGUF}
    for name in ("smollm3-tied", "gemma2-tied", "gemma3-tied", "gemma3-linear"):
        models[name] = lambda name=name: fitted(TINY_MODELS[name]())
    return models


def fitted(config):
    if config.model_type == "smollm3":
        config.no_rope_layers = [1, 1, 1, 0]
    if config.model_type.startswith("gemma"):
        config.query_pre_attn_scalar = config.head_dim
    if config.model_type == "gemma3_text":
        config.final_logit_softcapping = None
        config.rope_parameters["sliding_attention"]["rope_theta"] = 10000.0
    return config


VARIANTS = variants()


def model_of(name):
    model = transformers.AutoModelForCausalLM.from_config(VARIANTS[name](), attn_implementation="eager")
    fill_with_noise(model, seed=4)
    return model.eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_converted_model_computes_the_same(name, tmp_path):
    model = model_of(name)
    write_gguf(model, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    spec = decoder_spec(checkpoint.config)
    with torch.no_grad():
        expected = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    assert np.abs(logits(spec, DecoderWeights(checkpoint, spec), TOKEN_IDS) - expected).max() < 1e-4


def test_every_architecture_is_among_them():
    model_types = {make().model_type for make in VARIANTS.values()}
    assert model_types == {architecture.model_type for architecture in ARCHITECTURES.values()}


# Not Qwen 3, whose heads transformers takes to be of size 128 whatever the file says.
@pytest.mark.parametrize("name", ["llama-untied", "qwen2-tied", "phi3-untied", "gemma2-tied", "gemma3-tied"])
def test_transformers_reads_the_same_tensors_from_the_file(name, tmp_path):
    write_gguf(model_of(name), tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).state_dict()
    ours = open_checkpoint(tmp_path / "model.gguf")
    assert set(ours.names()) <= set(theirs)
    for tensor in ours.names():
        np.testing.assert_array_equal(ours.rows(tensor, 0, ours.shape(tensor)[0]), theirs[tensor].numpy())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_block_formats_lose_only_their_own_precision(kind, tmp_path):
    model = model_of("llama-untied")
    write_gguf(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"):
        exact = model.state_dict()[name].numpy()
        difference = np.abs(checkpoint.rows(name, 0, len(exact)) - exact).max()
        assert difference < np.abs(exact).max() * (0.15 if kind.startswith("Q4") else 0.08)


@given(start=st.integers(0, 64), count=st.integers(0, 64), part=st.sampled_from(["q_proj", "o_proj"]))
def test_any_range_of_rows_of_permuted_and_plain_tensors(tmp_path_factory, start, count, part):
    path = tmp_path_factory.getbasetemp() / "ranges.gguf"
    if not path.exists():
        write_gguf(model_of("llama-untied"), path, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(path)
    name = f"model.layers.0.self_attn.{part}.weight"
    stop = min(start + count, 64)
    rows = checkpoint.rows(name, start, stop)
    assert rows.flags.c_contiguous
    np.testing.assert_array_equal(rows, checkpoint.rows(name, 0, 64)[start:stop])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("expert_count", 8),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("attention.sliding_window", 8),
        ("attention.causal", False),
        ("attention.value_length", 8),
    ],
)
def test_a_setting_that_is_not_understood_is_refused_by_name(setting, value, tmp_path):
    write_gguf(model_of("llama-untied"), tmp_path / "model.gguf", **{setting: value})
    with pytest.raises(UnsupportedModelError, match=setting):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_folder_that_holds_nothing_but_the_file_is_opened_too(tmp_path):
    write_gguf(model_of("llama-tied"), tmp_path / "some-model.gguf")
    assert open_checkpoint(tmp_path).name == "some-model"


@pytest.fixture(scope="module")
def real_pair(smollm2_checkpoint, smollm2_gguf):
    """The real model, read by transformers and written as a folder; and the file it was read from."""
    return open_checkpoint(smollm2_checkpoint), open_checkpoint(smollm2_gguf)


def test_the_real_model_has_the_same_weights_and_specification(real_pair):
    folder, file = real_pair
    assert decoder_spec(file.config) == decoder_spec(folder.config)
    assert file.generation_config.items() <= folder.generation_config.items()
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [name for name in folder.names() if ".layers.7." in name]
    for name in names:
        stop = min(folder.shape(name)[0], 2000)
        np.testing.assert_array_equal(file.rows(name, 0, stop), folder.rows(name, 0, stop))


def test_the_real_model_has_the_same_tokenizer(real_pair):
    theirs, ours = (
        tokenizers.Tokenizer.from_str(checkpoint.tokenizer_files()["tokenizer.json"].decode())
        for checkpoint in real_pair
    )
    text = (
        Path(__file__).read_text()
        + "\n\n\t  12345 1.5e-3 don't I'LL Ünïcödé 中文字符 😀 <|im_start|>user\nhi<|im_end|>"
    )
    expected = theirs.encode(text)
    assert ours.encode(text).ids == expected.ids
    assert ours.decode(expected.ids, skip_special_tokens=False) == text


def test_the_real_model_has_the_same_chat_template(real_pair):
    folder, file = real_pair
    assert file.tokenizer_files()["chat_template.jinja"] == folder.tokenizer_files()["chat_template.jinja"]
