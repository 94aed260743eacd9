"""Engine builds, never runs: the real library builds engines from the graphs of small models, without a GPU."""

from pathlib import Path

import onnx
import pytest
from command_line import assert_one_line, save_text_model, wavekit_here
from draft_models import draft_of
from exit_models import random_exits
from onnx import TensorProto, helper
from test_standard_graph import USUAL
from tiny_models import TINY_MODELS, save_tiny

from wavekit_engines.bundle import Bundle, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.tensorrt import engines
from wavekit_engines.tensorrt.engine_cache import FOLDER, PRECISIONS, EngineInfo, EnginePrecision, entries, parts
from wavekit_engines.tensorrt.engines import BuildOptions, build_engines, run_builder
from wavekit_engines.tensorrt.library import Job
from wavekit_engines.tensorrt.profiles import Limits

pytest.importorskip("tensorrt_rtx", reason="engine builds need tensorrt_rtx: pip install -e '.[tensorrt]'")

LIMITS = Limits(context=40, tree=8)
CARDS = ("8.6", "8.9", "12.0")
QUICK = {*((name, "fp16") for name in USUAL), ("gemma2-tied", "bf16")}
"""What every run of the tests builds: a model of each family. All models in all precisions are slow tests."""


def exported(name: str, folder: Path, **options: object) -> Bundle:
    save_tiny(name, folder / "model")
    export_bundle(open_checkpoint(folder / "model"), folder / "bundle", ExportOptions(**options))
    return open_bundle(folder / "bundle")


def assert_described(info: EngineInfo, bundle: Bundle, dtype: str) -> None:
    """Names, dtypes and shapes of inputs and outputs, and facts that the log must have had."""
    source = parts(bundle.manifest)[info.part]
    replaced = {"last_rows", "total_rows"}
    names = [tensor.name for tensor in source.inputs if tensor.name not in replaced]
    found = {tensor.name: tensor for tensor in info.inputs}
    assert set(found) - {"first_row"} == set(names)
    assert [tensor.name for tensor in info.outputs] == [tensor.name for tensor in source.outputs]
    spec = bundle.manifest.decoder
    for tensor in (*info.inputs, *info.outputs):
        if tensor.name in ("logits", "top_logprobs"):
            assert tensor.dtype == "float32"
        elif not tensor.dtype.startswith("int"):
            assert tensor.dtype == dtype
        if tensor.name.startswith(("key_", "value_")):
            assert tensor.shape == (1, spec.num_kv_heads, LIMITS.capacity(source), spec.head_dim)
    assert info.facts.layers > 0
    assert info.facts.weight_bytes > 0
    if info.part.startswith("stage") and dtype != "float32" and not spec.attention_softcap:
        assert any("mha" in name for name in info.facts.fused)  # attention in one kernel
    for one in info.profiles:
        for name, shapes in one.items():
            assert all(len(shape) == len(found[name].shape) for shape in shapes)


def test_two_stages_a_head_a_draft_and_an_exit_for_three_cards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama-untied", tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    made = {"draft": draft_of(checkpoint), "exits": random_exits(checkpoint, (2,))}
    options = ExportOptions(precision="int4", split=(2,), taps=(1,), **made)
    export_bundle(checkpoint, tmp_path / "bundle", options)
    arguments = ["--compute-capability", ",".join(CARDS), "--max-context", "40", "--max-tree", "8"]
    result = wavekit_here(capfd, "build", tmp_path / "bundle", *arguments)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"not run" in result.stdout
    bundle = open_bundle(tmp_path / "bundle")
    built = build_engines(bundle, BuildOptions(LIMITS, compute_capabilities=CARDS))
    assert [one.info.part for one in built] == ["stage_0", "stage_1", "head", "draft", "exit_2"]
    assert all(one.cached for one in built)
    for one in built:
        assert_described(one.info, bundle, "float16")
    shown = wavekit_here(capfd, "inspect", bundle.path).stdout.decode()
    assert "fp16, 64 rows, 8.6, 8.9, 12.0" in shown
    assert "\nexit_2 " in shown


def test_export_builds_engines_right_after_exporting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_text_model("llama-tied", tmp_path / "model")
    common = ("export", tmp_path / "model", "-o", tmp_path / "bundle")
    refused = wavekit_here(capfd, *common, "--compute-capability", "8.9")
    assert_one_line(refused, 2, "add --engine tensorrt")
    unknown = wavekit_here(capfd, *common, "--engine", "tensorrt", "--compute-capability", "ampere")
    assert_one_line(unknown, 2, "--compute-capability ampere")
    assert not (tmp_path / "bundle").exists()
    made = wavekit_here(capfd, *common, "--engine", "tensorrt", "--compute-capability", "8.9")
    assert (made.returncode, made.stderr) == (0, b"")
    assert b"not run" in made.stdout
    assert {info.part for info in entries(tmp_path / "bundle" / FOLDER)} == {"stage_0", "head"}
    again = wavekit_here(capfd, "build", tmp_path / "bundle", "--compute-capability", "8.9")
    assert again.stdout.count(b"there already") == 2  # the same options mean the same engines


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow)
        for name in TINY_MODELS
        for precision in ("fp16", "bf16", "fp32")
    ],
)
def test_a_stage_of_every_family_for_any_card(
    name: str, precision: EnginePrecision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = exported(name, tmp_path, split=(2,))
    first = {"stage_0": bundle.manifest.stages[0].graph}
    monkeypatch.setattr(engines, "parts", lambda manifest: first)
    (built,) = build_engines(bundle, BuildOptions(LIMITS, precision=precision))
    assert_described(built.info, bundle, PRECISIONS[precision])
    assert built.info.compute_capabilities == []


def graph_file(path: Path, op_type: str) -> Path:
    """A graph of one node on float16 [n, 4]."""
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"])], "g", rows[:1], rows[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("op_type", "profiles", "capabilities", "said"),
    [
        ("Det", [], [], "head: tensorrt_rtx cannot read it"),
        ("Relu", [], [], "head: tensorrt_rtx refuses to build it"),
        ("Relu", [{"x": ([1, 4], [9, 4], [8, 4])}], [], "head: tensorrt_rtx refuses to build it"),
        ("Relu", [{"x": ([1, 4], [1, 4], [8, 4])}], ["9.0"], r"has no compute capability 9\.0; it has .*8\.9"),
    ],
    ids=["unsupported op", "missing profile", "contradictory profile", "unknown card"],
)
def test_what_the_library_refuses_is_one_line(
    op_type: str, profiles: list, capabilities: list[str], said: str, tmp_path: Path
) -> None:
    job = Job(str(graph_file(tmp_path / "g.onnx", op_type)), str(tmp_path / "engine"), profiles, capabilities)
    with pytest.raises(WavekitError, match=said) as raised:
        run_builder("tensorrt_rtx", job, tmp_path / "log", "head", lambda step: None)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "engine").exists()


def test_bf16_on_a_card_without_it_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bundle = exported("llama-untied", tmp_path).path
    result = wavekit_here(capfd, "build", bundle, "--precision", "bf16", "--compute-capability", "7.5,8.6")
    assert_one_line(result, 2, "7.5 has no bf16")
    assert not (bundle / FOLDER).exists()
