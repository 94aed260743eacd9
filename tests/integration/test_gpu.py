"""What only a GPU can show; all of it is skipped, and said, where there is none. `scripts/gpu_check.sh` runs it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_models import draft_of
from exit_models import random_exits
from standard_engines import relative_error
from test_torch_engine import WAYS, tokens, tree_pass
from tiny_models import save_tiny

import wavekit
from wavekit.backends import open_engines
from wavekit.decoding.decoder import Decoder
from wavekit.llm import LLM
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.ort_engine import available_providers
from wavekit_engines.tensorrt.engines import BuildOptions, build_engines
from wavekit_engines.tensorrt.profiles import Limits

pytestmark = pytest.mark.gpu

MODELS = ("qwen3-window", "gemma2-tied")
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "int4": 1e-4}
TENSORRT_TOLERANCE = {"fp32": 5e-3, "fp16": 1e-2}  # its products of float32 may round to tf32 unless told otherwise


@pytest.fixture(scope="module", params=[(name, p) for name in MODELS for p in TOLERANCE], ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle with a random draft head and a random exit, and its precision."""
    name, precision = request.param
    return exported(name, precision, tmp_path_factory.mktemp("gpu")), precision


def exported(name: str, precision: str, folder: Path) -> Path:
    save_tiny(name, folder / "model", seed=4)
    checkpoint = open_checkpoint(str(folder / "model"))
    parts = dict.fromkeys(("precision", "draft_precision", "exit_precision"), precision)
    extras: dict[str, Any] = {"draft": draft_of(checkpoint), "exits": random_exits(checkpoint, (2,))}
    export_bundle(checkpoint, folder / "bundle", ExportOptions(split=(2,), **parts, **extras))
    return folder / "bundle"


def numbers(bundle: Path, engine: str, device: str) -> dict[str, np.ndarray]:
    found = open_bundle(bundle)
    return tree_pass(Decoder(found.manifest, open_engines(found, engine, device, 1)))


def assert_numbers_of_the_cpu(bundle: Path, engine: str, reference: str, tolerance: float) -> None:
    expected, found = numbers(bundle, reference, "cpu"), numbers(bundle, engine, "cuda")
    for name, array in expected.items():
        assert relative_error(found[name], array) < tolerance, name


def assert_same_in_every_mode(llm: LLM, choice: dict[str, Any]) -> None:
    prompt, options = tokens(0, 70), {"max_new_tokens": 60, "stop_token_ids": (), **choice}
    plain = llm.generate(prompt, speculate="off", **options).token_ids
    for way in WAYS:
        assert llm.generate(prompt, speculate=way, **options).token_ids == plain, way


IN_LANES = pytest.mark.parametrize("lanes", [1, 2])
CHOICES = pytest.mark.parametrize(
    "choice", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"]
)


def test_torch_has_the_numbers_of_the_cpu(made: tuple[Path, str]) -> None:
    assert_numbers_of_the_cpu(made[0], "torch", "torch", TOLERANCE[made[1]])


@IN_LANES
@CHOICES
def test_torch_writes_the_same_in_every_mode(choice: dict[str, Any], lanes: int, made: tuple[Path, str]) -> None:
    """Every pass but the first two of its kind is a replay of a recorded one."""
    assert_same_in_every_mode(wavekit.load(made[0], engine="torch", device="cuda", lanes=lanes), choice)


def test_texts_one_after_the_other_do_not_see_each_other(made: tuple[Path, str]) -> None:
    llm = wavekit.load(made[0], engine="torch", device="cuda", lanes=2)
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_token_ids": (), "speculate": WAYS[3]}
    first = [llm.generate(tokens(seed, 10 + 60 * seed), **options).token_ids for seed in range(4)]
    again = [llm.generate(tokens(seed, 10 + 60 * seed), **options).token_ids for seed in (3, 1, 2, 0)]
    assert [again[index] for index in (3, 1, 2, 0)] == first
    together = llm.generate_batch([tokens(seed, 10 + 60 * seed) for seed in range(4)], **options)
    assert [result.token_ids for result in together] == first


def test_passes_are_recorded_and_replayed(made: tuple[Path, str], caplog: pytest.LogCaptureFixture) -> None:
    llm = wavekit.load(made[0], engine="torch", device="cuda")
    llm.generate(tokens(0, 10), max_new_tokens=20, stop_token_ids=(), speculate="off")
    with llm.decoder.workers.lent(40) as workers:
        assert all(worker._binding._lane._recorded for worker in workers.stages)  # type: ignore[attr-defined]
    assert "cannot be recorded" not in caplog.text


def test_onnxruntime_with_cuda_has_the_numbers_of_the_cpu(made: tuple[Path, str]) -> None:
    if "CUDAExecutionProvider" not in available_providers():
        pytest.skip("NOT RUN: the onnxruntime installed here has no CUDA provider (onnxruntime-gpu has)")
    bundle, precision = made
    if precision == "fp16":
        with pytest.raises(MisuseError, match="fp16"):
            wavekit.load(bundle, device="cuda")
        return
    tolerance = 0.1 if precision == "int4" else TOLERANCE[precision]  # on the CPU activations are rounded to int8
    assert_numbers_of_the_cpu(bundle, "onnxruntime", "onnxruntime", tolerance)


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def with_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle with TensorRT engines of its own precision, which the GPU here takes, and that precision."""
    precision: Any = request.param
    bundle = exported(MODELS[0], precision, tmp_path_factory.mktemp("tensorrt"))
    try:
        build_engines(open_bundle(bundle), BuildOptions(Limits(context=192, tree=64), precision))
        wavekit.load(bundle, engine="tensorrt").close()
    except MisuseError as error:  # no library, or none for this card; whatever breaks on the way is a failure
        pytest.skip(f"NOT RUN: {error}")
    return bundle, precision


def test_tensorrt_has_the_numbers_of_the_cpu(with_engines: tuple[Path, str]) -> None:
    assert_numbers_of_the_cpu(with_engines[0], "tensorrt", "torch", TENSORRT_TOLERANCE[with_engines[1]])


@IN_LANES
@CHOICES
def test_tensorrt_writes_the_same_in_every_mode(
    choice: dict[str, Any], lanes: int, with_engines: tuple[Path, str]
) -> None:
    assert_same_in_every_mode(wavekit.load(with_engines[0], engine="tensorrt", lanes=lanes), choice)


def test_tensorrt_texts_do_not_see_each_other(with_engines: tuple[Path, str]) -> None:
    llm = wavekit.load(with_engines[0], engine="tensorrt", lanes=2)
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_token_ids": (), "speculate": WAYS[3]}
    alone = [llm.generate(tokens(seed, 10 + 40 * seed), **options).token_ids for seed in range(4)]
    together = llm.generate_batch([tokens(seed, 10 + 40 * seed) for seed in range(4)], **options)
    assert [result.token_ids for result in together] == alone


def test_tensorrt_passes_are_recorded_and_replayed(
    with_engines: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    llm = wavekit.load(with_engines[0], engine="tensorrt")
    llm.generate(tokens(0, 10), max_new_tokens=20, stop_token_ids=(), speculate="off")
    with llm.decoder.workers.lent(40) as workers:
        made = [one for worker in workers.stages for one in worker._binding._passes.values()]  # type: ignore[attr-defined]
    assert any(one._graph is not None for one in made), "the library records by itself, or nothing was recorded"
    assert "cannot be recorded" not in caplog.text
