"""A draft head in a bundle: its boundaries are put out, the target's table is read, what does not fit is refused."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import assert_one_line, save_text_model, wavekit, wavekit_here
from draft_models import draft_of, random_draft, random_spec
from engines import decoded, exported, opened
from tiny_models import save_tiny

from wavekit_engines.bundle import DraftInfo, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_export import draft_bytes
from wavekit_engines.draft_formats import write_draft
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import CheckpointError, MisuseError, WavekitError
from wavekit_engines.export import ExportOptions
from wavekit_engines.families import decoder_spec
from wavekit_engines.graphs.draft_graph import write_draft_weights
from wavekit_engines.graphs.graph_writer import WeightFile
from wavekit_engines.quantization import Precision
from wavekit_engines.weights import DecoderWeights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model("llama-untied", tmp_path_factory.mktemp("target") / "model")


def draft_for(checkpoint: Path, **options: Any) -> Draft:
    return draft_of(open_checkpoint(checkpoint), **options)


@pytest.fixture(scope="module")
def draft_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "draft"
    write_draft(folder, draft_for(checkpoint), "specforge")
    return folder


def info_of(bundle: Path) -> DraftInfo:
    draft = open_bundle(bundle).manifest.draft
    assert draft is not None
    return draft


def initializers(graph: Path) -> dict[str, dict[str, str]]:
    found = onnx.load(graph, load_external_data=False).graph.initializer
    return {tensor.name: {item.key: item.value for item in tensor.external_data} for tensor in found}


@pytest.mark.parametrize(("taps", "expected"), [((), (1, 2, 3)), ((2, 4), (1, 2, 3, 4)), ((3, 1, 0), (0, 1, 2, 3))])
def test_its_boundaries_are_put_out_beside_the_taps(
    taps: tuple[int, ...], expected: tuple[int, ...], checkpoint: Path, tmp_path: Path
) -> None:
    bundle = exported(checkpoint, tmp_path / "bundle", split=(2,), taps=taps, draft=draft_for(checkpoint))
    manifest = open_bundle(bundle).manifest
    assert manifest.taps == expected
    outputs = [tensor.name for stage in manifest.stages for tensor in stage.graph.outputs]
    assert {f"boundary_{boundary}" for boundary in expected} <= set(outputs)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_target_decodes_as_it_does_without(precision: str, checkpoint: Path, tmp_path: Path) -> None:
    plain = exported(checkpoint, tmp_path / "plain", precision=precision)
    drafting = exported(checkpoint, tmp_path / "drafting", precision=precision, draft=draft_for(checkpoint))
    for name in ("vocabulary.weights", "stage_0.weights", "head.onnx"):
        assert (plain / "graphs" / name).read_bytes() == (drafting / "graphs" / name).read_bytes()
    assert open_bundle(plain).manifest.draft is None
    assert decoded(opened(plain), [5, 6, 7], 5)[0] == decoded(opened(drafting), [5, 6, 7], 5)[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_the_targets_table_is_read_where_it_lies(precision: str, checkpoint: Path, tmp_path: Path) -> None:
    bundle = exported(checkpoint, tmp_path / "bundle", precision=precision, draft=draft_for(checkpoint))
    own, first = (initializers(bundle / "graphs" / name) for name in ("draft.onnx", "stage_0.onnx"))
    names = ["embedding.table", "embedding.scales"] if precision in ("int8", "int4") else ["embedding"]
    for name in names:
        assert own[name] == first[name]
        assert own[name]["location"] == "vocabulary.weights"
    assert {place.get("location") for name, place in own.items() if name.startswith("draft.")} == {"draft.weights"}


def test_a_copy_of_the_targets_table_is_not_stored_again(checkpoint: Path, tmp_path: Path) -> None:
    opened_checkpoint = open_checkpoint(checkpoint)
    table = DecoderWeights(opened_checkpoint, decoder_spec(opened_checkpoint.config))["embedding"].read()
    plain = exported(checkpoint, tmp_path / "plain", draft=draft_for(checkpoint))
    copied = dataclasses.replace(draft_for(checkpoint), embedding=table)
    assert open_bundle(exported(checkpoint, tmp_path / "copied", draft=copied)).manifest.draft == info_of(plain)
    own = dataclasses.replace(copied, embedding=table + 1)
    stored = initializers(exported(checkpoint, tmp_path / "own", draft=own) / "graphs/draft.onnx")
    assert any(name.startswith("draft.embedding") for name in stored)


def test_the_manifest_says_what_the_draft_is(checkpoint: Path, tmp_path: Path) -> None:
    draft = draft_for(checkpoint, fc_norm="each", qkv_bias=True)
    unsaid = dataclasses.replace(draft, spec=dataclasses.replace(draft.spec, target_layers=None))
    info = info_of(exported(checkpoint, tmp_path / "bundle", precision="int8", draft_precision="int4", draft=unsaid))
    assert info.spec == draft.spec
    assert (info.precision, info.head_precision, info.top_k) == ("int4", "int8", 10)
    assert info.origin == "random weights, seed 0"
    assert info.graph.parameters == sum(weight.size for weight in draft.weights.values())


def test_drafts_are_told_apart_by_their_digest(checkpoint: Path, tmp_path: Path) -> None:
    digests = []
    for seed in (0, 0, 1):
        bundle = tmp_path / f"bundle{len(digests)}"
        digests.append(info_of(exported(checkpoint, bundle, draft=draft_for(checkpoint, seed=seed))).digest)
    assert digests[0] == digests[1] != digests[2]


def test_the_same_export_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    options = {"precision": "int4", "draft": draft_for(checkpoint)}
    manifests = [open_bundle(exported(checkpoint, tmp_path / name, **options)).manifest for name in ("one", "two")]
    assert manifests[0].files == manifests[1].files


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_its_size_is_known_before(precision: Precision, own_embedding: bool, checkpoint: Path, tmp_path: Path) -> None:
    target = dataclasses.replace(decoder_spec(open_checkpoint(checkpoint).config), hidden_size=256, vocab_size=4000)
    draft = random_draft(random_spec(target, intermediate_size=512), own_embedding=own_embedding)
    forms = ExportOptions(precision=precision, draft=draft).draft_forms
    with WeightFile(tmp_path / "draft.weights") as file:
        write_draft_weights(file, draft, forms)
    pages = 4096 * 20  # every tensor begins on one
    assert draft_bytes(draft, forms) <= (tmp_path / "draft.weights").stat().st_size < draft_bytes(draft, forms) + pages


OTHER_MODELS: dict[str, Callable[[Draft], Draft]] = {
    "hidden size": lambda draft: _respelled(draft, hidden_size=128),
    "vocabulary": lambda draft: _respelled(draft, vocab_size=321),
    "number of layers": lambda draft: _respelled(draft, target_layers=5),
    "boundaries": lambda draft: _respelled(draft, boundaries=(1, 2, 5), target_layers=None),
    "do not ascend": lambda draft: _respelled(draft, boundaries=(2, 1, 3)),
}
DAMAGED: dict[str, Callable[[Draft], Draft]] = {
    r"no weight down of shape \[64, 96\]": lambda draft: _with_weight(draft, "down", np.zeros((64, 95), np.float32)),
    "no weight norm": lambda draft: dataclasses.replace(draft, weights=_without(draft.weights, "norm")),
    "no weight q_bias": lambda draft: _respelled(draft, qkv_bias=True),
    "ids that do not ascend": lambda draft: dataclasses.replace(draft, d2t=-np.arange(80)),
    "within the vocabulary": lambda draft: dataclasses.replace(draft, d2t=draft.d2t + 300),
    "ids that": lambda draft: dataclasses.replace(draft, d2t=draft.d2t[:-1]),
}


def _respelled(draft: Draft, **changes: Any) -> Draft:
    return dataclasses.replace(draft, spec=dataclasses.replace(draft.spec, **changes))


def _with_weight(draft: Draft, role: str, weight: np.ndarray) -> Draft:
    return dataclasses.replace(draft, weights={**draft.weights, role: weight})


def _without(weights: dict[str, np.ndarray], role: str) -> dict[str, np.ndarray]:
    return {name: weight for name, weight in weights.items() if name != role}


@pytest.mark.parametrize(
    ("line", "change", "kind"),
    [
        *((line, change, MisuseError) for line, change in OTHER_MODELS.items()),
        *((line, change, CheckpointError) for line, change in DAMAGED.items()),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_written(
    line: str, change: Callable[[Draft], Draft], kind: type[WavekitError], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=line):
        exported(checkpoint, tmp_path / "bundle", draft=change(draft_for(checkpoint)))
    assert os.listdir(tmp_path) == []


def test_a_draft_that_knows_its_target_goes_with_it(checkpoint: Path, tmp_path: Path) -> None:
    digest = open_checkpoint(checkpoint).digest()
    exported(checkpoint, tmp_path / "bundle", draft=dataclasses.replace(draft_for(checkpoint), target_digest=digest))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "fp32", "draft_precision": "fp16"}, "a fp16 draft cannot go with a fp32 target"),
        ({"precision": "fp16", "draft_precision": "int4"}, "a int4 draft cannot go with a fp16 target"),
        ({"draft_precision": "fp8"}, "precision 'fp8'"),
        ({"draft_top_k": 0}, "scores 0 tokens"),
        ({"draft_precision": "int4", "draft": None}, "without a draft"),
    ],
)
def test_options_that_no_draft_has(options: dict[str, Any], line: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=line):
        exported(checkpoint, tmp_path / "bundle", **{"draft": draft_for(checkpoint), **options})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e5])
@pytest.mark.parametrize("role", ["fc", "norm", "q", "head"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_weights_that_are_no_numbers_are_refused(
    precision: str, role: str, value: float, checkpoint: Path, tmp_path: Path
) -> None:
    draft = draft_for(checkpoint)
    draft.weights[role].flat[3] = value
    if np.isfinite(value) and precision != "fp16":
        exported(checkpoint, tmp_path / "bundle", precision=precision, draft=draft)
        return
    with pytest.raises(CheckpointError, match=r"weight draft\."):
        exported(checkpoint, tmp_path / "bundle", precision=precision, draft=draft)
    assert os.listdir(tmp_path) == []


def test_the_command_exports_a_draft_and_inspect_shows_it(
    checkpoint: Path, draft_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    options = ["--draft", draft_folder, "--draft-precision", "int8", "--precision", "int4", "--stages", "4"]
    result = wavekit_here(capfd, "export", checkpoint, "-o", bundle, *options)
    assert (result.returncode, result.stderr) == (0, b"")
    assert "a draft head, int4" in result.stdout.decode().splitlines()[0]
    shown = wavekit_here(capfd, "inspect", bundle).stdout.decode()
    assert [line for line in shown.splitlines() if len(line) > 100 and str(tmp_path) not in line] == []
    (summary,) = (line for line in shown.splitlines() if line.startswith("draft ") and "boundaries" in line)
    assert "boundaries 1, 2, 3, vocabulary 80, int8, best 10 of a row" in summary
    (row,) = (line for line in shown.splitlines() if line.startswith("draft ") and line.endswith("-"))
    assert "0.1 M" in row
    assert "taps hidden token_ids positions" in shown
    as_json = json.loads(wavekit_here(capfd, "inspect", bundle, "--json").stdout)
    assert as_json["draft"]["spec"]["boundaries"] == [1, 2, 3]
    assert as_json["draft"]["precision"] == "int8"


def test_a_draft_folder_that_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    result = wavekit("export", checkpoint, "-o", tmp_path / "bundle", "--draft", tmp_path / "nothing")
    assert_one_line(result, 2, "nothing")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_no_draft(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = wavekit_here(capfd, "export", checkpoint, "-o", tmp_path / "bundle", "--draft", checkpoint)
    assert result.returncode in (1, 2)
    assert len(result.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_draft_of_another_model(draft_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama-three-heads", tmp_path / "other")
    result = wavekit_here(capfd, "export", tmp_path / "other", "-o", tmp_path / "bundle", "--draft", draft_folder)
    assert_one_line(result, 2, "hidden size", "wavekit train draft")
    assert os.listdir(tmp_path) == ["other"]


def test_a_draft_precision_without_a_draft(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = wavekit_here(capfd, "export", checkpoint, "-o", tmp_path / "bundle", "--draft-precision", "int4")
    assert_one_line(result, 2, "without a draft")
