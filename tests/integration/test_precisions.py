"""Reduced precision computes with the weights it stores: transformers with those weights gives the same logits.

Products with int8 and int4 weights round their activations to int8, block by block (accuracy level 4 of `MatMulNBits`,
the fast path): each activation is off by up to 1/254 of the largest one in its block. In these models, whose products
sum 48 to 96 terms, that adds up to 6 % of the largest logit. `with_float_activations` takes the rounding out of the
graphs, and what is left is float32 arithmetic: so the whole difference is that rounding.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engines import decoded, exported, opened, without_rounded_activations
from tiny_models import VOCABULARY, save_tiny

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sequence_workers import Engines
from wavekit_engines.bundle import open_bundle
from wavekit_engines.ort_engine import OrtEngine
from wavekit_engines.quantization import BLOCK_SIZES, bits_of, dequantize_rows, quantize_rows

FLOAT32, INT8_ACTIVATIONS, FLOAT16 = 1e-5, 0.1, 0.01  # tolerances, of the largest logit
PROMPT = np.random.default_rng(0).integers(3, VOCABULARY, 60).tolist()

# Tied and untied heads, an embedding that is scaled once gathered, rows that no block size divides (48).
MODELS = ("llama-tied", "llama-untied", "gemma3-tied", "llama-three-heads")
COMBINATIONS = (("int4", "int4"), ("int8", "int8"), ("int4", "int8"), ("int4", "fp32"), ("fp32", "int4"))


def as_stored(weight: torch.Tensor, precision: str, block_size: int) -> torch.Tensor:
    bits = bits_of(precision)
    if bits is None:
        return weight
    rows = weight.detach().numpy()
    return torch.from_numpy(dequantize_rows(quantize_rows(rows, bits, block_size), bits, rows.shape[1]))


def reference(model: transformers.PreTrainedModel, precision: str, head_precision: str, block_size: int) -> np.ndarray:
    """Logits of transformers with the weights that a bundle stores."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                in_vocabulary = "embed_tokens" in name or "lm_head" in name
                parameter.copy_(as_stored(parameter, head_precision if in_vocabulary else precision, block_size))
        return model(torch.tensor([PROMPT])).logits[0].numpy()


def with_float_activations(bundle: Path) -> Decoder:
    """The decoder of a bundle whose quantized products no longer round their activations."""
    manifest = open_bundle(bundle).manifest
    without_rounded_activations(bundle)
    stages = [OrtEngine(bundle, stage.graph, 1) for stage in manifest.stages]
    return Decoder(manifest, Engines(stages, OrtEngine(bundle, manifest.head, 1)))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def assert_computes_with_stored_weights(
    name: str, precision: str, head_precision: str, block_size: int, folder: Path
) -> None:
    model = save_tiny(name, folder / "model", seed=2)
    options = {"precision": precision, "head_precision": head_precision, "block_size": block_size}
    bundle = exported(folder / "model", folder / "bundle", split=(2,), **options)
    expected = reference(model, precision, head_precision, block_size)
    assert distance(opened(bundle).logits(PROMPT), expected) < INT8_ACTIVATIONS
    assert distance(with_float_activations(bundle).logits(PROMPT), expected) < FLOAT32


@pytest.mark.parametrize(("precision", "head_precision"), COMBINATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_stored_weights(name: str, precision: str, head_precision: str, tmp_path: Path) -> None:
    assert_computes_with_stored_weights(name, precision, head_precision, 32, tmp_path)


@pytest.mark.parametrize("block_size", [size for size in BLOCK_SIZES if size != 32])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_every_block_size_works_whether_it_divides_the_rows_or_not(
    precision: str, block_size: int, tmp_path: Path
) -> None:
    assert_computes_with_stored_weights("llama-three-heads", precision, precision, block_size, tmp_path)


@pytest.mark.parametrize("name", ["llama-tied", "gemma3-untied", "phi3-longrope", "qwen3-tied-biases"])
def test_half_precision_runs_on_a_cpu_and_stays_close(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "model", seed=2)
    decoder = opened(exported(tmp_path / "model", tmp_path / "bundle", precision="fp16", split=(2,), taps=(1,)))
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    assert distance(decoder.logits(PROMPT), expected) < FLOAT16
    assert len(decoded(decoder, PROMPT, 20)) == 20


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_texts_in_reduced_precision_do_not_depend_on_the_cut(precision: str, tmp_path: Path) -> None:
    save_tiny("llama-untied", tmp_path / "model", seed=2)
    texts = []
    for split in ((), (2,), (1, 2, 3)):
        bundle = exported(tmp_path / "model", tmp_path / f"bundle{len(split)}", precision=precision, split=split)
        texts.append(decoded(opened(bundle), PROMPT[:20], 60))
    assert texts[0] == texts[1] == texts[2]
