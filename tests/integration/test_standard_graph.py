"""A bundle's graphs rewritten in standard ONNX are the same decoder, stage by stage and one after another."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from draft_models import draft_of
from engines import exported, without_rounded_activations
from exit_models import random_exits
from standard_engines import (
    CAPACITY,
    Decoding,
    in_onnxruntime,
    in_reference,
    passes,
    relative_error,
)
from tiny_models import TINY_MODELS, VOCABULARY, save_tiny

from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError
from wavekit_engines.graphs.standard_graph import write_standard_graph
from wavekit_engines.rope import rope_tables

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
"""Relative to the largest value. A bfloat16 has 8 bits, and ONNX's evaluator rounds to it after every node."""

USUAL = {
    *("llama-biases", "mistral-window", "ministral-mixed", "qwen2-window", "qwen3-tied-biases", "smollm3-window"),
    *(
        "phi3-longrope",
        "granite-biases",
        "olmo2-tied-biases",
        "olmo3-yarn",
        "gemma-tied",
        "gemma2-tied",
        "gemma3-linear",
    ),
}
"""One model of every family, that with the most to go wrong; the others are slow tests."""


def checkpoint(name: str, folder: Path) -> Path:
    save_tiny(name, folder / "model")
    return folder / "model"


def assert_same(bundle: Path, folder: Path, dtype: str, opened=in_onnxruntime) -> None:
    """Both run the same passes, each on its own states and its own cache."""
    source, standard = Decoding(bundle, folder, None), Decoding(bundle, folder, dtype, opened)
    for one in passes(VOCABULARY):
        expected, found = source.run(*one), standard.run(*one)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == (np.float32 if name == "logits" else standard.dtype)
            assert relative_error(found[name], array) < TOLERANCE[dtype], name


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in TINY_MODELS])
def test_every_family_decodes_alike(name: str, tmp_path: Path) -> None:
    assert_same(exported(checkpoint(name, tmp_path), tmp_path / "b", split=(2,), taps=(1,)), tmp_path, "float32")


@pytest.mark.parametrize(
    ("name", "precision"), [("llama-biases", "fp16"), ("phi3-partial", "fp32"), ("gemma2-tied", "fp16")]
)
def test_float16(name: str, precision: str, tmp_path: Path) -> None:
    assert_same(exported(checkpoint(name, tmp_path), tmp_path / "b", precision=precision), tmp_path, "float16")


