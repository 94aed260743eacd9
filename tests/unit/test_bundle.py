"""A bundle opens only whole, unchanged and consistent; whatever is wrong with one is named in a line."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavekit_engines.bundle import (
    DraftInfo,
    EngineInfo,
    ExitsInfo,
    FileInfo,
    GenerationDefaults,
    GraphInfo,
    Manifest,
    Provenance,
    StageInfo,
    TensorInfo,
    decode_manifest,
    describe_files,
    open_bundle,
)
from wavekit_engines.decoder_spec import DecoderSpec, LayerSpec, RopeSpec
from wavekit_engines.draft_spec import DraftSpec
from wavekit_engines.errors import BundleError, MisuseError
from wavekit_engines.exit_spec import ExitSpec

CONTENTS = {"graphs/stage_0.onnx": b"one", "graphs/stage_1.onnx": b"two", "graphs/head.onnx": b"three", "text": b""}


def manifest(**changes: Any) -> Manifest:
    """A manifest of four layers in two stages."""
    stages = (StageInfo(graph("stage_0"), 0, 2, (1, 2)), StageInfo(graph("stage_1"), 2, 4, (4,)))
    files = {name: FileInfo(len(data), hashlib.sha256(data).hexdigest()) for name, data in CONTENTS.items()}
    whole = Manifest(
        decoder=DecoderSpec(
            "llama", 8, 16, 2, 1, 4, 32, 64, 1e-5, (LayerSpec("full", None),) * 4, {"full": RopeSpec((1.0, 0.01))}, 0.5
        ),
        engine=EngineInfo("onnxruntime", "int4", "fp32", 32, "float32"),
        stages=stages,
        head=graph("head"),
        taps=(1, 4),
        generation=GenerationDefaults((2,)),
        files=files,
        provenance=Provenance("model", "00", "wavekit export", "2026-01-01T00:00:00+00:00", {"wavekit": "1"}),
    )
    return dataclasses.replace(whole, **changes)


def graph(name: str) -> GraphInfo:
    hidden = TensorInfo("hidden", "float32", ("B", "S", 8))
    return GraphInfo(f"graphs/{name}.onnx", (hidden,), (hidden,), 10, 40)


def write(folder: Path, described: Manifest) -> Path:
    for name, data in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "manifest.json").write_bytes(described.encode())
    return folder


def edited(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest's JSON after ``change``, with the hash that belongs to it."""
    content = json.loads(manifest().encode())
    del content["sha256"]
    change(content)
    text = json.dumps(content).encode()[:-1]
    return text + b',\n "sha256": "' + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n'


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write(tmp_path / "bundle", manifest())


def test_what_is_written_is_read(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.manifest == manifest()
    assert opened.tokenizer_folder == bundle / "tokenizer"


def test_the_manifest_is_plain_json_in_which_a_hash_covers_all_before_it(bundle: Path) -> None:
    data = (bundle / "manifest.json").read_bytes()
    content = json.loads(data)
    assert list(content)[-1] == "sha256"
    assert content["sha256"] == hashlib.sha256(data[: data.index(b',\n "sha256"')]).hexdigest()


def test_files_are_described_by_size_and_hash_except_the_manifest(bundle: Path) -> None:
    assert describe_files(bundle) == manifest().files


@given(data=st.data())
def test_no_changed_byte_of_a_manifest_goes_unnoticed(data: st.DataObject) -> None:
    whole = manifest().encode()
    position = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[position]))
    with pytest.raises(BundleError):
        decode_manifest(whole[:position] + bytes([byte]) + whole[position + 1 :], "manifest.json")


@given(st.integers(0, len(manifest().encode()) - 1))
def test_no_cut_of_a_manifest_goes_unnoticed(length: int) -> None:
    with pytest.raises(BundleError, match=r"^manifest\.json "):
        decode_manifest(manifest().encode()[:length], "manifest.json")


@given(st.binary(max_size=60))
def test_anything_else_is_no_manifest(data: bytes) -> None:
    with pytest.raises(BundleError, match=r"^manifest\.json "):
        decode_manifest(data, "manifest.json")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"format": "\xff", "version": 1}', b"null"])
