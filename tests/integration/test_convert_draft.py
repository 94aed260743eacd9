"""``wavekit convert-draft``, on heads that torch saved and for models that transformers reads."""

import json
import os

import numpy as np
import pytest
import torch
import transformers
from command_line import assert_one_line, wavekit_here
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from wavekit_engines.draft_formats import FORMATS, read_draft, write_draft
from wavekit_engines.families import decoder_spec

WIDTH, VOCABULARY, DRAFTED = 64, 320, 50


def weights(layer: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A head for a model of `tiny_models`, as torch holds it."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = torch.randperm(VOCABULARY, generator=generator)[:DRAFTED].sort().values
    marked = torch.zeros(VOCABULARY, dtype=torch.bool)
    marked[tokens] = True
    attention = {f"{name}_proj": (rows, 128) for name, rows in (("q", 64), ("k", 32), ("v", 32))} | {"o_proj": (64, 64)}
    mlp = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    return {
        "d2t": tokens - torch.arange(DRAFTED),
        "t2d": marked,
        **{f"{layer}self_attn.{name}.weight": noise(*shape) for name, shape in attention.items()},
        **{f"{layer}mlp.{name}.weight": noise(*shape) for name, shape in mlp.items()},
        **{
            f"{layer}{norm}.weight": noise(64)
            for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "norm.weight": noise(64),
        "fc.weight": noise(64, 192),
        "lm_head.weight": noise(DRAFTED, 64),
    }


def config(**changes: object) -> str:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFTED,
        **changes,
    }
    return json.dumps(fields)


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def pickled(request, tmp_path):
    """A head as EAGLE's training leaves it: a pickle beside a configuration without ids."""
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text(config())
    torch.save(weights("midlayer.", request.param), folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def model(tmp_path):
    """A target of four layers."""
    save_tiny("llama-untied", tmp_path / "model")
    return tmp_path / "model"


def test_a_pickle_is_read_as_torch_reads_it(pickled, tmp_path):
    stored = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    draft = read_draft(pickled, boundaries=(1, 2, 3))
    assert draft.dtype == str(stored["fc.weight"].dtype).removeprefix("torch.")
    np.testing.assert_array_equal(draft.weights["fc"], stored["fc.weight"].float().numpy())
    np.testing.assert_array_equal(draft.d2t, stored["d2t"].numpy())
    write_draft(tmp_path / "copy", draft, "specforge")
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert copy.keys() == stored.keys()
    for name, values in stored.items():
        assert copy[name].dtype == values.dtype
        assert torch.equal(copy[name], values), name


def test_a_module_saved_with_buffers_and_views(tmp_path):
    """`state_dict` of a module carries metadata, and slices share a storage with what they were cut from."""
    head = torch.nn.Linear(64, VOCABULARY, bias=False)
    tensors = weights("midlayer.", torch.float32) | {"lm_head.weight": head.weight.detach()[7 : 7 + DRAFTED]}
    state = torch.nn.Module().state_dict()
    state.update(tensors)
    (tmp_path / "config.json").write_text(config())
    torch.save(state, tmp_path / "pytorch_model.bin")
    draft = read_draft(tmp_path, boundaries=(1, 2, 3))
    np.testing.assert_array_equal(draft.weights["head"], head.weight.detach().numpy()[7 : 7 + DRAFTED])


class Evil:
    """What torch.load without weights_only would run."""

    def __reduce__(self):
        return (os.system, ("touch evil-was-run",))


def test_a_pickle_with_code_is_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(config())
    torch.save({"d2t": Evil()}, tmp_path / "pytorch_model.bin")
    result = wavekit_here(capfd, "convert-draft", tmp_path, "-o", tmp_path / "out", "--to", "specforge")
    assert_one_line(result, 1, f"pytorch_model.bin asks for {os.name}.system", "do not load it anywhere")
    assert not (tmp_path / "evil-was-run").exists()


@pytest.mark.parametrize("form", FORMATS[1:])
def test_the_command_converts_there_and_back(form, tmp_path, model, capfd):
    (tmp_path / "config.json").write_text(config(rope_theta=300.0))
    save_file(weights("midlayer.", torch.bfloat16), tmp_path / "model.safetensors")
    there, back = tmp_path / "there", tmp_path / "back"
    taps = ["--boundaries", "1,2,3", "--target", model]
    result = wavekit_here(capfd, "convert-draft", tmp_path, "-o", there, "--to", form, *taps)
    assert result.returncode == 0
    assert b"taps at boundaries 1, 2, 3, 50 draft tokens, bfloat16" in result.stdout
    result = wavekit_here(capfd, "convert-draft", there, "-o", back, "--to", "specforge", "--target", model)
    assert result.returncode == 0
    before, after = load_file(tmp_path / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(values, after[name]) for name, values in before.items())
    assert read_draft(back).spec.boundaries == (1, 2, 3)


def test_transformers_reads_the_rope_that_was_meant(tmp_path, model):
    """One configuration for versions 4 and 5: the frequencies are those the head was read with."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for fields in (
        {"rope_theta": 500.0, "rope_scaling": scaling},
        {"rope_parameters": {**scaling, "rope_theta": 500.0}},
        {"rope_theta": 500.0},
    ):
        (tmp_path / "config.json").write_text(config(**fields))
        save_file(weights("midlayer.", torch.float32), tmp_path / "model.safetensors")
        draft = read_draft(tmp_path, boundaries=(1, 2, 3))
        for form in FORMATS[1:]:
            write_draft(tmp_path / form, draft, form, replace=True)
            written = json.loads((tmp_path / form / "config.json").read_text())
            written = written.get("transformer_layer_config", written)
            old = {key: value for key, value in written.items() if key != "rope_parameters"}
            new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
            for spelling in (written, old, new):
                rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**spelling))
                np.testing.assert_allclose(rotary.inv_freq.numpy(), draft.spec.rope.inv_freq, rtol=1e-6)
                assert rotary.attention_scaling == pytest.approx(draft.spec.rope.factor)


def test_transformers_opens_the_folder(tmp_path, model):
    (tmp_path / "config.json").write_text(config())
    save_file(weights("midlayer.", torch.float32), tmp_path / "model.safetensors")
    draft = read_draft(
        tmp_path, boundaries=(1, 2, 3), target=decoder_spec(json.loads((model / "config.json").read_text()))
    )
    write_draft(tmp_path / "flat", draft, "modelopt")
    opened = transformers.AutoConfig.from_pretrained(tmp_path / "flat")
    assert opened.eagle_config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert (opened.draft_vocab_size, opened.vocab_size, opened.num_hidden_layers) == (DRAFTED, VOCABULARY, 1)


def test_misuse_of_the_command(tmp_path, model, capfd):
    def convert(*arguments: object):
        return wavekit_here(capfd, "convert-draft", *map(str, arguments))

    (tmp_path / "config.json").write_text(config())
    save_file(weights("midlayer.", torch.float32), tmp_path / "model.safetensors")
    out = tmp_path / "out"
    assert_one_line(convert(tmp_path, "-o", out, "--to", "specforge"), 2, "no layer ids", "--from eagle --target MODEL")
    assert_one_line(convert(tmp_path, "-o", out), 2, "--to")
    assert_one_line(convert(tmp_path, "-o", out, "--to", "medusa"), 2, "medusa")
    assert_one_line(convert(tmp_path / "no", "-o", out, "--to", "eagle"), 2, "is no folder")
    assert_one_line(convert(tmp_path, "-o", out, "--to", "eagle", "--boundaries", "1,x"), 2, "boundary numbers")
    wrong = ["--to", "specforge", "--boundaries"]
    assert_one_line(convert(tmp_path, "-o", out, *wrong, "1,2"), 2, "for 3 states")
    assert_one_line(convert(tmp_path, "-o", out, *wrong, "1,2,5", "--target", model), 2, "none beyond 4")
    assert_one_line(convert(tmp_path, "-o", tmp_path, *wrong, "1,2,3"), 2, "exists already", "--force")
    assert_one_line(convert(tmp_path, "-o", out, "--to", "eagle", "--boundaries", "1,2,3"), 2, "--target")
    assert not out.exists()
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: values for name, values in stored.items() if name != "d2t"}, tmp_path / "model.safetensors")
    assert_one_line(convert(tmp_path, "-o", out, *wrong, "1,2,3"), 1, "d2t is missing")


def test_a_first_tap_that_a_server_misreads_is_pointed_out(tmp_path, capfd):
    (tmp_path / "config.json").write_text(config())
    save_file(weights("midlayer.", torch.float32), tmp_path / "model.safetensors")
    for taps, noted in (("2,3,4", False), ("1,2,3", True)):
        out = tmp_path / taps
        result = wavekit_here(capfd, "convert-draft", tmp_path, "-o", out, "--to", "specforge", "--boundaries", taps)
        assert (b"note: some versions of SGLang" in result.stderr) == noted
