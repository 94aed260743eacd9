"""The scripts of `examples/` run as their READMEs say, here on small random models; the first one in the e2e tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, environment
from draft_models import draft_of
from serving_here import KEY, Server, text_bundle

import wavekit
from wavekit.profiles import FOLDER
from wavekit.serving.app import Limits, create_app
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_formats import write_draft

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its head in a folder, and a bundle of both."""
    folder = tmp_path_factory.mktemp("examples")
    text_bundle(folder)
    write_draft(folder / "head", draft_of(open_checkpoint(str(folder / "model")), seed=2), "specforge")
    return folder


def run(*command: str | Path, **variables: str) -> str:
    path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment(PATH=path, **variables), check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_example_has_a_readme_that_names_its_scripts() -> None:
    for folder in EXAMPLES.iterdir():
        readme = (folder / "README.md").read_text()
        assert [script.name for script in folder.glob("*.[ps][yh]") if script.name not in readme] == []


def test_serve(folder: Path) -> None:
    llm = wavekit.load(folder / "tiny", threads=1)
    server = Server(create_app(llm, "tiny", Limits(), KEY))
    try:
        written = run(sys.executable, EXAMPLES / "04_serve" / "ask.py", f"{server.url}/v1", WAVEKIT_API_KEY=KEY)
    finally:
        server.stop()
        llm.close()
    assert "tokens a pass" in written
    assert "'country'" in written.splitlines()[-1]


def test_bring_your_own_draft(folder: Path, tmp_path: Path) -> None:
    script = EXAMPLES / "05_bring_your_own_draft" / "bring.sh"
    run("bash", script, folder / "model", folder / "head", tmp_path, "--count", "1", "--new-tokens", "6")
    assert wavekit.load(tmp_path / "bundle", threads=1).generate("x", max_new_tokens=4, speculate="draft").token_ids
    assert (tmp_path / "report" / "report.html").is_file()
    assert (tmp_path / "for-vllm" / "config.json").is_file()


def test_tune(folder: Path) -> None:
    script = EXAMPLES / "06_tune" / "tune.sh"
    written = run("bash", script, folder / "tiny", "--count", "1", "-n", "6", "--minutes", "0.02")
    assert "over plain" in written
    assert [*(folder / "tiny" / FOLDER).glob("*.json")] or "plain decoding with all cores stays" in written