def test_what_json_parsers_choke_on_is_no_manifest(data: bytes) -> None:
    with pytest.raises(BundleError, match="is damaged"):
        decode_manifest(data, "manifest.json")


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("decoder.num_heads", "two", "$.decoder.num_heads"),
        ("decoder.layers.1.window", 1.5, "$.decoder.layers[1].window"),
        ("decoder.activation", "relu", "$.decoder.activation"),
        ("engine.precision", "int3", "$.engine.precision"),
        ("stages.0.graph.inputs.0.shape", "B", "$.stages[0].graph.inputs[0].shape"),
        ("stages.1.boundaries", None, "$.stages[1].boundaries"),
        ("files.text", 3, "$.files[...]"),
        ("taps", {}, "$.taps"),
    ],
)
def test_a_wrong_type_is_named_with_its_path(path: str, value: Any, where: str) -> None:
    def change(content: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            content = content[int(key)] if isinstance(content, list) else content[key]
        content[last] = value

    with pytest.raises(BundleError) as caught:
        decode_manifest(edited(change), "manifest.json")
    assert where in str(caught.value)


@pytest.mark.parametrize("field", ["decoder", "engine", "stages", "head", "files", "format", "version"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(BundleError, match=f"missing required field `{field}`"):
        decode_manifest(edited(lambda content: content.pop(field)), "manifest.json")


def test_a_newer_version_asks_for_an_upgrade_whatever_else_it_holds() -> None:
    data = json.dumps({"format": "wavekit-bundle", "version": 2, "stages": "anything"}).encode()
    with pytest.raises(BundleError, match=r"version 2, this wavekit reads up to 1; upgrade"):
        decode_manifest(data, "manifest.json")


def test_another_format_is_named() -> None:
    with pytest.raises(BundleError, match="format 'other'"):
        decode_manifest(edited(lambda content: content.update(format="other")), "manifest.json")


@pytest.mark.parametrize("damage", ["changed", "longer", "shorter", "missing", "a directory"])
@pytest.mark.parametrize("name", [name for name, data in CONTENTS.items() if data])
def test_a_damaged_file_is_named(name: str, damage: str, bundle: Path) -> None:
    file, data = bundle / name, CONTENTS[name]
    if damage in ("missing", "a directory"):
        file.unlink()
    if damage == "a directory":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"changed": b"\0" + data[1:], "longer": data + b"\0", "shorter": data[:-1]}[damage])
    with pytest.raises(BundleError, match=name):
        open_bundle(bundle)


def test_a_changed_byte_goes_unnoticed_only_where_hashes_are_not_checked(bundle: Path) -> None:
    (bundle / "graphs/head.onnx").write_bytes(b"THREE")
    open_bundle(bundle, check_hashes=False)
    with pytest.raises(BundleError, match=r"head\.onnx was changed"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "graphs/../../outside", "link"])
def test_a_file_outside_the_bundle_is_not_trusted(name: str, bundle: Path) -> None:
    outside = bundle.parent / "outside"
    outside.write_bytes(b"x")
    (bundle / "link").symlink_to(outside)
    info = FileInfo(1, hashlib.sha256(b"x").hexdigest())
    write(bundle, manifest(files={**manifest().files, name: info}))
    with pytest.raises(BundleError, match="outside the bundle"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    "cuts", [[], [(0, 2)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(1, 4)], [(0, 4), (4, 4)], [(0, 5)], [(2, 4), (0, 2)]]
)
def test_stages_that_do_not_join_are_refused(cuts: list[tuple[int, int]], bundle: Path) -> None:
    stages = tuple(StageInfo(graph("stage_0"), first, last, (last,)) for first, last in cuts)
    write(bundle, manifest(stages=stages, taps=()))
    with pytest.raises(BundleError, match="do not join"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("boundaries", "taps", "missing"), [(((1, 2), (3,)), (1,), 4), (((1,), (2, 4)), (1,), 2), (((2,), (4,)), (1,), 1)]
)
def test_every_boundary_that_is_needed_is_put_out(
    boundaries: tuple[tuple[int, ...], ...], taps: tuple[int, ...], missing: int, bundle: Path
) -> None:
    stages = tuple(
        dataclasses.replace(stage, boundaries=given) for stage, given in zip(manifest().stages, boundaries, strict=True)
    )
    write(bundle, manifest(stages=stages, taps=taps))
    with pytest.raises(BundleError, match=f"no stage puts out boundary {missing}"):
        open_bundle(bundle)


def test_a_graph_that_is_no_file_of_the_bundle_is_named(bundle: Path) -> None:
    write(bundle, manifest(head=graph("other")))
    with pytest.raises(BundleError, match=r"names the graph graphs/other\.onnx"):
        open_bundle(bundle)


