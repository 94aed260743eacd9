"""Engines that cannot run here are refused when a bundle is loaded, in one line that says what builds them."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_one_line, wavekit_here
from fake_cuda import FakeCuda
from fake_device import build_here, plug_in
from tiny_models import save_tiny

import wavekit
from wavekit.llm import LLM
from wavekit_engines.bundle import open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import BundleError, MisuseError, WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.tensorrt import cuda, engine_cache, runtime
from wavekit_engines.tensorrt.engine_cache import FOLDER, descriptions
from wavekit_engines.tensorrt.found_engines import Here, find_engines
from wavekit_engines.tensorrt.library import installed

TEXT = {"max_new_tokens": 4, "stop_token_ids": (), "speculate": "off"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles of one shape with other weights, the first with engines."""
    folder = tmp_path_factory.mktemp("bundles")
    for seed in (0, 1):
        save_tiny("llama-untied", folder / "model", seed)
        export_bundle(open_checkpoint(str(folder / "model")), folder / str(seed), ExportOptions())
    build_here(folder / "0")
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plug_in(monkeypatch)
    shutil.copytree(made / "0", tmp_path / "bundle")
    return tmp_path / "bundle"


def on_device(bundle: Path) -> LLM:
    return wavekit.load(bundle, engine="tensorrt")


def head_of(bundle: Path) -> Path:
    (head,) = (bundle / FOLDER).glob("head-*.engine")
    return head


def described_as(bundle: Path, old: str, new: str) -> None:
    """Change what all descriptions of engines say."""
    for file in (bundle / FOLDER).glob("*.json"):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))


def test_a_bundle_without_engines(bundle: Path) -> None:
    shutil.rmtree(bundle / FOLDER)
    with pytest.raises(MisuseError, match=f"bundle has no TensorRT engines; build them: wavekit build {bundle}$"):
        on_device(bundle)


COMMAND = "build again: wavekit build .*/bundle --precision fp32 --max-context 192 --max-tree 64"


def test_engines_of_another_version(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "installed", lambda: ("fake_tensorrt_device", "1.1"))
    with pytest.raises(
        MisuseError, match=f"by fake_tensorrt_device 1.0, and here is fake_tensorrt_device 1.1; {COMMAND}"
    ):
        on_device(bundle)


