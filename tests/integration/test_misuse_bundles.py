"""A damaged bundle is one line and exit code 1 on the command line, whichever of its files is damaged and how."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from command_line import assert_one_line, save_text_model, wavekit, wavekit_here
from engines import exported

from wavekit_engines.bundle import FileInfo, Manifest, TensorInfo, decode_manifest, sha256


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return exported(save_text_model("llama-untied", folder / "model"), folder / "bundle", split=(2,), taps=(1,))


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


FILES = (
    "graphs/stage_0.onnx",
    "graphs/stage_1.weights",
    "graphs/vocabulary.weights",
    "graphs/head.onnx",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/generation_config.json",
    "manifest.json",
)


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def manifest_of(bundle: Path) -> Manifest:
    return decode_manifest((bundle / "manifest.json").read_bytes(), "manifest.json")


def rewrite(bundle: Path, **changes: object) -> None:
    """Change the manifest, and the sizes and hashes in it, as someone would who means it."""
    files = {
        name: FileInfo((bundle / name).stat().st_size, sha256(bundle / name)) for name in manifest_of(bundle).files
    }
    changed = dataclasses.replace(manifest_of(bundle), **{"files": files, **changes})
    (bundle / "manifest.json").write_bytes(changed.encode())


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte(name: str, bundle: Path) -> None:
    flip_a_byte(bundle / name)
    assert_one_line(wavekit("generate", bundle, "Hello"), 1, name, "export it again" if name != "manifest.json" else "")


@pytest.mark.parametrize("damage", ["truncated", "missing"])
@pytest.mark.parametrize("name", ["graphs/stage_1.weights", "graphs/head.onnx", "tokenizer/tokenizer.json"])
def test_a_file_that_is_not_whole(name: str, damage: str, bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if damage == "missing":
        (bundle / name).unlink()
    else:
        (bundle / name).write_bytes((bundle / name).read_bytes()[:-1])
    for command in (["inspect", bundle], ["generate", bundle, "Hello"]):
        assert_one_line(wavekit_here(capfd, *command), 1, name)


def test_a_missing_manifest_is_no_bundle(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    assert_one_line(wavekit("inspect", bundle), 2, "is not a bundle")


def test_a_newer_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").write_text('{"format": "wavekit-bundle", "version": 7}')
    assert_one_line(wavekit("generate", bundle, "Hello"), 1, "version 7", "upgrade wavekit")


def test_a_graph_with_other_inputs_than_the_manifest_says(bundle: Path) -> None:
    head = manifest_of(bundle).head
    renamed = dataclasses.replace(head, inputs=(TensorInfo("states", "float32", ("n", 64)),))
    rewrite(bundle, head=renamed)
    assert_one_line(wavekit("generate", bundle, "Hello"), 1, "head.onnx", "['hidden']", "['states']")


def test_a_graph_with_other_outputs_than_the_manifest_says(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    head = manifest_of(bundle).head
    rewrite(bundle, head=dataclasses.replace(head, outputs=()))
    assert_one_line(wavekit_here(capfd, "generate", bundle, "Hello"), 1, "head.onnx", "['logits']")


def test_a_graph_that_is_none(bundle: Path) -> None:
    (bundle / "graphs/stage_0.onnx").write_bytes(b"no graph at all")
    rewrite(bundle)
    assert_one_line(wavekit("generate", bundle, "Hello"), 1, "stage_0.onnx", "cannot be opened by ONNX Runtime")


def test_weights_that_are_too_short_for_their_graph(bundle: Path) -> None:
    (bundle / "graphs/stage_0.weights").write_bytes(b"short")
    rewrite(bundle)
    assert_one_line(wavekit("generate", bundle, "Hello"), 1, "stage_0.onnx", "cannot be opened by ONNX Runtime")


def test_a_decoder_that_is_not_the_one_of_the_graphs(bundle: Path) -> None:
    decoder = dataclasses.replace(manifest_of(bundle).decoder, head_dim=32)
    rewrite(bundle, decoder=decoder)
    assert_one_line(wavekit("generate", bundle, "Hello"), 1, "stage_0.onnx")


def test_a_damaged_tokenizer(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (bundle / "tokenizer/tokenizer.json").write_text("{}")
    rewrite(bundle)
    assert_one_line(wavekit_here(capfd, "generate", bundle, "Hello"), 1, "tokenizer.json cannot be read")


def test_logits_that_are_no_numbers(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = bundle / "graphs/vocabulary.weights"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    rewrite(bundle)
    assert_one_line(wavekit_here(capfd, "generate", bundle, "Hello"), 1, "logits are nan")
