"""Qwen2.5-Coder-0.5B and Gemma-3-270M, as SmolLM2: biases, large vocabularies, windows, norms with offset."""

from pathlib import Path

import numpy as np
import pytest
import torch
from prompts import TEXTS
from references import assert_greedy, reference

import wavekit
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.stages import even_split

NEW = 128

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.mark.parametrize("name", ["qwen2_checkpoint", "gemma3_checkpoint"])
def test_greedy_text_equals_transformers(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    checkpoint: Path = request.getfixturevalue(name)
    model = reference(checkpoint)
    layers = model.config.num_hidden_layers
    texts: list[tuple[int, ...]] = []
    for stages in (1, 2, 5, layers):
        bundle = tmp_path / str(stages)
        export_bundle(open_checkpoint(str(checkpoint)), bundle, ExportOptions(split=even_split(layers, stages)))
        llm = wavekit.load(bundle, threads=1)
        prompts = [llm.encode(text) for text in TEXTS]
        written = [llm.generate(ids, max_new_tokens=NEW, stop_token_ids=()).token_ids for ids in prompts]
        if not texts:
            texts = written
            for ids, tokens in zip(prompts, texts, strict=True):
                assert_greedy(model, ids, tokens)
            long = ([token for ids in prompts for token in ids] * 3)[:500]
            with torch.no_grad():
                expected = model(torch.tensor([long])).logits[0].numpy()
            assert np.abs(llm.decoder.logits(long) - expected).max() < 2e-3
        assert written == texts
        del llm
