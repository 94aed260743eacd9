"""``wavekit bench`` as a user runs it: what it prints and writes, what it refuses, and that it notices another text."""

import json
from pathlib import Path

import pytest
from bench_bundle import bench_bundle
from command_line import assert_one_line, wavekit_here

from wavekit.benchmarking import bench, memory, peers
from wavekit.benchmarking.openings import Place
from wavekit.benchmarking.runs import Written
from wavekit.benchmarking.runs import write as write_really
from wavekit.profiles import Setting

SHORT = ("--count", "2", "-n", "6", "--rounds", "2", "--threads", "1", "--lanes", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    bench_bundle(folder)
    return folder


@pytest.fixture(autouse=True)
def _weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "peak_memory", lambda *_: 12_000_000)


def test_modes_stand_side_by_side(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat.txt").write_text("First prompt\nSecond prompt\nThird prompt\n")
    (tmp_path / "code.jsonl").write_text('{"prompt": "def f(x):"}\n')
    result = wavekit_here(
        capfd, "bench", folder / "bundle", "--prompts", f"talk={tmp_path / 'chat.txt'}", "--prompts",
        tmp_path / "code.jsonl", *SHORT, "-o", tmp_path / "out", "--json", tmp_path / "found.json",
    )  # fmt: skip
    text = result.stdout.decode()
    assert result.returncode == 0, text + result.stderr.decode()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["schema_version"] == 1
    assert found["sets"] == {"talk": 2, "code": 1}
    assert [way["name"] for way in found["ways"]] == [
        "plain", "draft", "lookup", "draft+lookup", "exits", "draft+exits"
    ]  # fmt: skip
    assert {run["way"]: 0 for run in found["runs"]}.keys() == {way["name"] for way in found["ways"]}
    assert len(found["runs"]) == 6 * 3 * 2
    for way in found["ways"]:
        assert (way["differences"], way["texts"], way["peak_memory"]) == ([], 3, 12_000_000)
        assert (way["summary"]["runs"], way["sets"]["code"]["runs"]) == (6, 2)
        assert way["setting"]["lanes"] == (2 if "exits" in way["name"] else 1)
        assert f"\n{way['name']} " in text
    plain = found["ways"][0]["summary"]
    assert (plain["tau"], plain["speed"]["median"], plain["ticks"], plain["acceptance"]) == (1, 1, 2, [])
    for run in found["runs"]:
        written = run["written"]
        assert len(written["tokens"]) - 1 == len(written["gaps"]) == sum(written["groups"])
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "bench.json", "table.txt", "figure.svg", "figure.png"
    }  # fmt: skip
    assert (tmp_path / "out" / "table.txt").read_text().strip() in text


