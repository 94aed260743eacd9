"""What an export writes: files and their description, tied weights once, no more memory and disk than it says."""

import datetime
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import save_text_model
from engines import decoded, exported, opened
from safetensors.numpy import load_file, save_file
from tiny_models import save_tiny

from wavekit.commands.progress import Progress
from wavekit_engines.bundle import Manifest, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import CheckpointError, MisuseError, WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.graphs import linear

PAGE = 4096
PRECISIONS = [("fp32", None), ("fp16", None), ("int8", None), ("int4", None), ("int4", "fp32"), ("fp32", "int4")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model("llama-untied", tmp_path_factory.mktemp("export") / "model")


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of 80 MB, half of it a tied table, the rest in 10 layers."""
    folder = tmp_path_factory.mktemp("larger")
    hidden, inner, layers, vocabulary = 256, 1024, 10, 39000
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for prefix in (f"model.layers.{index}." for index in range(layers)):
        shapes |= {f"{prefix}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{prefix}{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
    generator = np.random.default_rng(0)
    tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": vocabulary, "tie_word_embeddings": True,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def manifest_of(bundle: Path) -> Manifest:
    return open_bundle(bundle).manifest


def stored_at(graph: Path) -> dict[str, tuple[str, int, int]]:
    """File, offset and length of every weight of a graph that is stored outside it."""
    found = {}
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        if tensor.external_data:
            entry = {item.key: item.value for item in tensor.external_data}
            found[tensor.name] = (entry["location"], int(entry["offset"]), int(entry["length"]))
    return found


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 32), ("fp16", 16), ("int8", 9), ("int4", 9)])
def test_a_tied_table_is_stored_once_and_both_graphs_point_to_it(precision: str, bits: int, tmp_path: Path) -> None:
    save_tiny("llama-tied", tmp_path / "model")
    bundle = exported(tmp_path / "model", tmp_path / "bundle", precision=precision, split=(2,))
    table, norm = 320 * 64 * bits // 8, 64 * (2 if precision == "fp16" else 4)
    assert table + norm <= (bundle / "graphs/vocabulary.weights").stat().st_size <= table + norm + 2 * PAGE
    first, head = stored_at(bundle / "graphs/stage_0.onnx"), stored_at(bundle / "graphs/head.onnx")
    name = "embedding.table" if bits < 16 else "embedding"
    assert first[name] == head["embedding"]
    assert first[name][0] == "vocabulary.weights"
    if bits < 16:
        assert first["embedding.scales"] == head["embedding.scales"]
    assert all(file == "stage_1.weights" for file, _, _ in stored_at(bundle / "graphs/stage_1.onnx").values())


def test_tables_that_are_not_tied_are_both_stored(tmp_path: Path, checkpoint: Path) -> None:
    bundle = exported(checkpoint, tmp_path / "bundle")
    assert (bundle / "graphs/vocabulary.weights").stat().st_size >= 2 * 320 * 64 * 4
    assert "head" in stored_at(bundle / "graphs/head.onnx")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_the_manifest_describes_the_graphs_as_onnx_runtime_sees_them(
    precision: str, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = exported(checkpoint, tmp_path / "bundle", precision=precision, split=(1, 3), taps=(0, 2))
    manifest = manifest_of(bundle)
    for graph in (*(stage.graph for stage in manifest.stages), manifest.head):
        session = onnxruntime.InferenceSession(bundle / graph.file, providers=["CPUExecutionProvider"])
        for described, found in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
            assert [tensor.name for tensor in described] == [value.name for value in found]
            assert [list(tensor.shape) for tensor in described] == [value.shape for value in found]
            kinds = {"float32": "float", "float16": "float16", "int64": "int64", "int32": "int32"}
            assert [f"tensor({kinds[tensor.dtype]})" for tensor in described] == [value.type for value in found]
        stored = sum(length for _, _, length in stored_at(bundle / graph.file).values())
        assert stored <= graph.weight_bytes <= stored + 100  # a few constants are kept inside the graph


def test_the_parameters_of_all_parts_are_those_of_the_model(tmp_path: Path) -> None:
    model = save_tiny("qwen3-tied-biases", tmp_path / "model")
    manifest = manifest_of(exported(tmp_path / "model", tmp_path / "bundle", split=(1, 2)))
    assert sum(stage.graph.parameters for stage in manifest.stages) + manifest.head.parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_every_file_is_listed_and_the_tokenizer_is_copied_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    bundle = exported(checkpoint, tmp_path / "bundle")
    files = {str(file.relative_to(bundle)) for file in bundle.rglob("*") if file.is_file()}
    assert files == {"manifest.json", *manifest_of(bundle).files}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (bundle / "tokenizer" / name).read_bytes() == (checkpoint / name).read_bytes()


def test_the_manifest_says_what_made_the_bundle(checkpoint: Path, tmp_path: Path) -> None:
    opened_checkpoint = open_checkpoint(checkpoint)
    export_bundle(opened_checkpoint, tmp_path / "bundle", ExportOptions(), command="wavekit export model")
    made = manifest_of(tmp_path / "bundle").provenance
    assert (made.checkpoint, made.command) == ("model", "wavekit export model")
    assert made.checkpoint_digest == opened_checkpoint.digest()
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(made.created)
    assert datetime.timedelta(seconds=-2) < age < datetime.timedelta(hours=1)
    assert "wavekit" in made.versions


def test_names_that_are_not_utf_8_are_told_as_well_as_can_be(checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / os.fsdecode(b"m\xff")))
    command = f"wavekit export {model}"
    export_bundle(open_checkpoint(model), tmp_path / os.fsdecode(b"b\xff"), ExportOptions(), command=command)
    made = manifest_of(tmp_path / os.fsdecode(b"b\xff")).provenance
    assert made.checkpoint == "m\\udcff"
    assert made.command.endswith("m\\udcff")


def test_the_same_export_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    options = {"precision": "int4", "split": (2,), "taps": (1,)}
    manifests = [manifest_of(exported(checkpoint, tmp_path / name, **options)) for name in ("one", "two")]
    assert manifests[0].files == manifests[1].files


def test_a_bundle_can_be_moved(checkpoint: Path, tmp_path: Path) -> None:
    bundle = exported(checkpoint, tmp_path / "bundle", split=(2,))
    text = decoded(opened(bundle), [5, 6, 7], 20)
    (tmp_path / "elsewhere").mkdir()
    bundle.rename(tmp_path / "elsewhere" / "renamed")
    assert decoded(opened(tmp_path / "elsewhere" / "renamed"), [5, 6, 7], 20) == text


def test_progress_counts_up_to_the_whole(checkpoint: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    export_bundle(
        open_checkpoint(checkpoint),
        tmp_path / "bundle",
        ExportOptions(split=(1,)),
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    counts = [done for _, done, _ in told]
    assert counts == sorted(counts)
    assert {total for _, _, total in told} == {told[-1][1]}


def test_a_progress_line_says_how_long_it_takes_once_that_can_be_known(capfd: pytest.CaptureFixture[str]) -> None:
    line = Progress("exporting", enabled=True)
    line("vocabulary", 0, 4)
    line("hashing", 4, 4)
    line.clear()
    _, first, last, cleared = capfd.readouterr().err.split("\r")  # click leaves the rest of "\r\033[K" to terminals
    assert first.endswith("] vocabulary")
    assert last.endswith("] hashing, 0 s left")
    assert cleared == ""


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 7]}, 9, (2, 7)),
        ({"eos_token_id": 2}, [9], (2,)),
        ({}, [9, 10], (9, 10)),
        (None, 9, (9,)),
        (None, None, ()),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_stop_tokens_are_those_of_the_generation_config_or_else_of_the_model(
    generation: Any, config: Any, expected: tuple[int, ...], checkpoint: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "generation_config.json").unlink()
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    changed = {**json.loads((model / "config.json").read_text()), "eos_token_id": config}
    (model / "config.json").write_text(json.dumps(changed))
    manifest = manifest_of(exported(model, tmp_path / "bundle"))
    assert manifest.generation.stop_token_ids == expected


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("weight", ["model.norm", "model.embed_tokens", "lm_head", "model.layers.2.mlp.up_proj"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e5])
def test_weights_that_are_no_numbers_are_refused(
    value: float, weight: str, precision: str, checkpoint: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors[f"{weight}.weight"].flat[3] = value
    save_file(tensors, model / "model.safetensors")
    if np.isfinite(value) and precision != "fp16":
        exported(model, tmp_path / "bundle", precision=precision)
        return
    line = "too large for fp16" if precision == "fp16" else "NaN or infinity"
    with pytest.raises(CheckpointError, match=line):
        exported(model, tmp_path / "bundle", precision=precision)
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "fp8"}, "precision 'fp8': choose one of fp32, fp16, int8, int4"),
        ({"precision": "int4", "head_precision": "int2"}, "precision 'int2'"),
        ({"precision": "int4", "block_size": 48}, "block size 48: choose one of 16, 32"),
        ({"precision": "fp16", "head_precision": "int4"}, "int4 head cannot follow fp16 layers"),
        ({"split": (0,)}, "--split 0"),
        ({"taps": (9,)}, "--taps 9"),
    ],
)
def test_options_that_no_engine_has(options: dict[str, Any], line: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=line):
        exported(checkpoint, tmp_path / "new" / "bundle", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("precision", "head_precision"), PRECISIONS)
def test_the_room_that_is_asked_for_is_the_room_that_is_needed(
    precision: str, head_precision: str | None, larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"precision": precision, "head_precision": head_precision}
    exported(larger, tmp_path / "bundle", **options)
    size = sum(file.stat().st_size for file in (tmp_path / "bundle").rglob("*") if file.is_file())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(0.97 * size)))
    with pytest.raises(WavekitError, match="make room"):
        exported(larger, tmp_path / "refused", **options)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    exported(larger, tmp_path / "again", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "bundle"]


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_an_export_never_holds_the_model(
    precision: str, larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 MB at most one piece of 2 MB, and what quantizing needs beside it: a few copies, and the scales so far.

    benchmarks/export_memory.py measures real models, whose pieces are 32 MB.
    """
    monkeypatch.setattr(linear, "_BLOCK_BYTES", 2 << 20)
    exported(larger, tmp_path / "first", precision=precision)  # whatever is loaded once
    tracemalloc.start()
    exported(larger, tmp_path / "bundle", precision=precision)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (8e6 if precision == "fp32" else 18e6)