def test_engines_for_another_gpu(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described_as(bundle, '"compute_capabilities": []', '"compute_capabilities": ["8.6", "12.0"]')
    with pytest.raises(MisuseError, match=rf"for compute capability 8\.6, 12\.0, and this GPU has 8\.9; {COMMAND}"):
        on_device(bundle)
    plug_in(monkeypatch, FakeCuda("12.0"))
    assert on_device(bundle).generate([5, 6], **TEXT).token_ids


def test_a_portable_librarys_command_asks_for_this_gpu_too(bundle: Path) -> None:
    described_as(bundle, '"compute_capabilities": []', '"compute_capabilities": ["8.6"]')
    described_as(bundle, '"fake_tensorrt_device"', '"tensorrt_rtx"')
    with pytest.raises(MisuseError, match=r"--max-tree 64 --compute-capability 8\.6,8\.9$"):
        find_engines(open_bundle(bundle), Here("tensorrt_rtx", "1.0", "8.9"))


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_engine(bundle: Path, damage: str) -> None:
    head = head_of(bundle)
    if damage == "missing":
        head.unlink()
    else:
        data = head.read_bytes()
        head.write_bytes(data[:-1] if damage == "truncated" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(BundleError, match=f"the TensorRT engine of head is damaged; {COMMAND}"):
        on_device(bundle)


def test_a_missing_part(bundle: Path) -> None:
    head_of(bundle).with_suffix(".json").unlink()
    with pytest.raises(
        MisuseError, match=f"the TensorRT engine of head is missing or its description damaged; {COMMAND}"
    ):
        on_device(bundle)


def test_engines_of_other_weights(bundle: Path, made: Path) -> None:
    shutil.rmtree(made / "1" / FOLDER, ignore_errors=True)
    shutil.copytree(bundle / FOLDER, made / "1" / FOLDER)
    with pytest.raises(MisuseError, match="the TensorRT engine of stage_0 was built from other weights; build again"):
        on_device(made / "1")


def test_an_engine_that_the_library_does_not_take(bundle: Path) -> None:
    """Whole and described rightly, as of another GPU where nobody asked for which it was built."""
    head = head_of(bundle)
    head.write_bytes(b"no graph at all")
    (info,) = (info for info in descriptions(bundle / FOLDER) if info.part == "head")
    text = head.with_suffix(".json").read_text()
    text = text.replace(info.sha256, engine_cache.sha256(head)).replace(f'"bytes": {info.bytes}', '"bytes": 15')
    head.with_suffix(".json").write_text(text)
    with pytest.raises(WavekitError, match=f"cannot load head: magic tag does not match; {COMMAND}"):
        on_device(bundle)


def test_of_several_sets_the_one_that_fits_runs(bundle: Path) -> None:
    """Those for exactly this GPU before portable ones, and never those that are damaged."""
    entries = bundle / FOLDER
    for file in sorted(entries.glob("*.json")):
        other = file.with_name(file.stem[:-1] + ("0" if file.stem[-1] != "0" else "1") + ".json")
        key, renamed = file.stem.rpartition("-")[2], other.stem.rpartition("-")[2]
        text = file.read_text().replace(f'"key": "{key}"', f'"key": "{renamed}"')
        other.write_text(text.replace('"compute_capabilities": []', '"compute_capabilities": ["8.9"]'))
        shutil.copy(file.with_suffix(".engine"), other.with_suffix(".engine"))
    here = Here("fake_tensorrt_device", "1.0", "8.9")
    assert {tuple(info.compute_capabilities) for info in find_engines(open_bundle(bundle), here).values()} == {("8.9",)}
    other.with_suffix(".engine").unlink()
    assert {tuple(info.compute_capabilities) for info in find_engines(open_bundle(bundle), here).values()} == {()}


def test_another_device_than_a_gpu(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "open_cuda", cuda.open_cuda)
    for device in ("cpu", "cuda:x", "gpu"):
        with pytest.raises(MisuseError, match=f"no device '{device}'; take cuda or"):
            wavekit.load(bundle, engine="tensorrt", device=device)


def test_without_cuda_bindings_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "open_cuda", cuda.open_cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(MisuseError, match=r"needs cuda-bindings, not installed here; .*\[tensorrt\]"):
        on_device(bundle)


def test_without_a_library_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "installed", installed)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(MisuseError, match=r"need tensorrt_rtx or tensorrt, not installed here; .*\[tensorrt\]"):
        on_device(bundle)


def has_gpu() -> bool:
    return cuda.capability_here() is not None


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx")
    result = wavekit_here(capfd, "generate", made / "0", "Hello", "--engine", "tensorrt")
    assert_one_line(result, 2, "TensorRT engines run on an NVIDIA GPU, and cuda:0 is not here")


class NoGPU:
    """cuda-bindings' functions, a count of devices and no device: whoever has a GPU tests with that."""

    def __init__(self) -> None:
        from cuda.bindings import runtime as real

        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def cudaGetDeviceCount(self) -> tuple[object, int]:  # noqa: N802
        return self._real.cudaError_t.cudaSuccess, 1


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_every_call_of_cuda_is_one_that_its_bindings_take() -> None:
    """They take the arguments, and then say that there is no driver; errors are one line each."""
    device = cuda._NvidiaCuda(NoGPU(), 0)
    address = np.zeros(16).ctypes.data
    for name, arguments in {
        **dict.fromkeys(("enter", "capability", "make_stream", "make_event"), ()),
        **dict.fromkeys(("alloc", "alloc_pinned", "wait", "begin_capture", "end_capture"), (16,)),
        "zero": (address, 16, 0),
        "copy": (address, address, 16, 0),
        "copy_rows": (address, address, (8, 8), 8, 2, 0),
        **dict.fromkeys(("record", "follow", "launch"), (16, 16)),
    }.items():
        with pytest.raises(WavekitError, match=r"CUDA failed: .*driver") as raised:
            getattr(device, name)(*arguments)
        assert "\n" not in str(raised.value)
    for name in ("free", "free_pinned", "free_stream", "free_event", "free_graph"):
        getattr(device, name)(16)  # giving back never fails
