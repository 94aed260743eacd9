"""Boundary k is what transformers calls hidden_states[k], for every family, and the last is before the final norm."""

from pathlib import Path

import numpy as np
import pytest
import torch
from calibration_models import change_weights, reference_states, save_calibratable
from tiny_models import TINY_MODELS, save_tiny

from wavekit_calibration.errors import NonFiniteStatesError
from wavekit_calibration.hidden_states import capture
from wavekit_calibration.measure import Text, measure
from wavekit_calibration.model import Decoder, open_decoder, take_apart
from wavekit_calibration.parts_check import check_parts
from wavekit_calibration.sample import sample_positions
from wavekit_calibration.state import RunState
from wavekit_calibration.writer import transformers_writer
from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError

FAMILIES = sorted({name.split("-")[0]: name for name in TINY_MODELS}.values())
TEXTS = [[5, 9, 200, 31, 7, 7, 90, 14, 3, 250, 18, 77], [8, 100, 45, 6, 11], [60, 61, 62, 63, 64, 65, 66, 9]]


def silent(what: str, done: int, total: int) -> None:
    pass


def captured(decoder: Decoder, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """All positions of a batch of texts filled up on the right: by text, [T, D] of every boundary."""
    width = max(map(len, texts))
    ids = torch.tensor([t + [0] * (width - len(t)) for t in texts])
    places = [(s, p) for s, t in enumerate(texts) for p in range(len(t))]
    found: dict[int, torch.Tensor] = {}
    capture(decoder, ids, places, lambda k, states: found.__setitem__(k, states.clone()))
    assert list(found) == list(range(decoder.num_layers + 1))
    lengths = [len(t) for t in texts]
    return [[found[k].split(lengths)[s] for k in sorted(found)] for s in range(len(texts))]


@pytest.mark.parametrize("name", FAMILIES)
def test_boundaries_are_transformers_hidden_states(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    decoder = take_apart(model)
    for text, states in zip(TEXTS, captured(decoder, TEXTS), strict=True):
        expected = reference_states(model, text)
        assert len(states) == len(expected) == decoder.num_layers + 1
        for k, (ours, theirs) in enumerate(zip(states, expected, strict=True)):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4, msg=lambda m, k=k: f"boundary {k}: {m}")
            # an off-by-one would be seen: neighbouring boundaries are far apart
            for other in expected[max(k - 1, 0) : k] + expected[k + 1 : k + 2]:
                assert float((ours - other).abs().max()) > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_norm_and_head_on_the_last_boundary_are_the_models_logits(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    decoder = take_apart(model)
    check_parts(decoder, TEXTS[0])
    last = captured(decoder, TEXTS[:1])[0][-1]
    with torch.inference_mode():
        expected = model(torch.tensor(TEXTS[:1])).logits[0]
        torch.testing.assert_close(decoder.logits(last), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-untied", "gemma3-tied", "granite-tied"])
def test_the_pass_stores_states_entropy_and_lens_of_the_sampled_positions(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "model")
    decoder = take_apart(model)
    texts = [Text(tuple(t), answer_start=3) for t in TEXTS]
    sample = sample_positions([t.eligible("answer", 1) for t in texts], 9, seed=0)
    lens_slots = np.sort(sample.order[:5])
    state = RunState(tmp_path / "state", {})
    arrays = measure(decoder, texts, sample, lens_slots, state, 2, silent)
    lens = dict(zip(lens_slots.tolist(), arrays.lens, strict=True))
    norm, head = model.get_decoder().norm, model.get_output_embeddings()
    for slot in range(len(sample)):
        ids = list(texts[sample.sequence[slot]].token_ids)
        position = int(sample.position[slot])
        assert 2 <= position < len(ids) - 1
        states = reference_states(model, ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, position]
            expected_lens = [int(head(norm(s[position])).argmax()) for s in states]
        for k, theirs in enumerate(states):
            np.testing.assert_allclose(arrays.rows[slot, k], theirs[position].numpy(), atol=2e-5, rtol=1e-4)
        p = np.exp(logits.double().numpy() - logits.double().numpy().max())
        p /= p.sum()
        assert arrays.entropy[slot] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
        if slot in lens:
            assert lens[slot].tolist() == expected_lens
            assert lens[slot][-1] == int(logits.argmax())


@pytest.mark.parametrize("name", ["qwen3-untied", "gemma2-tied"])
def test_a_model_in_bfloat16_passes_the_same_check(name: str, tmp_path: Path) -> None:
    save_calibratable(name, tmp_path)
    decoder, _ = open_decoder(str(tmp_path), dtype="bfloat16")
    check_parts(decoder, TEXTS[0])
    assert captured(decoder, TEXTS[:1])[0][2].dtype == torch.bfloat16


def test_a_model_that_changes_its_logits_in_another_way_is_refused(tmp_path: Path) -> None:
    model = save_tiny("llama-untied", tmp_path)
    plain = model.forward

    def forward(**inputs: object) -> object:
        output = plain(**inputs)
        output.logits = output.logits + 3.0
        return output

    model.forward = forward
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM does more between its last layer and its logits"):
        check_parts(take_apart(model), TEXTS[0])


def test_a_model_without_decoder_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=16))
    del model.transformer.ln_f
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not a decoder"):
        take_apart(model)


def test_nan_names_the_first_boundary_that_has_it(tmp_path: Path) -> None:
    save_calibratable("llama-untied", tmp_path)
    change_weights(tmp_path, lambda t: t["model.layers.1.mlp.down_proj.weight"].fill_(float("nan")))
    decoder, _ = open_decoder(str(tmp_path))
    with pytest.raises(NonFiniteStatesError, match="boundary 2 are not finite"):
        check_parts(decoder, TEXTS[0])


def test_answers_are_greedy_and_end_with_the_end_token(tmp_path: Path) -> None:
    """Against one full forward pass a token, without cache and padding."""
    model = save_tiny("qwen2-tied", tmp_path)
    decoder = take_apart(model)
    model.generation_config.eos_token_id = [2, 17]
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 5.0
    answers = transformers_writer(decoder)(TEXTS, 12)
    for text, answer in zip(TEXTS, answers, strict=True):
        expected: list[int] = []
        while len(expected) < 12 and not {2, 17} & set(expected):
            with torch.inference_mode():
                expected.append(int(model(torch.tensor([text + expected])).logits[0, -1].argmax()))
        assert answer == expected


def test_layers_spread_by_accelerate_give_the_same_states(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = save_calibratable("llama-tied", tmp_path)
    spread, _ = open_decoder(str(tmp_path), device="auto")
    for ours, theirs in zip(captured(spread, TEXTS[:1])[0], reference_states(model, TEXTS[0]), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=1e-4)


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    save_calibratable("llama-tied", tmp_path / "model")
    with pytest.raises(MisuseError, match="device nonsense cannot be used here"):
        open_decoder(str(tmp_path / "model"), device="nonsense")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="truncated"):
        open_decoder(str(tmp_path / "model.gguf"))
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be opened by transformers"):
        open_decoder(str(tmp_path / "model"))