def test_every_way_has_its_turn_at_being_first(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    wavekit_here(capfd, "bench", folder / "bundle", "--modes", "lookup", *SHORT, "--json", file)
    order = [run["way"] for run in json.loads(file.read_text())["runs"]]
    assert order == ["plain", "lookup", "lookup", "plain", "lookup", "plain", "plain", "lookup"]


def test_another_engine_is_measured_and_named(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    result = wavekit_here(
        capfd, "bench", folder / "bundle", "--modes", "lookup", "--engine", "torch", *SHORT, "--json", file
    )  # fmt: skip
    assert result.returncode == 0, result.stderr.decode()
    assert " with torch on " in result.stdout.decode()
    found = json.loads(file.read_text())
    assert (found["subject"]["engine"], found["subject"]["device"]) == ("torch", None)
    assert [way["differences"] for way in found["ways"]] == [[], []]


def test_another_text_is_told_and_fails(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*arguments: object) -> Written:
        written = write_really(*arguments)  # type: ignore[arg-type]
        if arguments[1].speculation.mode == "lookup":  # type: ignore[attr-defined]
            object.__setattr__(written, "tokens", (*written.tokens[:3], -1, *written.tokens[4:]))
        return written

    monkeypatch.setattr(bench, "write", spoilt)
    result = wavekit_here(capfd, "bench", folder / "bundle", "--modes", "lookup,draft", *SHORT)
    assert result.returncode == 1
    assert "lookup: 2 of 2 texts differ from plain decoding, the first: shipped, prompt 1, token 4" in (
        result.stdout.decode()
    )


def test_a_rounded_bundle_without_a_draft_is_measured_plainly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = bench_bundle(tmp_path, draft=None, draft_precision=None, exits=None, precision="int8")
    result = wavekit_here(capfd, "bench", bundle, *SHORT)
    assert result.returncode == 0
    assert "lookup is left out: an int8 bundle without a draft head may write other tokens" in result.stdout.decode()


STUB = """
import json, sys
print(json.dumps({"versions": {"stub": "1"}}), flush=True)
for line in sys.stdin:
    count = json.loads(line)["new_tokens"]
    answer = {"tokens": [4] * count, "prefill_seconds": 0.5, "decode_seconds": count - 1, "cpu_seconds": 0.0}
    print(json.dumps(answer), flush=True)
"""


def test_peers_stand_beside_and_missing_ones_are_left_out_with_a_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = peers.peers([("onnxruntime-genai", str(folder)), ("transformers", str(folder))], None, 1)
    (tmp_path / "stub.py").write_text(STUB)
    started[1].command[1] = str(tmp_path / "stub.py")
    monkeypatch.setattr(peers, "peers", lambda *_: started)
    file = tmp_path / "found.json"
    result = wavekit_here(
        capfd, "bench", folder / "bundle", "--modes", "plain", "--against", "both", "--json", file, *SHORT
    )
    text = result.stdout.decode()
    assert result.returncode == 0, result.stderr.decode()
    assert "onnxruntime-genai is left out: onnxruntime-genai is not installed in the environment of" in text
    found = json.loads(file.read_text())
    peer = found["ways"][1]
    assert (peer["name"], peer["setting"], peer["peak_memory"]) == ("transformers", None, None)
    assert peer["summary"]["tokens_per_second"]["median"] == 1.0
    assert (len(peer["differences"]), found["versions"]["stub"]) == (2, "1")
    assert "transformers: 2 of 2 texts differ from plain decoding" in text


@pytest.mark.slow
def test_transformers_writes_what_an_fp32_bundle_writes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    against = f"transformers={folder / 'model'}"
    result = wavekit_here(capfd, "bench", folder / "bundle", "--modes", "plain", "--against", against, *SHORT)
    assert result.returncode == 0, result.stderr.decode()
    assert "transformers: " not in result.stdout.decode()


def test_a_peer_that_fails_says_why(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--modes",
        "plain",
        "--against",
        f"transformers={folder}",
        "--peer-python",
        tmp_path / "python",
        *SHORT,
    )
    result = wavekit_here(capfd, "bench", folder / "bundle", *arguments)
    assert_one_line(result, 2, "transformers", "cannot be started: No such file or directory")


def test_memory_is_that_of_a_process_of_its_own(folder: Path) -> None:
    peak = memory.peak_memory(folder / "bundle", Place(), Setting(1), (5, 6, 7), 4)
    assert peak is not None
    assert 30e6 < peak < 500e6


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["bundle", "--modes", "guess"], ["does not offer guess", "plain, draft"]),
        (["bundle", "--modes", "tuned"], ["`wavekit tune`"]),
        (["bundle", "--prompts", "nowhere.txt"], ["no prompt file"]),
        (["bundle", "--against", "vllm=model"], ["vllm is no peer", "onnxruntime-genai"]),
        (["bundle", "--against", "transformers=nowhere"], ["there is no nowhere"]),
        (["bundle", "--json", "nowhere/found.json"], ["there is no folder"]),
        (["bundle", "-o", "model/config.json"], ["config.json is a file", "another name"]),
        (["bundle", "-o", "model/config.json/inner"], ["config.json is a file"]),
        (["bundle", "--json", "model"], ["model is a folder"]),
        (["model"], ["is not a bundle"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str],
    parts: list[str],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert_one_line(wavekit_here(capfd, "bench", *arguments), 2, *parts)