def test_what_is_no_bundle_is_misuse_and_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"does not exist; make a bundle with `wavekit export"):
        open_bundle(tmp_path / "nowhere")
    with pytest.raises(MisuseError, match=r"no manifest\.json; make a bundle"):
        open_bundle(tmp_path)
    (tmp_path / "manifest.json").touch()
    with pytest.raises(MisuseError, match="is a file and a bundle is a folder"):
        open_bundle(tmp_path / "manifest.json")


def with_draft(top_k: int = 3, file: str = "text", **changes: Any) -> Manifest:
    """The same with a draft head, whose graph is any file of the bundle."""
    spec = DraftSpec(
        boundaries=(1, 4),
        target_layers=4,
        hidden_size=8,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=32,
        draft_vocab_size=10,
        max_positions=64,
        norm_eps=1e-5,
        rope=RopeSpec((1.0, 0.01)),
    )
    described = dataclasses.replace(graph("draft"), file=file)
    return manifest(draft=DraftInfo(dataclasses.replace(spec, **changes), described, "int4", "int8", top_k, "", "00"))


def test_a_draft_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert open_bundle(write(tmp_path / "bundle", with_draft())).manifest == with_draft()


def test_bundles_made_before_there_were_drafts_have_none() -> None:
    assert decode_manifest(edited(lambda content: content.pop("draft")), "manifest.json").draft is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hidden_size": 16}, "hidden size of 16, its decoder 8"),
        ({"vocab_size": 33}, "vocabulary of 33, its decoder 32"),
        ({"target_layers": 5}, "number of layers of 5, its decoder 4"),
        ({"target_layers": None}, "number of layers of None"),
        ({"boundaries": (1, 3)}, r"takes the boundaries \[1, 3\], its taps are \[1, 4\]"),
        ({"boundaries": (4, 1)}, r"takes the boundaries \[4, 1\]"),
        ({"boundaries": ()}, r"takes the boundaries \[\]"),
        ({"top_k": 0}, "scores 0 of 10 tokens"),
        ({"top_k": 11}, "scores 11 of 10 tokens"),
        ({"draft_vocab_size": 33}, "scores 3 of 33 tokens out of 32"),
        ({"file": "graphs/draft.onnx"}, r"names the graph graphs/draft\.onnx but no such file"),
    ],
)
def test_a_draft_of_another_decoder_is_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=line):
        open_bundle(write(tmp_path / "bundle", with_draft(**changes)))


def with_exits(top_k: int = 3, files: tuple[str, ...] = ("text",), **changes: Any) -> Manifest:
    """The same with an exit at the end of its first stage, whose graph is any file of the bundle."""
    spec = ExitSpec(
        boundaries=(2,), target_layers=4, hidden_size=8, vocab_size=32, exit_vocab_size=10, norm_eps=1e-5, rank=2
    )
    graphs = tuple(dataclasses.replace(graph("exit"), file=file) for file in files)
    described = ExitsInfo(dataclasses.replace(spec, **changes), graphs, "int8", top_k, "", "00", "wavekit export", "")
    return manifest(exits=described)


def test_exits_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert open_bundle(write(tmp_path / "bundle", with_exits())).manifest == with_exits()


def test_bundles_made_before_there_were_exits_have_none() -> None:
    assert decode_manifest(edited(lambda content: content.pop("exits")), "manifest.json").exits is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hidden_size": 16}, "exits have a hidden size of 16, its decoder 8"),
        ({"vocab_size": 33}, "vocabulary of 33, its decoder 32"),
        ({"target_layers": 5}, "number of layers of 5, its decoder 4"),
        ({"boundaries": (1,)}, r"exits lie at the boundaries \[1\], its stages end at \[2, 4\]"),
        ({"boundaries": (4,)}, "not all inside a model of 4 layers"),
        ({"boundaries": (), "files": ()}, "do not ascend"),
        ({"rank": -1}, "rank is -1"),
        ({"files": ()}, "0 graphs for exits at 1 boundaries"),
        ({"files": ("text", "text")}, "2 graphs for exits at 1 boundaries"),
        ({"top_k": 0}, "score 0 of 10 tokens"),
        ({"top_k": 11}, "score 11 of 10 tokens"),
        ({"exit_vocab_size": 33}, "exits score 33 tokens, more than the 32"),
        ({"files": ("graphs/exit_2.onnx",)}, r"names the graph graphs/exit_2\.onnx but no such file"),
    ],
)
def test_exits_of_another_decoder_are_refused(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=line):
        open_bundle(write(tmp_path / "bundle", with_exits(**changes)))
