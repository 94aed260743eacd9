"""Every family's graphs write what transformers writes: same logits, same greedy tokens, however they are cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engines import decoded, exported, opened
from tiny_models import CONTEXT, TINY_MODELS, VOCABULARY, save_tiny

PROMPT, NEW = 21, 40  # both sides of every window and every original context of the catalogue


def reference(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint in transformers, float32 and eager attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids that are no special tokens."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder, seed=5)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> transformers.PreTrainedModel:
    return reference(checkpoint)


@pytest.mark.parametrize("split", [(), (2,), (1, 2, 3)], ids=lambda split: f"{len(split) + 1}-stages")
def test_greedy_tokens_equal_transformers(checkpoint: Path, model, split: tuple[int, ...], tmp_path: Path) -> None:
    decoder = opened(exported(checkpoint, tmp_path / "bundle", split=split))
    for seed in range(3):
        prompt = tokens(seed, PROMPT)
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None
        )[0, PROMPT:]
        assert decoded(decoder, prompt, NEW) == expected.tolist()


def test_logits_of_a_long_prompt_equal_transformers(checkpoint: Path, model, tmp_path: Path) -> None:
    prompt = tokens(9, CONTEXT - 20)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    ours = opened(exported(checkpoint, tmp_path / "bundle", split=(1,), taps=(0, 1, 2))).logits(prompt)
    np.testing.assert_allclose(ours, expected, atol=1e-4 * max(1.0, np.abs(expected).max()))
