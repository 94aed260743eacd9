"""``wavekit verify``: whether a bundle writes what it should, and if not, what is wrong with it."""

import datetime
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

import wavekit
from wavekit.commands.command_line import command_line
from wavekit.commands.demo_reference import quieten
from wavekit.commands.engine_options import engine_options
from wavekit.commands.extras import require
from wavekit.commands.progress import Steps
from wavekit.verification.findings import Findings
from wavekit_engines.atomic import write_file
from wavekit_engines.errors import MisuseError
from wavekit_engines.outputs import check_file, check_folder, make_folder

if TYPE_CHECKING:
    from wavekit.llm import LLM
    from wavekit.verification.against_checkpoint.run import Given
    from wavekit.verification.prompts import Sample

_PATH = click.Path(path_type=Path)
_PACKAGES = ("wavekit", "numpy")
_PACKAGES_OF_CHECKPOINT = ("torch", "transformers", "onnx-ir")
_PROMPTS = 6


@click.command()
@click.argument("bundle", type=_PATH)
@click.option("--checkpoint", metavar="MODEL", help="Compare with the model the bundle was made from, in transformers.")
@click.option("--draft", type=_PATH, help="The folder of the bundle's draft head. [MODEL/draft, if it is there]")
@click.option("--prompts", type=_PATH, help="Write after the prompts of this file. [a few that come along]")
@click.option("--count", type=click.IntRange(1), help="Use the first so many prompts. [all that come along, or 6]")
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="Length of every text.")
@click.option("-o", "--output", "out", type=_PATH, help="Folder for report.html and found.json.")
@click.option("--json", "json_file", type=_PATH, help="Write everything that was found to a JSON file.")
@click.option("--threads", type=click.IntRange(1), help="Threads an engine may use.  [default: all cores]")
@engine_options
def verify(
    bundle: Path,
    checkpoint: str | None,
    draft: Path | None,
    prompts: Path | None,
    count: int | None,
    new_tokens: int,
    out: Path | None,
    json_file: Path | None,
    threads: int | None,
    engine: str,
    device: str | None,
) -> int:
    """Check that BUNDLE writes what it should in every mode, and name what is wrong if it does not.

    \b
    wavekit verify bundle
    wavekit verify bundle --checkpoint ./SmolLM2-135M-Instruct -o report
    wavekit verify bundle --checkpoint ./SmolLM2-135M-Instruct --draft ./draft --json found.json
    """
    from wavekit.llm import available_cores
    from wavekit.verification.run import verify_alone
    from wavekit.verification.tolerances import tolerance_of

    check_folder(out)
    check_file(json_file)
    _check_options(checkpoint, draft)
    llm = wavekit.load(bundle, threads=threads, engine=engine, device=device)
    given = _open_given(llm, checkpoint, draft)
    samples = _samples(llm, prompts, count, new_tokens)
    found = _nothing_found(llm, samples, bundle, given, new_tokens)
    steps = Steps("verifying")
    try:
        texts = verify_alone(llm, samples, new_tokens, found, steps)
        if given is not None and texts is not None:
            from wavekit.verification.against_checkpoint.run import verify_against

            verify_against(llm, bundle, given, texts, threads or available_cores(), found, steps)
    finally:
        steps.clear()
    _tell(found)
    _write(found, out, json_file, tolerance_of(llm.manifest.engine).drift)
    return 1 if found.failed else 0


def _check_options(checkpoint: str | None, draft: Path | None) -> None:
    if draft is not None and checkpoint is None:
        raise MisuseError("--draft is compared on the states of the model it drafts for: give that with --checkpoint")
    if checkpoint is not None:
        require("demo", "onnxruntime", "torch", "transformers", "onnx_ir")
        quieten()


def _open_given(llm: "LLM", checkpoint: str | None, draft: Path | None) -> "Given | None":
    if checkpoint is None:
        return None
    from wavekit.verification.against_checkpoint.run import open_given

    beside = Path(checkpoint) / "draft"
    if draft is None and llm.manifest.draft is not None and (beside / "config.json").is_file():
        draft = beside
    return open_given(llm.manifest, checkpoint, draft)


def _samples(llm: "LLM", prompts: Path | None, count: int | None, new_tokens: int) -> "list[Sample]":
    from wavekit.verification.prompts import samples_of_file, shipped_samples

    if prompts is None:
        return shipped_samples(llm, count, new_tokens)
    samples = samples_of_file(llm, prompts, count or _PROMPTS, new_tokens)
    if not samples:
        raise MisuseError(f"{prompts} holds no prompt that can be used")
    return samples


def _nothing_found(
    llm: "LLM", samples: "list[Sample]", bundle: Path, given: "Given | None", new_tokens: int
) -> Findings:
    from wavekit.verification.run import prompt_facts, subject_of

    packages = (*_PACKAGES, *(_PACKAGES_OF_CHECKPOINT if given is not None else ()))
    draft = given.draft.origin or "the draft head given" if given is not None and given.draft is not None else None
    return Findings(
        subject=subject_of(llm, bundle, given.checkpoint.name if given is not None else None, draft),
        prompts=prompt_facts(llm, samples),
        new_tokens=new_tokens,
        command=command_line(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={name: importlib.metadata.version(name) for name in packages} | _engine_versions(),
    )


def _engine_versions() -> dict[str, str]:
    """Of what is loaded: several distributions bring ``onnxruntime``, so the module says."""
    return {name: str(sys.modules[name].__version__) for name in ("onnxruntime", "torch") if name in sys.modules}


def _tell(found: Findings) -> None:
    """A line for each check; what is wrong is said last, where it is seen."""
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        marked = click.style(check.verdict.ljust(7), fg={"pass": "green", "FAIL": "red"}.get(check.verdict))
        click.echo(f"{marked}  {check.group:<10}  {check.name:<{width}}  {check.says}")
    click.echo(f"\n{found.verdict}")


def _write(found: Findings, out: Path | None, json_file: Path | None, limit: float | None) -> None:
    """The page and the JSON, each whole or not at all."""
    from wavekit.verification.page import render

    if out is not None:
        make_folder(out)
        write_file(out / "report.html", render(found, limit).encode())
        write_file(out / "found.json", found.encode())
        click.echo(f"report: {out / 'report.html'}")
    if json_file is not None:
        write_file(json_file, found.encode())
