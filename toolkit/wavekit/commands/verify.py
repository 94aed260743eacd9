"""``wavekit verify``: whether a bundle writes what it should, and if not, what is wrong with it."""

import datetime
import importlib.metadata
import shlex
import sys
from pathlib import Path

import click

import wavekit
from wavekit.commands.demo_reference import quieten
from wavekit.commands.extras import require
from wavekit.commands.formatting import table
from wavekit.commands.progress import Steps
from wavekit.verification.findings import Findings
from wavekit_engines.errors import MisuseError

_PATH = click.Path(path_type=Path)
_PACKAGES = ("wavekit", "numpy", "onnxruntime")


@click.command()
@click.argument("bundle", type=_PATH)
@click.option("--checkpoint", metavar="MODEL", help="Compare with the model the bundle was made from, in transformers.")
@click.option("--draft", type=_PATH, help="The folder of the bundle's draft head. [MODEL/draft, if it is there]")
@click.option("--prompts", type=_PATH, help="Write after the prompts of this file. [a few that come along]")
@click.option("--count", type=click.IntRange(1), help="Use the first so many prompts. [all that come along, or 6]")
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="Length of every text.")
@click.option("--json", "json_file", type=_PATH, help="Write everything that was found to a JSON file.")
@click.option("--threads", type=click.IntRange(1), help="Threads an engine may use.  [default: all cores]")
def verify(
    bundle: Path,
    checkpoint: str | None,
    draft: Path | None,
    prompts: Path | None,
    count: int | None,
    new_tokens: int,
    json_file: Path | None,
    threads: int | None,
) -> int:
    """Check that BUNDLE writes what it should in every mode, and name what is wrong if it does not.

    \b
    wavekit verify bundle
    wavekit verify bundle --checkpoint ./SmolLM2-135M-Instruct -o report
    wavekit verify bundle --checkpoint ./SmolLM2-135M-Instruct --draft ./draft --json found.json
    """
    require("onnxruntime", "onnxruntime")
    if draft is not None and checkpoint is None:
        raise MisuseError("--draft is compared on the states of the model it drafts for: give that with --checkpoint")
    if checkpoint is not None:
        require("demo", "torch", "transformers", "onnx_ir")
        quieten()
    from wavekit.llm import available_cores
    from wavekit.verification.prompts import samples_of_file, shipped_samples
    from wavekit.verification.run import prompt_facts, subject_of, verify_alone

    llm = wavekit.load(bundle, threads=threads)
    draft = draft or _draft_beside(checkpoint) if llm.manifest.draft is not None else draft
    samples = (
        samples_of_file(llm, prompts, count or 6, new_tokens) if prompts else shipped_samples(llm, count, new_tokens)
    )
    if not samples:
        raise MisuseError(f"{prompts} holds no prompt that can be used")
    found = Findings(
        subject=subject_of(llm, bundle, checkpoint, str(draft) if draft else None),
        prompts=prompt_facts(llm, samples),
        new_tokens=new_tokens,
        command=shlex.join(["wavekit", *sys.argv[1:]]),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={name: importlib.metadata.version(name) for name in _PACKAGES},
    )
    steps = Steps("verifying")
    try:
        texts = verify_alone(llm, samples, new_tokens, found, steps)
        if checkpoint is not None and texts is not None:
            from wavekit.verification.against_checkpoint.run import verify_against

            verify_against(llm, bundle, checkpoint, draft, texts, threads or available_cores(), found, steps)
    finally:
        steps.clear()
    if json_file is not None:
        json_file.write_bytes(found.encode())
    _tell(found)
    return 1 if found.failed else 0


def _draft_beside(checkpoint: str | None) -> Path | None:
    folder = Path(checkpoint) / "draft" if checkpoint is not None else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _tell(found: Findings) -> None:
    rows = [(check.group, check.name, check.verdict, check.says) for check in found.checks]
    click.echo(table(("", "check", "", "what was found"), rows))
    click.echo(found.verdict)
