"""A bundle's exits compute what a torch module written from their formulas does, in every format and for every option.

Tolerances are of log-probabilities, which here range over a few units: 1e-4 in float32, where only the order of sums
differs, and for int8 and int4 once their products no longer round activations to int8, compared with the weights that
are stored; 0.3 with that rounding; 0.02 in fp16, whose activations have 11 bits.
"""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from engines import exported, without_rounded_activations
from exit_models import TorchExit, random_exits, run_exit
from tiny_models import save_tiny

from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import Checkpoint, open_checkpoint
from wavekit_engines.exit_export import add_exits
from wavekit_engines.exit_spec import Exits
from wavekit_engines.quantization import Precision

FLOAT32, FLOAT16, INT8_ACTIVATIONS = 1e-4, 0.02, 0.3
SPLIT = (1, 2, 3)
MODELS = {
    "llama-untied": "a head of its own",
    "llama-tied": "the embedding as head",
    "llama-three-heads": "rows that no block divides",
    "gemma3-tied": "norms with an offset",
    "gemma2-tied": "a soft cap",
    "granite-tied": "scaled logits",
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"vocab": None},
    {"rank": 0, "vocab": None},
    {"rank": 40},  # above a block
    {"rank": 0},
    {"vocab": 5},  # fewer tokens than are scored
]


def states(width: int, rows: int = 7) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32) * 2


def assert_close(bundle: Path, model: Any, exits: Exits, tolerance: float, precision: Precision = "fp32") -> None:
    """Every exit of a bundle names its best tokens in order, with log-probabilities as the module has them."""
    hidden = states(exits.spec.hidden_size)
    for boundary in exits.spec.boundaries:
        tokens, logprobs = run_exit(bundle, boundary, hidden)
        expected = TorchExit(model, exits, boundary, precision)(torch.from_numpy(hidden)).numpy()
        count = min(8, exits.spec.exit_vocab_size)
        assert tokens.shape == logprobs.shape == (len(hidden), count)
        assert (tokens.dtype, logprobs.dtype) == (np.int64, np.float32)
        columns = np.searchsorted(exits.token_ids, tokens)
        assert (exits.token_ids[columns] == tokens).all()
        np.testing.assert_allclose(logprobs, np.take_along_axis(expected, columns, 1), rtol=0, atol=tolerance)
        np.testing.assert_allclose(logprobs, -np.sort(-expected, 1)[:, :count], rtol=0, atol=tolerance)
        assert (np.diff(logprobs, axis=1) <= 0).all()


@dataclasses.dataclass
class Exported:
    """A model, and a bundle of it without exits."""

    model: transformers.PreTrainedModel
    checkpoint: Checkpoint
    bundle: Path

    def assert_exits(self, folder: Path, precision: Precision, tolerance: float, **options: Any) -> None:
        """Exits that are added to a copy of the bundle compute what the module does."""
        exits, copy = random_exits(self.checkpoint, **options), Path(shutil.copytree(self.bundle, folder))
        add_exits(copy, exits, precision=precision)
        assert_close(copy, self.model, exits, tolerance, precision)
        if tolerance == INT8_ACTIVATIONS:
            without_rounded_activations(copy)
            assert_close(copy, self.model, exits, FLOAT32, precision)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    @functools.cache
    def prepare(name: str, precision: Precision = "fp32") -> Exported:
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny(name, folder / "model")
        bundle = exported(folder / "model", folder / "bundle", precision=precision, split=SPLIT)
        return Exported(model, open_checkpoint(folder / "model"), bundle)

    return prepare


@pytest.mark.parametrize("name", MODELS)
def test_fp32(name: str, prepared: Callable[..., Exported], tmp_path: Path) -> None:
    for number, options in enumerate(OPTIONS):
        prepared(name).assert_exits(tmp_path / f"{number}", "fp32", FLOAT32, **options)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-untied", "llama-three-heads", "gemma2-tied"])
def test_quantized(name: str, precision: Precision, prepared: Callable[..., Exported], tmp_path: Path) -> None:
    for number, options in enumerate(OPTIONS[:4]):
        prepared(name).assert_exits(tmp_path / f"{number}", precision, INT8_ACTIVATIONS, **options)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2-tied"])