@pytest.mark.parametrize("name", ["olmo2-untied", "gemma2-tied"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    bundle = exported(checkpoint(name, tmp_path), tmp_path / "b", split=(1,))
    assert_same(bundle, tmp_path, "bfloat16", in_reference)


@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [
        ("llama-three-heads", "int8", "float32"),  # 48 features do not fill blocks of 32
        ("llama-three-heads", "int4", "float32"),
        ("gemma3-tied", "int8", "float16"),
        ("llama-biases", "int4", "float16"),
    ],
)
def test_quantized_weights_stay_the_same_numbers(name: str, precision: str, dtype: str, tmp_path: Path) -> None:
    bundle = exported(checkpoint(name, tmp_path), tmp_path / "b", precision=precision)
    without_rounded_activations(bundle)
    assert_same(bundle, tmp_path, dtype)


def test_each_stage_alone_on_the_states_that_the_other_graphs_made(tmp_path: Path) -> None:
    bundle = exported(checkpoint("gemma3-tied", tmp_path), tmp_path / "b", split=(1, 2, 4), taps=(3,))
    source, standard = Decoding(bundle, tmp_path, None), Decoding(bundle, tmp_path, "float32")
    for tokens, *where in passes(VOCABULARY):
        x, shared, own = np.array(tokens), source.begin(*where), standard.begin(*where)
        for number, stage in enumerate(source.manifest.stages):
            expected, found = source.stage(number, x, shared), standard.stage(number, x, own)
            for name, array in expected.items():
                assert relative_error(found[name], array) < TOLERANCE["float32"], name
            x = expected[f"boundary_{stage.last}"]


@pytest.mark.parametrize(
    ("options", "precision", "dtype"),
    [
        ({}, "fp32", "float32"),
        ({"fc_norm": "each", "qkv_bias": True}, "int4", "float32"),
        ({"fc_norm": "joint"}, "fp16", "float16"),
    ],
)
def test_a_draft_head_drafts_alike(options: dict, precision: str, dtype: str, tmp_path: Path) -> None:
    model = checkpoint("llama-untied", tmp_path)
    draft = draft_of(open_checkpoint(model), own_embedding=precision == "int4", **options)
    bundle = exported(model, tmp_path / "b", precision=precision, draft=draft, draft_precision=precision)
    if precision == "int4":
        without_rounded_activations(bundle)
    info = open_bundle(bundle, check_hashes=False).manifest.draft
    assert info is not None
    write_standard_graph(bundle / info.graph.file, tmp_path / "draft.onnx", dtype, CAPACITY)
    runs = in_onnxruntime(bundle / info.graph.file), in_onnxruntime(tmp_path / "draft.onnx")
    spec, generator, before = draft.spec, np.random.default_rng(0), 0
    caches = [{f"{k}_draft": np.zeros((1, 2, CAPACITY, 16), dtype) for k in ("key", "value")} for _ in runs]
    ropes = rope_tables(spec.rope, CAPACITY, False)
    for first, fed in ((5, 0), (1, 2), (0, 4)):
        count = first + fed
        stop = before + count
        feed = {
            "taps": generator.standard_normal((1, first, 3 * spec.hidden_size)).astype(dtype),
            "hidden": generator.standard_normal((1, fed, spec.hidden_size)).astype(dtype),
            "token_ids": generator.integers(0, VOCABULARY, (1, count)),
            "positions": np.arange(before, stop)[None],
            "head_rows": np.arange(count),
            **{f"rope_draft_{part}": t.astype(dtype) for part, t in zip(("cos", "sin"), ropes, strict=True)},
        }
        mask = np.full((count, CAPACITY), -np.inf)
        mask[np.arange(CAPACITY)[None] <= np.arange(before, stop)[:, None]] = 0
        mask[-1, before // 2] = -np.inf  # not only what comes later is hidden
        source_mask = np.where(np.arange(CAPACITY) < stop, mask, 0)
        rows = {"last_rows": np.array([stop - 1], np.int32), "total_rows": np.array([CAPACITY], np.int32)}
        expected = runs[0]({**feed, **rows, "mask": source_mask[None, None].astype(dtype), **caches[0]})
        found = runs[1]({**feed, "first_row": np.array([before]), "mask": mask[None, None].astype(dtype), **caches[1]})
        for outputs, cache in ((expected, caches[0]), (found, caches[1])):
            cache |= {name: outputs[f"{name}_out"] for name in cache}
        assert relative_error(found["fed_back"], expected["fed_back"]) < TOLERANCE[dtype]
        np.testing.assert_allclose(found["top_logprobs"], expected["top_logprobs"], atol=5 * TOLERANCE[dtype])
        assert found["top_logprobs"].dtype == np.float32
        if dtype == "float32":
            np.testing.assert_array_equal(found["top_tokens"], expected["top_tokens"])
        before = stop


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("int4", "float32"), ("fp16", "float16")])
@pytest.mark.parametrize("vocab", [100, None])
def test_an_exit_scores_alike(precision: str, dtype: str, vocab: int | None, tmp_path: Path) -> None:
    model = checkpoint("granite-tied", tmp_path)  # which scales its logits
    exits = random_exits(open_checkpoint(model), (2,), vocab=vocab)
    bundle = exported(model, tmp_path / "b", precision=precision, split=(2,), exits=exits, exit_precision=precision)
    if precision == "int4":
        without_rounded_activations(bundle)
    info = open_bundle(bundle, check_hashes=False).manifest.exits
    assert info is not None
    write_standard_graph(bundle / info.graphs[0].file, tmp_path / "exit.onnx", dtype, CAPACITY)
    feed = {"hidden": np.random.default_rng(0).standard_normal((5, 64)).astype(dtype)}
    expected = in_onnxruntime(bundle / info.graphs[0].file)(feed)
    found = in_onnxruntime(tmp_path / "exit.onnx")(feed)
    np.testing.assert_allclose(found["top_logprobs"], expected["top_logprobs"], atol=5 * TOLERANCE[dtype])
    if dtype == "float32":
        np.testing.assert_array_equal(found["top_tokens"], expected["top_tokens"])


def test_only_operators_of_the_standard_are_left(tmp_path: Path) -> None:
    bundle = exported(checkpoint("gemma2-tied", tmp_path), tmp_path / "b", precision="int4", split=(2,))
    for source in (bundle / "graphs").glob("*.onnx"):
        write_standard_graph(source, tmp_path / source.name, "float16", CAPACITY)
        model = onnx.load(tmp_path / source.name)
        onnx.checker.check_model(model)
        assert {node.domain for node in model.graph.node} == {""}


def test_a_weight_that_float16_cannot_hold_is_named(tmp_path: Path) -> None:
    model = save_tiny("llama-untied", tmp_path / "model")
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = 1e6
    model.save_pretrained(tmp_path / "model")
    bundle = exported(tmp_path / "model", tmp_path / "b")
    with pytest.raises(MisuseError, match=r"layers\.1\.down holds values too large for float16"):
        write_standard_graph(bundle / "graphs" / "stage_0.onnx", tmp_path / "s.onnx", "float16", CAPACITY)
    write_standard_graph(bundle / "graphs" / "stage_0.onnx", tmp_path / "s.onnx", "bfloat16", CAPACITY)
