"""What only a GPU can show; all of it is skipped, and said, where there is none. `scripts/gpu_check.sh` runs it."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_models import draft_of
from exit_models import random_exits
from standard_engines import relative_error
from test_torch_engine import WAYS, tokens, tree_pass
from tiny_models import save_tiny

import wavekit
from wavekit.backends import open_engines
from wavekit.decoding.decoder import Decoder
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.ort_engine import available_providers

pytestmark = pytest.mark.gpu

MODELS = ("qwen3-window", "gemma2-tied")
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "int4": 1e-4}


@pytest.fixture(scope="module", params=[(name, p) for name in MODELS for p in TOLERANCE], ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle with a random draft head and a random exit, and its precision."""
    name, precision = request.param
    folder = tmp_path_factory.mktemp("gpu")
    save_tiny(name, folder / "model", seed=4)
    checkpoint = open_checkpoint(str(folder / "model"))
    parts = dict.fromkeys(("precision", "draft_precision", "exit_precision"), precision)
    extras: dict[str, Any] = {"draft": draft_of(checkpoint), "exits": random_exits(checkpoint, (2,))}
    export_bundle(checkpoint, folder / "bundle", ExportOptions(split=(2,), **parts, **extras))
    return folder / "bundle", precision


def numbers(bundle: Path, engine: str, device: str) -> dict[str, np.ndarray]:
    found = open_bundle(bundle)
    return tree_pass(Decoder(found.manifest, open_engines(found, engine, device, 1)))


def test_torch_has_the_numbers_of_the_cpu(made: tuple[Path, str]) -> None:
    bundle, precision = made
    expected, found = numbers(bundle, "torch", "cpu"), numbers(bundle, "torch", "cuda")
    for name, array in expected.items():
        assert relative_error(found[name], array) < TOLERANCE[precision], name


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("choice", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"])
def test_torch_writes_the_same_in_every_mode(choice: dict[str, Any], lanes: int, made: tuple[Path, str]) -> None:
    """Every pass but the first two of its kind is a replay of a recorded one."""
    llm, prompt = wavekit.load(made[0], engine="torch", device="cuda", lanes=lanes), tokens(0, 70)
    options = {"max_new_tokens": 60, "stop_token_ids": (), **choice}
    plain = llm.generate(prompt, speculate="off", **options).token_ids
    for way in WAYS:
        assert llm.generate(prompt, speculate=way, **options).token_ids == plain, way


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
    expected, found = numbers(bundle, "onnxruntime", "cpu"), numbers(bundle, "onnxruntime", "cuda")
    for name, array in expected.items():
        assert relative_error(found[name], array) < tolerance, name


@pytest.mark.parametrize("library", ["tensorrt", "tensorrt_rtx"])
def test_a_tensorrt_engine_of_the_head_is_built_loaded_and_run(library: str, tmp_path: Path) -> None:
    """Wavekit has no TensorRT runtime yet: buffers are torch's here, and one graph without a cache is run."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"NOT RUN: {library} is not installed")
    from wavekit_engines.tensorrt import engines
    from wavekit_engines.tensorrt.profiles import Limits

    save_tiny("llama-untied", tmp_path / "model")
    export_bundle(open_checkpoint(str(tmp_path / "model")), tmp_path / "bundle", ExportOptions())
    bundle = open_bundle(tmp_path / "bundle")
    try:
        built = engines.build_engines(bundle, engines.BuildOptions(Limits(context=40, tree=8)), tmp_path / "engines")
    except WavekitError as error:
        pytest.skip(f"NOT RUN: {error}")
    (head,) = (one.info for one in built if one.info.part == "head")
    if head.library != library:
        pytest.skip(f"NOT RUN: wavekit builds with {head.library} here")
    trt = importlib.import_module(library)
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine((tmp_path / "engines" / f"{head.name}.engine").read_bytes())
    assert engine is not None
    context, stream = engine.create_execution_context(), torch.cuda.Stream()
    hidden = torch.randn(4, 64, device="cuda").half()
    logits = torch.zeros(4, bundle.manifest.decoder.vocab_size, device="cuda")
    with torch.cuda.stream(stream):
        assert context.set_optimization_profile_async(0, stream.cuda_stream)
        assert context.set_input_shape("hidden", tuple(hidden.shape))
        for name, tensor in (("hidden", hidden), ("logits", logits)):
            assert context.set_tensor_address(name, tensor.data_ptr())
        stream.wait_stream(torch.cuda.default_stream())
        assert context.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    binding = open_engines(bundle, "torch", "cpu", 1).head.bind()
    rows, expected = hidden.float().cpu().numpy(), np.zeros(tuple(logits.shape), np.float32)
    binding.bind_input("hidden", rows)
    binding.bind_output("logits", expected)
    binding.run()
    assert relative_error(logits.cpu().numpy(), expected) < 1e-2