def test_fp16(name: str, prepared: Callable[..., Exported], tmp_path: Path) -> None:
    for number, options in enumerate(OPTIONS[:2]):
        prepared(name, "fp16").assert_exits(tmp_path / f"{number}", "fp16", FLOAT16, **options)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rows_of_a_quantized_head_are_taken_as_they_are(precision: Precision, block_size: int, tmp_path: Path) -> None:
    """Exits of the same format read the very numbers that the whole table has: the same scores, over fewer tokens."""
    save_tiny("llama-untied", tmp_path / "model")
    checkpoint, forms = open_checkpoint(tmp_path / "model"), {"head_precision": precision, "block_size": block_size}
    whole, some = (random_exits(checkpoint, vocab=vocab, rank=0) for vocab in (None, 100))
    results = []
    for exits in (whole, some):
        bundle = tmp_path / f"bundle{len(results)}"
        options = {"exits": exits, "exit_precision": precision, "exit_top_k": 320, **forms}
        exported(tmp_path / "model", bundle, precision="int8", split=SPLIT, **options)
        results.append(run_exit(bundle, 2, states(64)))
    (all_tokens, all_logprobs), (tokens, logprobs) = results
    scores = np.empty_like(all_logprobs)
    np.put_along_axis(scores, all_tokens, all_logprobs, 1)
    taken = np.take_along_axis(scores, tokens, 1)
    taken -= np.log(np.exp(taken).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, taken, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("head", "precision"), [("int4", "int8"), ("int8", "int4"), ("int4", "fp32"), ("fp32", "int4")]
)
@pytest.mark.parametrize("vocab", [100, None])
def test_rows_are_stored_anew_in_another_format(
    head: Precision, precision: Precision, vocab: int | None, tmp_path: Path
) -> None:
    """What a bundle's own head stands for is what its exits store, as no checkpoint is there to ask."""
    model = save_tiny("llama-untied", tmp_path / "model")
    exits = random_exits(open_checkpoint(tmp_path / "model"), vocab=vocab)
    options = {"head_precision": head, "exit_precision": precision}
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=SPLIT, exits=exits, **options)
    with torch.no_grad():
        rows = model.lm_head.weight
        rows.copy_(TorchExit(model, random_exits(open_checkpoint(tmp_path / "model"), vocab=None), 1, head).rows)
    without_rounded_activations(bundle)
    assert_close(bundle, model, exits, FLOAT32, precision)


def stored_in(bundle: Path, graph: str) -> dict[str, dict[str, str]]:
    found = onnx.load(bundle / "graphs" / graph, load_external_data=False).graph.initializer
    return {tensor.name: {item.key: item.value for item in tensor.external_data} for tensor in found}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama-tied", "llama-untied"])
def test_the_whole_vocabulary_is_read_where_it_lies(precision: Precision, name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    exits = random_exits(open_checkpoint(tmp_path / "model"), vocab=None, rank=0)
    forms = {"precision": precision, "head_precision": precision, "exit_precision": precision}
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=SPLIT, exits=exits, **forms)
    head, own = stored_in(bundle, "head.onnx"), stored_in(bundle, "exit_2.onnx")
    shared = {name: place for name, place in own.items() if place}
    assert shared == {name: place for name, place in head.items() if place}
    assert not (bundle / "graphs/exits.weights").exists()


def test_rows_of_the_head_are_stored_once_for_all_exits(tmp_path: Path) -> None:
    save_tiny("llama-untied", tmp_path / "model")
    exits = random_exits(open_checkpoint(tmp_path / "model"))
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=SPLIT, exits=exits)
    first, *others = (stored_in(bundle, f"exit_{boundary}.onnx") for boundary in SPLIT)
    shared = ("exits.head", "exits.head.scales", "exits.target_ids", "final_norm")
    assert all({name: other[name] for name in shared} == {name: first[name] for name in shared} for other in others)


def test_each_exit_has_an_adapter_of_its_own_and_rows_do_not_disturb_each_other(tmp_path: Path) -> None:
    save_tiny("llama-untied", tmp_path / "model")
    exits = random_exits(open_checkpoint(tmp_path / "model"))
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=SPLIT, exits=exits, exit_precision="fp32")
    hidden = states(64)
    found = {boundary: run_exit(bundle, boundary, hidden)[1] for boundary in SPLIT}
    assert np.abs(found[1] - found[2]).max() > 0.1 < np.abs(found[2] - found[3]).max()
    alone = np.concatenate([run_exit(bundle, 2, row[None])[1] for row in hidden])
    np.testing.assert_allclose(alone, found[2], rtol=0, atol=1e-5)


def test_the_manifest_says_what_the_exits_are(tmp_path: Path) -> None:
    save_tiny("llama-untied", tmp_path / "model")
    exits = random_exits(open_checkpoint(tmp_path / "model"))
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=(1, 3), exits=exits, exit_top_k=4)
    info = open_bundle(bundle).manifest.exits
    assert info is not None
    assert info.spec == dataclasses.replace(exits.spec, boundaries=(1, 3))
    assert [graph.file for graph in info.graphs] == ["graphs/exit_1.onnx", "graphs/exit_3.onnx"]
    assert (info.precision, info.top_k, info.origin) == ("int8", 4, "random weights, seed 0")
    (hidden,), (tokens, logprobs) = info.graphs[0].inputs, info.graphs[0].outputs
    assert (hidden.name, hidden.dtype, hidden.shape) == ("hidden", "float32", ("n", 64))
    assert (tokens.name, tokens.dtype, tokens.shape) == ("top_tokens", "int64", ("n", 4))
    assert (logprobs.name, logprobs.dtype, logprobs.shape) == ("top_logprobs", "float32", ("n", 4))
    assert info.graphs[0].parameters == 64 + 2 * 8 * 64 + 100 * 64
