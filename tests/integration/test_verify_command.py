"""``wavekit verify`` as a user runs it: what it prints and writes, and what it refuses."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_one_line, save_text_model, wavekit_here
from draft_models import draft_of
from engines import exported
from planted_faults import planted, stored
from tiny_models import save_tiny

from wavekit.verification import distribution, lossless
from wavekit.verification.ways import ways_of
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_formats import write_draft

SHORT = ("--count", "2", "--new-tokens", "6", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its draft head in ``model/draft``, and bundles with and without it."""
    folder = tmp_path_factory.mktemp("verify")
    model = save_text_model("llama-untied", folder / "model", seed=1)
    draft = draft_of(open_checkpoint(str(model)), seed=2)
    write_draft(model / "draft", draft, "specforge")
    exported(model, folder / "bundle", draft=draft, draft_precision="fp32")
    exported(model, folder / "int8", precision="int8")
    return folder


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "_SEEDS", 40)
    monkeypatch.setattr(lossless, "ways_of", lambda decoder: [way for way in ways_of(decoder) if "tree" in way.name])


class Page(HTMLParser):
    """Every address that a page would fetch, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_a_report_needs_nothing_but_itself(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = wavekit_here(
        capfd, "verify", folder / "bundle", "--checkpoint", folder / "model", "-o", tmp_path / "report", *SHORT
    )
    assert result.returncode == 0, result.stdout.decode()
    text = (tmp_path / "report" / "report.html").read_text()
    page = Page(text)
    assert page.addresses == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert page.tags.count("svg") == 3
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "width=device-width" in text
    assert str(tmp_path) not in text.replace(f"-o {tmp_path / 'report'}", "")


def test_json_holds_everything_that_was_found(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    result = wavekit_here(capfd, "verify", folder / "bundle", "--checkpoint", folder / "model", "--json", file, *SHORT)
    found = json.loads(file.read_text())
    assert (result.returncode, found["verdict"], found["schema_version"]) == (0, "pass", 1)
    assert {check["verdict"] for check in found["checks"]} <= {"pass", "skipped"}
    assert [row["boundary"] for row in found["drift"]["boundaries"]] == [0, 1, 2, 3, 4]
    assert max(row["worst"] for row in found["drift"]["boundaries"]) < 1e-5
    assert found["draft"]["tau_torch"] == pytest.approx(found["draft"]["tau_engines"], rel=0.01)
    assert found["subject"]["draft_boundaries"] == [1, 2, 3]
    assert [prompt["name"] for prompt in found["prompts"]] == ["question", "prose"]
    for check in found["checks"]:
        assert f"{check['verdict']:<7}  {check['group']:<10}  {check['name']}" in result.stdout.decode()


def test_a_divergence_is_told_with_both_tokens_and_the_margin(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def another_head(copy: Path) -> None:
        head = stored(copy, "head", "head")
        head[:] = head[::-1].copy()

    bundle = planted(folder / "bundle", tmp_path / "copy", another_head)
    result = wavekit_here(capfd, "verify", bundle, "--checkpoint", folder / "model", "-o", tmp_path / "report", *SHORT)
    assert result.returncode == 1
    found = json.loads((tmp_path / "report" / "found.json").read_text())
    first = next(one for one in found["divergences"] if one["way"] == "transformers")
    assert (first["position"], first["explained"]) == (0, False)
    assert first["expected"] == 319 - first["found"]  # rows in reverse order
    assert first["margin"] > 1e-3
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Where texts part" in page
    assert "rows permuted" in page


def test_a_bundle_alone_needs_neither_checkpoint_nor_tokenizer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama-tied", tmp_path / "model")
    result = wavekit_here(capfd, "verify", exported(tmp_path / "model", tmp_path / "bundle"), *SHORT)
    assert result.returncode == 0, result.stdout.decode()
    assert "skipped  text        tokenizer" in result.stdout.decode()


def test_another_engine_is_verified(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = wavekit_here(capfd, "verify", folder / "bundle", "--engine", "torch", "--count", "1", "--new-tokens", "4")
    assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()


def test_prompts_come_from_a_file(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, found = tmp_path / "prompts.txt", tmp_path / "found.json"
    file.write_text("First prompt\nSecond prompt\nThird prompt\n")
    result = wavekit_here(capfd, "verify", folder / "int8", "--prompts", file, "--json", found, *SHORT)
    assert result.returncode == 0, result.stdout.decode()
    assert [prompt["name"] for prompt in json.loads(found.read_text())["prompts"]] == ["prompt 1", "prompt 2"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["int8", "--draft", "model/draft"], ["--checkpoint"]),
        (["int8", "--checkpoint", "model", "--draft", "model/draft"], ["no draft head", "leave --draft out"]),
        (["int8", "--checkpoint", "nowhere/at/all"], ["does not exist"]),
        (["bundle", "--json", "nowhere/found.json"], ["there is no folder"]),
        (["bundle", "-o", "model/config.json"], ["config.json is a file", "another name"]),
        (["bundle", "-o", "model/config.json/inner"], ["config.json is a file"]),
        (["bundle", "--json", "model"], ["model is a folder"]),
        (["bundle", "--new-tokens", "256"], ["--new-tokens"]),
        (["model"], ["is not a bundle"]),
        (["bundle", "--count", "0"], ["--count"]),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    arguments: list[str], parts: list[str], folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert_one_line(wavekit_here(capfd, "verify", *arguments), 2, *parts)


def test_a_model_of_another_shape_is_refused(folder: Path, tmp_path: Path, capfd: Any) -> None:
    save_tiny("gemma3-tied", tmp_path / "other")
    result = wavekit_here(capfd, "verify", folder / "int8", "--checkpoint", tmp_path / "other")
    assert_one_line(result, 2, "4 layers", "6", "the model it was made from")
