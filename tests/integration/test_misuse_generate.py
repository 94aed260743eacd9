"""``wavekit generate``: prompts and parameters that make no sense, readers that leave early, and what does work."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND, assert_one_line, environment, save_text_model, wavekit, wavekit_here
from engines import exported


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    return exported(save_text_model("llama-tied", folder / "model"), folder / "bundle", split=(1, 2))


@pytest.mark.parametrize(
    ("stdin", "part"), [(b"", "prompt is empty"), (b"\xff\xfe", "not UTF-8"), (b"x" * 300, "300 tokens")]
)
def test_a_prompt_on_standard_input_that_cannot_be_continued(stdin: bytes, part: str, bundle: Path) -> None:
    assert_one_line(wavekit("generate", bundle, stdin=stdin), 2, part)


def test_a_closed_standard_input_is_no_prompt(bundle: Path) -> None:
    command = f"exec {COMMAND} generate {bundle} <&-"
    result = subprocess.run(["bash", "-c", command], capture_output=True, env=environment(), check=False)
    assert_one_line(result, 2, "there is no prompt")


def test_a_prompt_as_long_as_the_context(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = wavekit_here(capfd, "generate", bundle, "x" * 256)
    assert_one_line(result, 2, "256 tokens", "context holds 256", "shorten it")


def test_an_argument_that_is_not_utf_8(bundle: Path) -> None:
    assert_one_line(wavekit("generate", bundle, os.fsdecode(b"\xff")), 2, "not valid Unicode")


@pytest.mark.parametrize(
    ("content", "part"), [(None, "cannot read"), (b"", "prompt is empty"), (b"caf\xe9", "not UTF-8 text")]
)
def test_a_prompt_file_that_cannot_be_used(
    content: bytes | None, part: str, bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "prompt").write_bytes(content)
    assert_one_line(wavekit_here(capfd, "generate", bundle, "--file", tmp_path / "prompt"), 2, part)


def test_a_directory_is_no_prompt_file(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_line(wavekit_here(capfd, "generate", bundle, "--file", bundle), 2, "cannot read", "directory")


def test_two_prompts(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_line(wavekit_here(capfd, "generate", bundle, "Hello", "--file", tmp_path), 2, "two prompts")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--temperature -1", "temperature"),
        ("--temperature nan", "temperature"),
        ("--temperature inf", "temperature"),
        ("--temperature hot", "--temperature"),
        ("--top-k -1", "top_k"),
        ("--top-k 1.5", "--top-k"),
        ("--top-p 0", "top_p"),
        ("--top-p 1.1", "top_p"),
        ("--min-p -0.1", "min_p"),
        ("--min-p 2", "min_p"),
        ("--repetition-penalty 0", "repetition_penalty"),
        ("--repetition-penalty -1", "repetition_penalty"),
        ("--seed -1", "seed"),
        ("--seed 18446744073709551616", "seed"),
        ("--max-new-tokens 0", "max_new_tokens"),
        ("--max-new-tokens -5", "max_new_tokens"),
        ("--threads 0", "threads"),
        ("--threads -1", "threads"),
        ("--threads many", "--threads"),
        ("--stop=", "stop strings"),
        ("--exits 1", "--speculate exits"),
        ("--trace nowhere/timeline.json", "there is no folder"),
        ("--trace /", "is a folder"),
    ],
)
def test_a_parameter_out_of_range(options: str, part: str, bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_line(wavekit_here(capfd, "generate", bundle, "Hello", *options.split()), 2, part)


def test_chat_without_a_chat_template(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(bundle.parent / "model", tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    bare = exported(model, tmp_path / "bundle")
    assert_one_line(wavekit_here(capfd, "generate", bare, "--chat", "Hello"), 2, "chat template")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_early_ends_the_text_in_silence(options: list[str], bundle: Path) -> None:
    command = [COMMAND, "generate", bundle, "Hello", "-n", "200", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_output_to_a_full_disk(command: str, bundle: Path) -> None:
    arguments = [COMMAND, command, bundle, *(["Hello"] if command == "generate" else [])]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, env=environment(), check=False)
    result.stdout = b""
    assert_one_line(result, 1, "disk is full")


def test_argument_file_and_standard_input_give_the_same_text(bundle: Path, tmp_path: Path) -> None:
    prompt = "Grüße, 世界 🎉"
    (tmp_path / "prompt").write_text(prompt, encoding="utf-8")
    options = ["-n", "30", "--temperature", "0.9", "--seed", "3"]
    results = [
        wavekit("generate", bundle, prompt, *options),
        wavekit("generate", bundle, "--file", tmp_path / "prompt", *options),
        wavekit("generate", bundle, *options, stdin=prompt.encode()),
    ]
    assert {(result.returncode, result.stderr) for result in results} == {(0, b"")}
    assert len({result.stdout for result in results}) == 1


def test_json_holds_the_whole_result(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = wavekit_here(capfd, "generate", bundle, "Hello", "-n", "9").stdout.decode()
    result = wavekit_here(capfd, "generate", bundle, "Hello", "-n", "9", "--json")
    (line,) = result.stdout.decode().splitlines()
    content = json.loads(line)
    assert content["text"] + "\n" == text
    assert len(content["token_ids"]) == 9
    assert (content["finish_reason"], content["prompt_tokens"]) == ("length", 5)
    assert set(content["timings"]) == {
        "prefill_seconds", "decode_seconds", "tokens_per_second", "host_share", "ticks"
    }  # fmt: skip
