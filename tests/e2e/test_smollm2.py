"""SmolLM2-135M: the engines write token for token what the checkpoint writes in transformers (fp32, eager)."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from prompts import PROMPTS
from references import assert_greedy, reference

import wavekit
from wavekit.llm import LLM
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.stages import even_split

LAYERS, NEW = 30, 128


@pytest.fixture(scope="module")
def model(smollm2_checkpoint: Path) -> transformers.PreTrainedModel:
    return reference(smollm2_checkpoint)


def staged(checkpoint: Path, folder: Path, stages: int) -> LLM:
    options = ExportOptions(split=even_split(LAYERS, stages), taps=(2, 15, 27))
    export_bundle(open_checkpoint(str(checkpoint)), folder / "bundle", options)
    return wavekit.load(folder / "bundle", threads=1)


@pytest.fixture(scope="module")
def llm(smollm2_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The engines as one stage."""
    return staged(smollm2_checkpoint, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy tokens of one stage after every prompt."""
    return [llm.generate(prompt, max_new_tokens=NEW, stop_token_ids=()).token_ids for prompt in PROMPTS]


def test_greedy_text_equals_transformers(llm: LLM, model, texts: list[tuple[int, ...]]) -> None:
    for prompt, written in zip(PROMPTS, texts, strict=True):
        assert len(written) == NEW
        assert_greedy(model, llm.encode(prompt), written)


@pytest.mark.parametrize("tokens", [48, pytest.param(NEW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stages", [2, 5, LAYERS])
def test_any_number_of_stages_writes_the_same(
    stages: int, tokens: int, smollm2_checkpoint: Path, texts, tmp_path: Path
) -> None:
    cut = staged(smollm2_checkpoint, tmp_path, stages)
    for prompt, written in zip(PROMPTS, texts, strict=True):
        assert cut.generate(prompt, max_new_tokens=tokens, stop_token_ids=()).token_ids == written[:tokens]


def test_text_and_stop_tokens_equal_what_generate_writes(llm: LLM, model) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path)
    for messages in PROMPTS[:2]:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)[0, len(ids) :].tolist()
        result = llm.generate(messages, max_new_tokens=48)
        assert list(result.token_ids) == expected
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_logits_of_a_long_prompt_equal_transformers(llm: LLM, model) -> None:
    ids = [token for prompt in PROMPTS for token in llm.encode(prompt)][:500]
    assert len(ids) == 500
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(llm.decoder.logits(ids) - expected).max() < 2e-3
