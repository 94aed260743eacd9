"""A request to export that cannot be met is one line and exit code 2 (misuse) or 1 (failure); nothing is written."""

import json
import os
import shutil
from pathlib import Path

import pytest
from command_line import assert_one_line, save_text_model, wavekit, wavekit_here


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model("llama-untied", tmp_path_factory.mktemp("original") / "model")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def set_config(checkpoint: Path, **changes: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **changes}))


def assert_refused(checkpoint: Path, code: int, *parts: str, options: tuple[str, ...] = ()) -> None:
    """Exporting fails in one line and leaves nothing, not even the output's parent."""
    before = sorted(os.listdir(checkpoint.parent))
    output = checkpoint.parent / "new" / "bundle"
    assert_one_line(wavekit("export", checkpoint, "-o", output, *options), code, *parts)
    assert sorted(os.listdir(checkpoint.parent)) == before


def test_a_missing_model(tmp_path: Path) -> None:
    assert_refused(
        tmp_path / "model", 2, "model does not exist", "a checkpoint folder, a .gguf file or a repository id"
    )


def test_a_bundle_in_place_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").touch()
    assert_refused(tmp_path / "bundle", 2, "is a bundle, not a checkpoint")


@pytest.mark.parametrize("made", ["draft", "exits"])
def test_the_folder_of_a_training_run_names_the_folder_inside(made: str, checkpoint: Path) -> None:
    run = checkpoint / "run"
    (run / made).mkdir(parents=True)
    (run / made / "config.json").write_text("{}")
    assert_refused(checkpoint, 2, "folder of a training run", str(run / made), options=(f"--{made}", str(run)))


@pytest.mark.parametrize(
    ("file", "code", "parts"),
    [
        ("config.json", 2, ["it has no config.json"]),
        ("model.safetensors", 1, ["has no weights", "model.safetensors"]),
    ],
)
def test_a_missing_file(file: str, code: int, parts: list[str], checkpoint: Path) -> None:
    (checkpoint / file).unlink()
    assert_refused(checkpoint, code, *parts)


def test_a_missing_shard(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    weight_map = {"lm_head.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(checkpoint, 1, "model-00002-of-00002.safetensors is missing")


def test_a_tokenizer_without_its_configuration(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").unlink()
    assert_refused(checkpoint, 1, "tokenizer_config.json is missing")


def test_a_damaged_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"')
    assert_refused(checkpoint, 1, "tokenizer.json cannot be read")


@pytest.mark.parametrize("left", [4, 5000])
def test_truncated_weights(left: int, checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", left)
    assert_refused(checkpoint, 1, "model.safetensors is truncated", "download it again")


def test_only_pickled_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    assert_refused(checkpoint, 2, "pickled PyTorch files", "save_pretrained")


def test_an_unsupported_architecture_is_named(checkpoint: Path) -> None:
    set_config(checkpoint, model_type="mamba")
    assert_refused(checkpoint, 2, "mamba")


@pytest.mark.parametrize(("config", "code"), [("not JSON", 1), ("[1, 2]", 1), ('{"model_type": "llama"}', 2)])
def test_a_damaged_configuration(config: str, code: int, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(config)
    assert_refused(checkpoint, code, "config")


def test_a_checkpoint_without_tokenizer_is_exported_and_said_to_take_token_ids(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    result = wavekit("export", checkpoint, "-o", checkpoint.parent / "bundle")
    assert result.returncode == 0
    assert b"no tokenizer.json" in result.stdout
    refused = wavekit("generate", checkpoint.parent / "bundle", "text")
    assert_one_line(refused, 2, "has no tokenizer", "token ids")


def test_a_setting_that_matters_and_is_not_understood_is_named(checkpoint: Path) -> None:
    set_config(checkpoint, attention_sinks=4)
    assert_refused(checkpoint, 2, "attention_sinks=4")


def test_stop_tokens_that_are_no_numbers(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [2, "</s>"]}')
    assert_refused(checkpoint, 1, "eos_token_id", "</s>")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--stages 0", "--stages"),
        ("--stages 5", "1 to 4 stages"),
        ("--stages two", "--stages"),
        ("--stages 2 --split 2", "give one of them"),
        ("--split 0", "--split 0"),
        ("--split 4", "--split 4"),
        ("--split 2,1", "--split 2,1"),
        ("--split 1,,2", "--split"),
        ("--taps 5", "--taps 5"),
        ("--taps -1", "--taps -1"),
        ("--taps 1,1", "--taps 1,1"),
        ("--precision fp8", "fp8"),
        ("--precision fp16 --head-precision int8", "int8 head"),
        ("--precision int4 --head-precision fp16", "fp16 head"),
        ("--precision int4 --block-size 8", "--block-size"),
        ("--tapz 1", "--tapz"),
    ],
)
def test_options_that_make_no_sense(
    options: str, part: str, original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = wavekit_here(capfd, "export", original, "-o", tmp_path / "bundle", *options.split())
    assert_one_line(result, 2, part)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("taken", ["file", "directory", "bundle", "the checkpoint"])
def test_a_taken_name(taken: str, checkpoint: Path) -> None:
    output = checkpoint if taken == "the checkpoint" else checkpoint.parent / "taken"
    if taken == "file":
        output.write_text("text")
    elif taken != "the checkpoint":
        output.mkdir()
        (output / ("manifest.json" if taken == "bundle" else "file")).write_text("{}")
    before = sorted(output.parent.rglob("*"))
    assert_one_line(wavekit("export", checkpoint, "-o", output), 2, "exists already", "--force")
    if taken != "bundle":
        assert_one_line(wavekit("export", checkpoint, "-o", output, "--force"), 2, "is not a bundle")
    assert sorted(output.parent.rglob("*")) == before


def test_an_output_below_a_file(checkpoint: Path) -> None:
    output = checkpoint / "config.json" / "bundle"
    assert_one_line(wavekit("export", checkpoint, "-o", output), 2, "cannot write to")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [("exprot", "exprot"), ("export", "MODEL"), ("export model", "--output"), ("generate", "BUNDLE")],
)
def test_a_command_that_is_not_complete(arguments: str, part: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_line(wavekit_here(capfd, *arguments.split()), 2, part, "--help")


def test_no_command_at_all_is_answered_with_the_help() -> None:
    result = wavekit()
    assert result.returncode == 2
    assert "export" in result.stderr.decode()
