"""The torch engine: the numbers of ONNX Runtime's graphs, and of their standard spelling, and the same lossless texts.

It is written from the decoder's description, not from the graphs, so that the two agree says something of both. The
larger suites of speculation, exploration and the decoder have cases with it as slow tests.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import assert_one_line, save_text_model, wavekit_here
from draft_models import draft_of
from engines import exported, opened, without_rounded_activations
from standard_engines import Decoding, passes, relative_error
from test_exploration import random_exits
from test_standard_graph import USUAL
from tiny_models import TINY_MODELS, VOCABULARY, save_tiny

import wavekit
from wavekit import Speculation
from wavekit.backends import open_engines
from wavekit.decoding.decoder import Decoder
from wavekit.llm import LLM
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError
from wavekit_engines.torch_engine import TorchEngines
from wavekit_engines.torch_engine.engine import FIXED_ROWS

TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-4, "int4": 1e-4}
"""Relative to the largest value."""

WAYS: list[Any] = [
    Speculation("draft", depth=3, top_k=3, tokens=12, adaptive=False),
    Speculation("lookup", depth=5, adaptive=False),
    "exits",
    Speculation("draft+exits", depth=3, top_k=2, tokens=6, adaptive=False),
]


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def tree_pass(decoder: Decoder) -> dict[str, np.ndarray]:
    """Boundaries and logits of a prompt and of a tree behind it, each stage fed with what the one before put out."""
    prompt, branches, found = tokens(0, 40), tokens(1, 5), {}
    visible = [[], [40], [40], [40, 41], [40, 42]]
    with decoder.workers.lent(64) as workers:
        workers.reset(False)
        for ids, positions, seen in (
            (prompt, np.arange(40), None),
            (branches, np.array([40, 41, 41, 42, 42]), visible),
        ):
            x = np.array(ids)
            for worker in workers.stages:
                worker.load(x, positions, seen, 40)
                worker.run()
                x = worker.output(worker.stage.last)
                for boundary in worker.stage.boundaries:
                    found[f"boundary {boundary} of {len(ids)}"] = worker.output(boundary).copy()
            found[f"logits of {len(ids)}"] = workers.head.run(x).copy()
    return found


def assert_same(bundle: Path, precision: str) -> None:
    expected, found = tree_pass(opened(bundle)), tree_pass(opened(bundle, engine="torch"))
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert relative_error(found[name], array) < TOLERANCE[precision], name


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in TINY_MODELS])
def test_every_family_has_the_numbers_of_onnxruntime(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model", seed=2)
    for precision in ("fp32", "fp16"):
        bundle = exported(tmp_path / "model", tmp_path / precision, split=(2,), taps=(1,), precision=precision)
        assert_same(bundle, precision)


@pytest.mark.parametrize("name", ["llama-three-heads", "gemma3-tied"])  # 48 features do not fill blocks of 32
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounded_weights_are_the_same_numbers(name: str, precision: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model", seed=2)
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=(1,), precision=precision)
    without_rounded_activations(bundle)
    found = open_bundle(bundle, check_hashes=False)
    pair = [Decoder(found.manifest, open_engines(found, engine, "cpu", 1)) for engine in ("onnxruntime", "torch")]
    expected, ours = map(tree_pass, pair)
    for key, array in expected.items():
        assert relative_error(ours[key], array) < TOLERANCE[precision], key


def test_the_standard_graphs_agree_with_it(tmp_path: Path) -> None:
    save_tiny("gemma3-tied", tmp_path / "model", seed=2)
    bundle = exported(tmp_path / "model", tmp_path / "bundle", split=(2,))
    (ids, positions, seen), *_ = passes(VOCABULARY)
    found = Decoding(bundle, tmp_path, "float32").run(ids, positions, seen)["logits"]
    decoder = opened(bundle, engine="torch")
    assert relative_error(decoder.logits(ids), found) < TOLERANCE["fp32"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with windows, a random draft head and a random exit."""
    folder = tmp_path_factory.mktemp("torch")
    save_tiny("qwen3-window", folder / "model", seed=4)
    draft = draft_of(open_checkpoint(str(folder / "model")), seed=5)
    exits = random_exits(folder / "model", (2,))
    return {
        precision: exported(
            folder / "model",
            folder / precision,
            split=(2,),
            draft=draft,
            exits=exits,
            **dict.fromkeys(("precision", "draft_precision", "exit_precision"), precision),
        )
        for precision in ("fp32", "fp16", "int8")
    }


