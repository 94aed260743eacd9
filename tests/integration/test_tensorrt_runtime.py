"""The TensorRT runtime's own code against an imitation of CUDA and of the library; no engine has ever run on a GPU.

The imitation (`fake_cuda`, `fake_tensorrt_device`) runs the very graphs that engines are built from, on the addresses
that the runtime sets and when it waits for them. So these tests hold buffers, masks, caches, streams and recorded
graphs to the decoder's contract. They say nothing of the real library's kernels.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import fake_tensorrt_device
import numpy as np
import pytest
import torch
from draft_models import draft_of
from engines import opened
from exit_models import random_exits
from fake_cuda import FakeCuda
from fake_device import LIMITS, build_here, plug_in
from standard_engines import relative_error
from test_torch_engine import WAYS, tokens, tree_pass
from tiny_models import save_tiny

import wavekit
from wavekit import Speculation
from wavekit.backends import open_engines
from wavekit.decoding.decoder import Decoder
from wavekit.llm import LLM
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import ContextLengthError, MisuseError, WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.tensorrt import buffers, passes
from wavekit_engines.tensorrt.device_cache import DeviceCache
from wavekit_engines.tensorrt.profiles import Limits
from wavekit_engines.tensorrt.runtime import TensorRTEngines

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": ()}


def exported(name: str, folder: Path, precision: str = "fp32") -> Path:
    """A model whose later layers matter little, so that its exit is often right, with a random draft head."""
    model = save_tiny(name, folder / "model", seed=4)
    for layer in model.model.layers[2:]:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.data *= 0.1
    model.save_pretrained(folder / "model")
    checkpoint = open_checkpoint(str(folder / "model"))
    parts = dict.fromkeys(("precision", "draft_precision", "exit_precision"), precision)
    exits = random_exits(checkpoint, (2,), rank=0, vocab=None)
    options = ExportOptions(split=(2,), taps=(1,), draft=draft_of(checkpoint, seed=5), exits=exits, **parts)
    export_bundle(checkpoint, folder / "bundle", options)
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = exported("qwen3-window", tmp_path_factory.mktemp("tensorrt"))
    build_here(path)
    return path


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return plug_in(monkeypatch)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> dict[int, list[int]]:
    """What ONNX Runtime writes without speculation, by prompt."""
    llm = wavekit.load(bundle, threads=1)
    return {seed: llm.generate(prompt(seed), speculate="off", **OPTIONS).token_ids for seed in range(3)}


def prompt(seed: int) -> list[int]:
    return tokens(seed, (70, 15, 100)[seed])


def on_device(bundle: Path, lanes: int = 2, **options: Any) -> LLM:
    return wavekit.load(bundle, engine="tensorrt", lanes=lanes, **options)


def decoder_of(bundle: Path) -> Decoder:
    found = open_bundle(bundle)
    return Decoder(found.manifest, open_engines(found, "tensorrt", None, 1))


def differences(bundle: Path) -> float:
    """The largest between its numbers and ONNX Runtime's, for a prompt and a tree behind it."""
    expected, found = tree_pass(opened(bundle)), tree_pass(decoder_of(bundle))
    assert expected.keys() == found.keys()
    return max(relative_error(found[name], array) for name, array in expected.items())


def test_prompts_and_trees_have_the_numbers_of_onnxruntime(bundle: Path, cuda: FakeCuda) -> None:
    assert differences(bundle) < 1e-5


@pytest.mark.parametrize("lanes", [1, 2])
def test_every_mode_writes_plain_decodings_text(
    lanes: int, bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = list[int]()
    move = DeviceCache._move
    monkeypatch.setattr(DeviceCache, "_move", lambda cache, *rows: moved.append(1) or move(cache, *rows))
    llm = on_device(bundle, lanes)
    for way in ["off", *WAYS]:
        assert llm.generate(prompt(0), speculate=way, **OPTIONS).token_ids == plain[0], way
    assert moved  # a branch was kept that was not the first
    assert cuda.launched > 100  # decoding replays what was recorded


def test_a_sampled_text_is_that_of_onnxruntime(bundle: Path, cuda: FakeCuda) -> None:
    options = {**OPTIONS, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    expected = wavekit.load(bundle, threads=1).generate(prompt(1), speculate="off", **options).token_ids
    llm = on_device(bundle)
    for way in ("off", WAYS[3]):
        assert llm.generate(prompt(1), speculate=way, **options).token_ids == expected


def test_generations_share_engines_and_not_buffers(bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]]) -> None:
    llm = on_device(bundle, concurrency=3)
    results = llm.generate_batch([prompt(seed) for seed in range(3)], speculate=WAYS[3], **OPTIONS)
    assert [result.token_ids for result in results] == [plain[seed] for seed in range(3)]


