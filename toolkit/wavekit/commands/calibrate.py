"""``wavekit calibrate``: choose the boundaries to tap from a model's own hidden states."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavekit.commands.command_line import command_line
from wavekit.commands.extras import require
from wavekit.commands.progress import Steps
from wavekit_engines.errors import MisuseError

if TYPE_CHECKING:
    from wavekit_calibration.calibrate import Job
    from wavekit_calibration.prompts import LeftOut

_SHOWN = 4
_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("model")
@click.option(
    "-o", "--output", "out", type=_PATH, required=True, help="Folder for calibration.json, figures and report.html."
)
@click.option("--prompts", type=_PATH, help="Prompts: .txt, .jsonl, chat, ShareGPT, MT-Bench, HumanEval. [shipped set]")
@click.option("-m", "--size", default=3, show_default=True, help="Boundaries to choose.")
@click.option("--method", type=click.Choice(["elsi", "elsi-c"]), default="elsi", show_default=True)
@click.option("--alpha", default=1.0, show_default=True, help="Order of the matrix entropy, above 0.")
@click.option("--beam", default=8, show_default=True, help="Sets kept in each round of the search.")
@click.option("--candidates", metavar="FIRST-LAST", help="Boundaries that may be chosen. [1 to N-1]")
@click.option("--set", "sets", multiple=True, metavar="A,B,..", help="Compare this set as well; may be repeated.")
@click.option("--exhaustive", is_flag=True, help="Score every set of the size, however many.")
@click.option("--quantile", type=float, help="Leave out tokens below this quantile of next-token entropy. [0.5]")
@click.option("--min-entropy", type=float, help="Leave out tokens below this next-token entropy in nats instead.")
@click.option("--answers", type=click.Choice(["self", "given"]), default="self", show_default=True,
              help="Answers written by the model, or those in the prompt file.")  # fmt: skip
@click.option("--positions", type=click.Choice(["answer", "all"]), default="answer", show_default=True,
              help="Measure where answers are predicted, or everywhere.")  # fmt: skip
@click.option("--skip-first", default=1, show_default=True, help="Positions left out at the start of a sequence.")
@click.option("--sample-tokens", default=1536, show_default=True, help="Positions sampled, before the filter.")
@click.option("--readiness-tokens", default=512, show_default=True, help="Positions read at every depth.")
@click.option("--max-new-tokens", default=40, show_default=True, help="Longest answer.")
@click.option("--max-prompts", default=256, show_default=True, help="Most prompts used; drawn if there are more.")
@click.option("--max-prompt-tokens", default=512, show_default=True, help="Longer prompts are left out.")
@click.option("--batch-size", default=16, show_default=True, help="Sequences run at once.")
@click.option("--draws", default=100, show_default=True, help="Resamples of the sequences.")
@click.option("--max-stages", default=8, show_default=True, help="Plan exits for 2 to this many stages.")
@click.option("--layer-costs", type=_PATH, help='Measured costs, JSON: {"layers": [one each], "head": one}.')
@click.option("--device", default="cpu", show_default=True, help="A torch device, or auto to spread over all.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
              show_default=True)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Processor threads. [torch's own choice]")
@click.option("--seed", default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on with an unfinished run in the folder, if there is one.")
@click.option("--restart", is_flag=True, help="Throw an unfinished run in the folder away.")
@click.option("--max-minutes", type=float, help="Stop after so long, to be resumed.")
def calibrate(model: str, out: Path, **options: Any) -> None:
    """Choose which boundaries of MODEL feed an EAGLE-3 draft head, and which depths are worth an exit.

    MODEL is a Hugging Face folder, a GGUF file or, where the hub can be reached, a repository id. The report explains
    the choice; export takes it with --calibration.

    \b
    wavekit calibrate ./SmolLM2-135M-Instruct -o calibrated
    wavekit calibrate ./SmolLM2-135M-Instruct -o calibrated --prompts mine.jsonl --size 3 --max-minutes 30
    """
    if options["resume"] and options["restart"]:
        raise MisuseError("--resume and --restart exclude each other")
    require("calibrate", "torch", "transformers", "accelerate", "matplotlib")
    import torch

    from wavekit_calibration.calibrate import calibrate as run

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    job = _job(model, out, options)
    _tell_left_out(job.prompts.name, job.prompts.left_out)
    steps = Steps("calibrating")
    try:
        calibration = run(job, steps)
    finally:
        steps.clear()
    click.echo(f"boundaries {', '.join(map(str, calibration.boundaries))} of 0-{calibration.model.num_layers}")
    click.echo(calibration.selection.verdict)
    click.echo(f"report: {out / 'report.html'}")
    click.echo(f"next: wavekit export {shlex.quote(model)} --calibration {shlex.quote(str(out))} -o bundle")


def _job(model: str, out: Path, options: dict[str, Any]) -> "Job":
    from wavekit_calibration.calibrate import Job
    from wavekit_calibration.prompts import read_prompts, shipped_prompts
    from wavekit_calibration.selection import parse_set
    from wavekit_calibration.settings import MeasureSettings, SelectSettings
    from wavekit_calibration.token_filter import FilterRule

    quantile, nats = options["quantile"], options["min_entropy"]
    layers, head = _read_costs(options["layer_costs"])
    measured = ("answers", "positions", "skip_first", "sample_tokens", "readiness_tokens", "max_new_tokens",
                "max_prompts", "max_prompt_tokens", "batch_size", "dtype", "seed")  # fmt: skip
    chosen = ("size", "method", "alpha", "beam", "exhaustive", "draws", "max_stages")
    return Job(
        model=model,
        prompts=read_prompts(options["prompts"]) if options["prompts"] else shipped_prompts(),
        out=out,
        measure=MeasureSettings(**{name: options[name] for name in measured}),
        select=SelectSettings(
            filter=FilterRule() if quantile is None and nats is None else FilterRule(quantile, nats),
            candidates=_read_span(options["candidates"]),
            user_sets=tuple(parse_set(text) for text in options["sets"]),
            layer_costs=layers,
            head_cost=head,
            **{name: options[name] for name in chosen},
        ),
        device=options["device"],
        unfinished="restart" if options["restart"] else "resume" if options["resume"] else "refuse",
        max_minutes=options["max_minutes"],
        command=command_line(),
    )


def _read_span(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
        raise MisuseError(f"--candidates takes a span such as 1-29, got {text!r}")
    return int(first), int(last)


def _read_costs(file: Path | None) -> tuple[tuple[float, ...] | None, float | None]:
    if file is None:
        return None, None
    try:
        content = json.loads(file.read_text("utf-8"))
        return tuple(float(c) for c in content["layers"]), float(content["head"])
    except OSError as error:
        raise MisuseError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise MisuseError(
            f'{file} holds no layer costs; write {{"layers": [one number each], "head": number}}'
        ) from None


def _tell_left_out(name: str, left_out: Sequence["LeftOut"]) -> None:
    """The first few lines and the last, where a file that is cut off ends."""
    hidden = left_out[_SHOWN:-1]
    for line in (*left_out[:_SHOWN], *left_out[_SHOWN:][-1:]):
        click.echo(f"{name}, line {line.line} left out: {line.reason}", err=True)
    if hidden:
        click.echo(f"{name}: {len(hidden)} more lines left out", err=True)