def in_torch(bundle: Path, lanes: int = 2) -> LLM:
    return wavekit.load(bundle, threads=1, lanes=lanes, engine="torch")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("choice", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"])
def test_speculation_never_changes_a_text(choice: dict[str, Any], precision: str, bundles: dict[str, Path]) -> None:
    llm, prompt = in_torch(bundles[precision]), tokens(0, 15)
    options = {"max_new_tokens": 8 if precision == "fp16" else 24, "stop_token_ids": (), **choice}
    plain = llm.generate(prompt, speculate="off", **options).token_ids
    for way in WAYS:
        assert llm.generate(prompt, speculate=way, **options).token_ids == plain, way


def test_the_texts_are_those_of_onnxruntime(bundles: dict[str, Path]) -> None:
    prompt, options = tokens(1, 20), {"max_new_tokens": 40, "stop_token_ids": (), "speculate": "off"}
    expected = wavekit.load(bundles["fp32"], threads=1).generate(prompt, **options)
    assert in_torch(bundles["fp32"]).generate(prompt, **options).token_ids == expected.token_ids


def test_drafts_and_exits_propose_what_those_of_onnxruntime_do(bundles: dict[str, Path]) -> None:
    """Both learn from each other's rows: what is proposed, kept and wasted is the same in every tick."""
    prompt, found = tokens(2, 20), []
    for engine in ("onnxruntime", "torch"):
        llm = wavekit.load(bundles["fp32"], threads=1, engine=engine)
        result = llm.generate(prompt, max_new_tokens=30, stop_token_ids=(), speculate=WAYS[3])
        found.append((result.token_ids, result.exploration.ticks, result.exploration.explored))
    assert found[0] == found[1]


def test_in_fp16_a_row_has_the_same_bits_whatever_runs_beside_it(bundles: dict[str, Path]) -> None:
    """What the losslessness of fp16 rests on: see `torch_engine.engine`."""
    found = open_bundle(bundles["fp16"])
    engine = TorchEngines(found, "cpu", 1).head()
    rows = np.random.default_rng(0).standard_normal((FIXED_ROWS, 64)).astype(np.float16)
    together = _logits(engine, rows)
    for count in (1, 2, 7, 33):
        assert np.array_equal(_logits(engine, rows[:count]), together[:count])


def _logits(engine: Any, rows: np.ndarray) -> np.ndarray:
    logits, binding = np.zeros((len(rows), VOCABULARY), np.float32), engine.bind()
    binding.bind_input("hidden", rows)
    binding.bind_output("logits", logits)
    binding.run()
    return logits


def test_logits_that_are_no_numbers_leave_the_token_open(bundles: dict[str, Path]) -> None:
    binding, token = TorchEngines(open_bundle(bundles["fp32"]), "cpu", 1).greedy_head().bind(), np.zeros(2, np.int64)
    rows = np.ones((2, 64), np.float32)
    rows[1, 3] = np.nan
    binding.bind_input("hidden", rows)
    binding.bind_output("tokens", token)
    binding.run()
    assert token[0] >= 0 > token[1]


def test_an_engine_or_device_that_is_not_there_is_named(bundles: dict[str, Path]) -> None:
    for options, part in (
        ({"engine": "tensorflow"}, "onnxruntime, torch"),
        ({"engine": "torch", "device": "abacus"}, "abacus"),
        ({"device": "cuda:1"}, "cpu or cuda"),
    ):
        with pytest.raises(MisuseError, match=part):
            wavekit.load(bundles["fp32"], **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_this_machine_lacks_is_named(bundles: dict[str, Path]) -> None:
    for engine in ("torch", "onnxruntime"):
        with pytest.raises(MisuseError, match=r"(?i)cuda"):
            wavekit.load(bundles["fp32"], engine=engine, device="cuda")


def test_the_command_takes_an_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_text_model("llama-tied", tmp_path / "model")
    bundle = exported(tmp_path / "model", tmp_path / "bundle")
    common = ("generate", bundle, "Hello", "-n", "6")
    plain = wavekit_here(capfd, *common)
    assert wavekit_here(capfd, *common, "--engine", "torch").stdout == plain.stdout
    assert_one_line(wavekit_here(capfd, *common, "--engine", "torch", "--device", "abacus"), 2, "abacus")