@pytest.mark.parametrize("name", ["gemma2-tied", "phi3-longrope", "olmo2-tied-biases"])
def test_other_families_have_their_numbers_too(name: str, tmp_path: Path, cuda: FakeCuda) -> None:
    """Soft caps and two windows, rotary tables for long texts, norms over all heads."""
    save_tiny(name, tmp_path / "model")
    export_bundle(open_checkpoint(str(tmp_path / "model")), tmp_path / "bundle", ExportOptions(split=(2,)))
    build_here(tmp_path / "bundle")
    assert differences(tmp_path / "bundle") < 1e-5
    text = {engine: wavekit.load(tmp_path / "bundle", engine=engine) for engine in ("onnxruntime", "tensorrt")}
    for length in (12, 90):  # either side of where longrope switches
        found = [llm.generate(tokens(3, length), speculate="off", **OPTIONS).token_ids for llm in text.values()]
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def rounded(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in fp32 with engines in fp16."""
    path = exported("llama-untied", tmp_path_factory.mktemp("rounded"))
    build_here(path, "fp16")
    return path


def test_in_fp16_a_row_has_the_same_bits_whatever_runs_beside_it(rounded: Path, cuda: FakeCuda) -> None:
    found = open_bundle(rounded)
    engine = TensorRTEngines(found, "cuda").engine(found.manifest.head)
    rows = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    together = logits(engine, rows)
    for count in (1, 2, 7, 33):
        assert np.array_equal(logits(engine, rows[:count]), together[:count])


def logits(engine: Any, rows: np.ndarray) -> np.ndarray:
    found, binding = np.zeros((len(rows), 320), np.float32), engine.bind()
    binding.bind_input("hidden", rows)
    binding.bind_output("logits", found)
    binding.run()
    return found


def test_engines_in_fp16_of_a_bundle_in_fp32_write_one_text_in_every_mode(rounded: Path, cuda: FakeCuda) -> None:
    """They round, so the decoder keeps to chains, as with a bundle in fp16."""
    llm, options = on_device(rounded), {**OPTIONS, "max_new_tokens": 8}
    text = llm.generate(prompt(1), speculate="off", **options).token_ids
    for way in WAYS:
        assert llm.generate(prompt(1), speculate=way, **options).token_ids == text, way
    assert differences(rounded) < 1e-2


def test_bfloat16_rounds_as_torch_does() -> None:
    numbers = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 1e3
    special = np.array([0, -0.0, 1, 1.00390625, 1.01171875, np.inf, -np.inf, 3e38], np.float32)
    for array in (numbers, special):
        expected = torch.from_numpy(array).to(torch.bfloat16)
        found = np.zeros(len(array), buffers.stored_dtype("bfloat16"))
        buffers.store(found, array, "bfloat16")
        assert np.array_equal(buffers.loaded(found, "bfloat16"), expected.float().numpy())


def test_a_cache_on_the_device_moves_rows_as_one_of_the_host(cuda: FakeCuda) -> None:
    cuda.enter()
    generator = np.random.default_rng(0)
    host, device = KVCache(2, 3, 4, 40, "float32"), DeviceCache(cuda, (2, 3, 4), 40, 104, "float32")
    assert not device.array.any()  # and the zeros are written
    filled = generator.standard_normal((2, 2, 1, 3, 104, 4)).astype(np.float32)
    host.array[...] = filled[..., :40, :]
    for row in range(2):
        for part, address in enumerate(device.addresses(row)):
            ctypes.memmove(address, filled[row, part].tobytes(), filled[row, part].nbytes)
    for start, rows in ((3, [5, 6, 9]), (0, [7, 1, 2]), (10, [11]), (2, [2, 3, 5, 4, 9, 20, 21, 22, 39])):
        host.length = device.length = 40
        for cache in (host, device):
            cache.keep(start, rows)
        assert device.length == host.length
        np.testing.assert_array_equal(device.array, host.array)


def test_a_lane_that_does_not_wait_is_noticed(bundle: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the imitation has teeth: what is read or written too early is wrong here too."""
    monkeypatch.setattr(passes.Lane, "wait", lambda lane: None)
    with np.errstate(all="ignore"):
        assert not differences(bundle) < 1e-2


def test_a_cache_that_is_not_waited_for_is_noticed(
    bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCache, "follow", lambda cache, stream: None)
    with pytest.raises((AssertionError, WavekitError)):
        assert on_device(bundle).generate(prompt(0), speculate=WAYS[3], **OPTIONS).token_ids == plain[0]


def test_where_nothing_can_be_recorded_passes_run_as_they_are(
    bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    cuda.capture_fails = True
    assert on_device(bundle).generate(prompt(0), speculate=WAYS[3], **OPTIONS).token_ids == plain[0]
    assert cuda.launched == 0
    assert "cannot be recorded as a CUDA graph, and runs without" in caplog.text


def test_where_the_library_does_not_let_it_it_records_by_itself(
    bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_tensorrt_device.Failures, "capturable", False)
    llm = on_device(bundle)
    assert llm.generate(prompt(0), speculate="off", **OPTIONS).token_ids == plain[0]
    assert cuda.launched == 0
    contexts = llm.decoder._engines.head._loaded._engine.contexts  # type: ignore[attr-defined]
    assert contexts[-1].settings.cuda_graph_strategy == "whole graph capture"


def test_a_pass_that_fails_ends_its_generation_and_no_other(
    bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, count = on_device(bundle), [0]

    def enqueue() -> bool:
        count[0] += 1
        return count[0] != 3

    cuda.capture_fails = True  # so that every pass asks the library
    monkeypatch.setattr(fake_tensorrt_device.Failures, "enqueue", enqueue)
    with pytest.raises(
        WavekitError, match="failed in fake_tensorrt_device: an illegal memory access was enc"
    ) as raised:
        llm.generate(prompt(0), speculate="off", **OPTIONS)
    assert "\n" not in str(raised.value)
    for way in ("off", WAYS[3]):
        assert llm.generate(prompt(0), speculate=way, **OPTIONS).token_ids == plain[0]


def test_a_failure_while_recording_is_no_failure_of_the_text(
    bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake_tensorrt_device.Failures, "enqueue", lambda: not getattr(cuda._entered, "capturing", False)
    )
    assert on_device(bundle).generate(prompt(0), speculate="off", **OPTIONS).token_ids == plain[0]
    assert cuda.launched == 0


def test_a_gpu_without_room_ends_one_generation(bundle: Path, cuda: FakeCuda, plain: dict[int, list[int]]) -> None:
    llm, room = on_device(bundle), cuda.room
    cuda.room = 100_000
    with pytest.raises(WavekitError, match="out of memory"):
        llm.generate(prompt(0), speculate="off", **OPTIONS)
    cuda.room = room
    assert llm.generate(prompt(0), speculate="off", **OPTIONS).token_ids == plain[0]


def test_memory_goes_back_with_the_bundle(bundle: Path, cuda: FakeCuda) -> None:
    room = cuda.room
    llm = on_device(bundle)
    llm.generate(prompt(0), speculate=WAYS[3], **OPTIONS)
    assert cuda.room < room
    llm.close()
    del llm
    gc.collect()
    assert cuda.room == room


def test_limits_of_the_engines_bound_what_can_be_asked_for(bundle: Path, cuda: FakeCuda) -> None:
    llm = on_device(bundle)
    assert llm.manifest.decoder.max_positions == LIMITS.context
    with pytest.raises(ContextLengthError, match="200 tokens, the engines' context holds 192"):
        llm.generate(tokens(0, 200))
    result = llm.generate(tokens(0, 185), speculate=WAYS[0], **OPTIONS)
    assert len(result.token_ids) == 7  # to the last row of the context, trees included
    expected = wavekit.load(bundle, threads=1).generate(tokens(0, 185), speculate="off", **OPTIONS).token_ids
    assert result.token_ids == expected[:7]
    with pytest.raises(MisuseError, match="nodes of a speculation is 65, these engines have room for 64"):
        llm.stream(prompt(0), speculate=Speculation("exits", nodes=65))


def test_engines_for_smaller_trees_than_the_decoders_are_refused_at_load(tmp_path: Path, cuda: FakeCuda) -> None:
    save_tiny("llama-untied", tmp_path / "model")
    export_bundle(open_checkpoint(str(tmp_path / "model")), tmp_path / "bundle", ExportOptions())
    build_here(tmp_path / "bundle", limits=Limits(context=192, tree=8))
    with pytest.raises(MisuseError, match="192 tokens and 8 rows, and the decoder needs 64 of both: build them with"):
        on_device(tmp_path / "bundle")
