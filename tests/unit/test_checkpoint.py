"""Opening checkpoints: what is read, and what is wrong with those that cannot be."""

import json
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors_writer
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import CheckpointError, MisuseError, UnsupportedModelError

A = np.arange(24, dtype=np.float32).reshape(6, 4) / 7
B = np.arange(5, dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    safetensors_writer.write(tmp_path / "model.safetensors", {"a": A, "b": B})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    safetensors_writer.write(tmp_path / "one.safetensors", {"a": A})
    safetensors_writer.write(tmp_path / "two.safetensors", {"b": B})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_and_configuration(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {}
    assert checkpoint.name == folder.name
    assert checkpoint.names() == ["a", "b"]
    assert checkpoint.shape("a") == (6, 4)
    np.testing.assert_array_equal(checkpoint.rows("a", 2, 5), A[2:5])
    np.testing.assert_array_equal(checkpoint.rows("b", 0, 5), B)


def test_shards(sharded):
    checkpoint = open_checkpoint(str(sharded))
    assert sorted(checkpoint.names()) == ["a", "b"]
    np.testing.assert_array_equal(checkpoint.rows("b", 1, 3), B[1:3])


@given(start=st.integers(0, 6), count=st.integers(0, 6))
def test_any_range_of_rows(tmp_path_factory, start, count):
    folder = tmp_path_factory.getbasetemp() / "any-range"
    if not folder.exists():
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        safetensors_writer.write(folder / "model.safetensors", {"b": B, "a": A})
    stop = min(start + count, 6)
    rows = open_checkpoint(folder).rows("a", start, stop)
    np.testing.assert_array_equal(rows, A[start:stop])
    assert rows.flags.c_contiguous


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_precisions_become_float32(folder, dtype):
    safetensors_writer.write(folder / "model.safetensors", {"a": A.astype(dtype)})
    rows = open_checkpoint(folder).rows("a", 0, 6)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, A.astype(dtype).astype(np.float32))


def test_bfloat16_is_the_upper_half_of_float32(folder):
    upper = (A.view(np.uint32) >> 16).astype(np.uint16)
    safetensors_writer.write(folder / "model.safetensors", {"a": upper})
    rows = open_checkpoint(folder).rows("a", 1, 6)
    np.testing.assert_array_equal(rows, (A.view(np.uint32) & 0xFFFF0000).view(np.float32)[1:])


def test_a_tensor_of_integers_opens_but_cannot_be_read_as_a_weight(folder):
    safetensors_writer.write(folder / "model.safetensors", {"a": A, "ids": np.arange(3)})
    with pytest.raises(UnsupportedModelError, match=r"ids in .*model\.safetensors is I64"):
        open_checkpoint(folder).shape("ids")


def test_tokenizer_files_are_those_that_are_there(folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("no")
    files = open_checkpoint(folder).tokenizer_files()
    assert files == {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


def test_generation_defaults(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert open_checkpoint(folder).generation_config == {"eos_token_id": 2}


def test_the_digest_depends_on_weights_and_configuration_and_nothing_else(folder, tmp_path_factory):
    digest = open_checkpoint(folder).digest()
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("other")
    assert open_checkpoint(copy).digest() == digest
    safetensors_writer.write(copy / "model.safetensors", {"a": A + 1, "b": B})
    assert open_checkpoint(copy).digest() != digest
    safetensors_writer.write(copy / "model.safetensors", {"a": A, "b": B})
    (copy / "config.json").write_text("{}")
    assert open_checkpoint(copy).digest() != digest


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages in /proc")
def test_reading_rows_maps_no_file_into_memory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    big = np.zeros((4096, 4096), np.float32)  # 64 MiB
    safetensors_writer.write(tmp_path / "model.safetensors", {"big": big})
    del big
    checkpoint = open_checkpoint(tmp_path)
    before = resident_kib()
    for start in range(0, 4096, 64):
        checkpoint.rows("big", start, start + 64)
    assert resident_kib() - before < 16 * 1024


def resident_kib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def test_a_path_that_is_not_there_is_misuse(tmp_path):
    with pytest.raises(MisuseError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")


def test_a_folder_without_configuration_is_misuse(tmp_path):
    with pytest.raises(MisuseError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def test_a_file_of_another_kind_is_misuse(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(MisuseError, match=r"neither a checkpoint folder nor a \.gguf file"):
        open_checkpoint(tmp_path / "model.onnx")


def test_an_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="merge it into its base model"):
        open_checkpoint(folder)


def test_pickled_weights_are_refused_with_the_conversion(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        open_checkpoint(folder)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\xff"])
def test_a_configuration_that_is_no_json_object_is_named(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


@given(keep=st.integers(0, 10_000))
def test_a_truncated_file_is_found_when_opened(tmp_path_factory, keep):
    folder = tmp_path_factory.mktemp("truncated")
    (folder / "config.json").write_text("{}")
    path = folder / "model.safetensors"
    safetensors_writer.write(path, {"a": A, "b": B})
    os.truncate(path, keep % path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors (is truncated|has a damaged header)"):
        open_checkpoint(folder)


def damaged(**changes):
    header = safetensors_writer.entries({"a": A, "b": B})
    header["a"].update(changes)
    return header


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [6, 4]}},
        damaged(data_offsets=[0, 95]),
        damaged(data_offsets=[-4, 92]),
        damaged(data_offsets=[96, 0]),
        damaged(data_offsets=[1000, 1096]),
        damaged(data_offsets=["x", "y"]),
        damaged(shape=[6, 5]),
        damaged(shape=[-6, -4]),
        damaged(shape="64"),
        damaged(shape=None),
    ],
)
def test_a_damaged_header_is_found_when_opened(folder, header):
    safetensors_writer.write(folder / "model.safetensors", {"a": A, "b": B}, header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shards_remain", [True, False])
def test_weights_in_one_file_count_before_an_index_that_older_shards_left(sharded, shards_remain):
    safetensors_writer.write(sharded / "model.safetensors", {"a": -A, "b": -B})
    if not shards_remain:
        (sharded / "one.safetensors").unlink()
    np.testing.assert_array_equal(open_checkpoint(sharded).rows("a", 0, 6), -A)


def test_a_shard_the_index_names_but_is_missing(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing"):
        open_checkpoint(sharded)


def test_a_tensor_the_index_promises_but_the_shard_lacks(sharded):
    write_index(sharded, {"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two\.safetensors lacks c"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, {"a": "../one.safetensors"}])
def test_an_index_that_makes_no_sense(sharded, weight_map):
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(sharded)


def test_a_file_that_shrinks_after_it_was_opened(folder):
    checkpoint = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 150)
    with pytest.raises(CheckpointError, match="shorter than when it was opened"):
        checkpoint.rows("b", 0, 5)


def test_a_file_that_vanishes_after_it_was_opened(folder):
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.rows("b", 0, 5)


def test_a_repository_that_cannot_be_fetched_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MisuseError, match="nobody/nothing is no path here and cannot be fetched") as caught:
        open_checkpoint("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_repository_is_fetched_without_the_weights_it_holds_a_second_time(folder, monkeypatch):
    """Mistral's have them as ``consolidated.safetensors`` too, in its own layout."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    there = ["config.json", "consolidated.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json"]
    fetched = []

    def snapshot_download(repo_id, *, allow_patterns, ignore_patterns=None):
        fetched.extend(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(folder)
    assert open_checkpoint("mistralai/Mistral-7B-Instruct-v0.3").names() == ["a", "b"]
    assert fetched == ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
