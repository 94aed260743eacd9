"""Options that every kind of training has, how they become a job's fields, and how a job is run."""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wavekit.commands.command_line import command_line
from wavekit.commands.extras import require
from wavekit.commands.progress import Steps
from wavekit_engines.atomic import held
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.outputs import make_folder

if TYPE_CHECKING:
    from wavekit_calibration.measure import Progress
    from wavekit_calibration.training.draft_texts import TextWriter
    from wavekit_calibration.training.training_job import TrainingJob

PATH = click.Path(path_type=Path)
LOOP_FIELDS = ("epochs", "batch_size", "learning_rate", "evaluate_every", "patience", "precision", "seed")
_JOB_FIELDS = (
    *("max_new_tokens", "max_prompt_tokens", "temperature", "held_out", "stored", "device", "max_minutes", "texts"),
)

Command = TypeVar("Command", bound=Callable[..., Any])
Job = TypeVar("Job", bound="TrainingJob")
Look = TypeVar("Look")
Made = TypeVar("Made")
Record = TypeVar("Record")


def text_options(command: Command) -> Command:
    """What is learnt from."""
    return _with(
        command,
        click.option("--prompts", type=PATH, help="Prompts the model answers, as for calibrate. [shipped set]"),
        click.option("--texts", type=PATH, help="texts.jsonl of an earlier run on the same model, instead of prompts."),
        click.option("--max-new-tokens", default=192, show_default=True, help="Longest answer."),
        click.option("--max-prompt-tokens", default=512, show_default=True, help="Longer prompts are left out."),
        click.option(
            "--temperature", default=0.7, show_default=True, help="Of every second answer; the others are greedy."
        ),
    )


def loop_options(score: str, learning_rate: float) -> Callable[[Command], Command]:
    """How it is learnt; ``score`` is what looks at held-out texts measure."""
    precisions, formats = click.Choice(["float32", "bfloat16"]), click.Choice(["float16", "bfloat16", "float32"])

    def add(command: Command) -> Command:
        return _with(
            command,
            click.option("--epochs", default=5.0, show_default=True),
            click.option("--batch-size", default=8, show_default=True, help="Texts a step."),
            click.option("--learning-rate", default=learning_rate, show_default=True),
            click.option(
                "--held-out", default=0.05, show_default=True, help=f"Share of the texts that {score} is measured on."
            ),
            click.option(
                "--evaluate-every", default=100, show_default=True, help=f"Steps between looks at held-out {score}."
            ),
            click.option("--patience", default=0, show_default=True,
                         help=f"Stop after so many looks without a better {score}. 0: never."),
            click.option("--precision", type=precisions, default="float32", show_default=True,
                         help="Of the arithmetic; bfloat16 is mixed, for devices that are faster with it."),
            click.option(
                "--stored", type=formats, default="float16", show_default=True, help="Number format of the weights."
            ),
        )  # fmt: skip

    return add


def run_options(command: Command) -> Command:
    """How it is run."""
    return _with(
        command,
        click.option("--device", default="cpu", show_default=True, help="A torch device."),
        click.option("--threads", type=click.IntRange(1), help="Processor threads. [all]"),
        click.option("--seed", default=0, show_default=True),
        click.option("--resume", is_flag=True, help="Go on with an unfinished run in the folder, if there is one."),
        click.option("--restart", is_flag=True, help="Throw an unfinished run in the folder away."),
        click.option(
            "--max-minutes", type=float, help="End training after so long; the schedule is fitted to it."
        ),
    )  # fmt: skip


def check_options(options: dict[str, Any]) -> None:
    """Refuse what contradicts itself, and an installation that cannot train.

    Raises:
        MisuseError: saying so.
    """
    if options["resume"] and options["restart"]:
        raise MisuseError("--resume and --restart exclude each other")
    require("demo", "torch", "transformers", "matplotlib", "onnxruntime", "onnx_ir")


def run_job(
    train: "Callable[[Job, Callable[[], TextWriter], Progress, Callable[[Look], None]], tuple[Made, Record]]",
    job: Job,
    threads: int | None,
    label: str,
    line: Callable[[Look], str],
) -> tuple[Made, Record] | None:
    """Run a job with progress, each look at the held-out texts told in a line; None but in the first process."""
    import torch

    from wavekit.commands.training_texts import engine_writer
    from wavekit_calibration.processes import Processes

    if threads:
        torch.set_num_threads(threads)
    make_folder(job.out)
    steps = Steps(label)

    def report(look: Look) -> None:
        steps.clear()
        click.echo(line(look), err=True)

    is_first = Processes().is_first
    try:
        with held(job.out) if is_first else nullcontext():
            found = train(job, lambda: engine_writer(job.model, job.out, job.boundaries, threads, steps), steps, report)
    except KeyboardInterrupt:
        raise WavekitError("interrupted; what is done is kept: give the same command with --resume to go on") from None
    finally:
        steps.clear()
        with suppress(OSError):  # a folder with anything in it stays
            job.out.rmdir()
    return found if is_first else None


def job_fields(model: str, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `TrainingJob` that these options decide."""
    from wavekit_calibration.prompts import read_prompts, shipped_prompts

    return {
        "model": model,
        "out": out,
        "prompts": read_prompts(options["prompts"]) if options["prompts"] else shipped_prompts(),
        "unfinished": "restart" if options["restart"] else "resume" if options["resume"] else "refuse",
        "command": command_line(),
        **{name: options[name] for name in _JOB_FIELDS},
    }


def loss_so_far(loss: float) -> str:
    """The loss in a line about a look, nothing before the first step."""
    return "" if math.isnan(loss) else f"loss {loss:.3f}, "


def parse_boundaries(option: str, text: str) -> tuple[int, ...]:
    """Boundaries listed on the command line.

    Raises:
        MisuseError: something else is.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MisuseError(f"{option} takes boundaries such as 2,15,27, got {text!r}")
    return tuple(map(int, parts))


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
