"""``wavekit train exits``: early exits at chosen boundaries of a model, from text the model writes itself."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavekit.commands.training_options import (
    LOOP_FIELDS,
    PATH,
    check_options,
    job_fields,
    loop_options,
    loss_so_far,
    parse_boundaries,
    run_job,
    run_options,
    text_options,
)
from wavekit_engines.errors import MisuseError

if TYPE_CHECKING:
    from wavekit_calibration.training.exit_job import ExitJob, ExitRecord
    from wavekit_calibration.training.exit_train import ExitLook

_STAGES = 4


@click.command()
@click.argument("model")
@click.option("-o", "--output", "out", type=PATH, required=True, help="Folder for exits/, trace.npz, training.json.")
@click.option("--calibration", type=PATH, help="Take the exits that `wavekit calibrate` planned.")
@click.option("--stages", type=click.IntRange(2), help=f"Of the calibration's plans, that for so many. [{_STAGES}]")
@click.option(
    "--exits", metavar="A,B,..", help="Boundaries that get an exit; these count, whatever a calibration planned."
)
@click.option("--rank", type=click.IntRange(1), help="Of the adapters. [an eighth of the hidden size]")
@click.option("--no-adapter", is_flag=True, help="Exits as they are, for a model trained with early exit.")
@click.option("--exit-vocab", type=click.IntRange(1), help="Most frequent tokens that exits can give. [all]")
@text_options
@loop_options("speed-up", learning_rate=2e-3)
@run_options
def exits(model: str, out: Path, **options: Any) -> None:
    """Train early exits for MODEL, at boundaries inside it.

    MODEL answers the prompts itself; small adapters learn to give, from its states half-way, what it gives at the end.
    The model is not changed. All exits are trained together. Told is how often each gives the final token on held-out
    texts, before and after, and trace.npz holds what they say there. Under `torchrun -m wavekit`, or
    `accelerate launch`, every process takes its share of each step.

    \b
    wavekit train exits ./SmolLM2-135M-Instruct --calibration calibrated --stages 4 -o exits
    wavekit train exits ./SmolLM2-135M-Instruct --exits 10,20 -o exits --texts draft/texts.jsonl --exit-vocab 8192
    """
    check_options(options)
    if options["no_adapter"] and options["rank"]:
        raise MisuseError("--rank and --no-adapter exclude each other")
    from wavekit_calibration.training.exit_job import TRACE, train_exits

    found = run_job(train_exits, _job(model, out, options), options["threads"], "training exits", _line)
    if found is not None:
        made, record = found
        _tell(record)
        depths = ",".join(map(str, (*made.spec.boundaries, made.spec.target_layers)))
        click.echo(f"next: wavekit simulate {shlex.quote(str(out / TRACE))} --depths {depths}")


def _job(model: str, out: Path, options: dict[str, Any]) -> "ExitJob":
    from wavekit_calibration.training.exit_job import ExitJob
    from wavekit_calibration.training.training_loop import LoopSettings

    return ExitJob(
        **job_fields(model, out, options),
        boundaries=_boundaries(model, options["calibration"], options["stages"], options["exits"]),
        exit_vocab=options["exit_vocab"],
        rank=0 if options["no_adapter"] else options["rank"],
        train=LoopSettings(**{name: options[name] for name in LOOP_FIELDS}),
    )


def _boundaries(model: str, calibration: Path | None, stages: int | None, listed: str | None) -> tuple[int, ...]:
    """Where exits go; the last stage's end has the model's own head and none."""
    from wavekit_calibration.result import load_calibration
    from wavekit_engines.checkpoint import open_checkpoint

    if listed is not None and stages is not None:
        raise MisuseError("--exits and --stages exclude each other: both say where exits go")
    if listed is not None:
        return parse_boundaries("--exits", listed)
    if calibration is None:
        raise MisuseError("say where exits go: --calibration FOLDER, or --exits 10,20")
    found = load_calibration(calibration)
    found.check_model(open_checkpoint(model).digest())
    return found.exits(stages or _STAGES)[:-1]


def _tell(record: "ExitRecord") -> None:
    rows = zip(record.boundaries, record.agreement_before, record.agreement, strict=True)
    click.echo("on held-out texts the exits give the final token, without and with adapters:")
    for boundary, before, after in rows:
        click.echo(f"  boundary {boundary:3d}  {before:6.1%}  {after:6.1%}")
    if record.coverage < 1:
        click.echo(f"the {record.exit_vocab} tokens that exits can give cover {record.coverage:.1%} of those texts")
    stages = len(record.boundaries) + 1
    click.echo(
        f"speed-up of {stages} stages over the same run in turn, in ticks: "
        f"{record.speed_up_before:.2f}, {record.speed_up:.2f}"
    )
    if record.steps:
        click.echo(
            f"{record.answer_tokens} tokens of text, {record.steps} steps, {record.minutes:.0f} minutes of training"
        )


def _line(look: "ExitLook") -> str:
    shares = " ".join(f"{100 * share:.0f}" for share in look.agreement)
    return (
        f"step {look.step}, epoch {look.epoch:.2f}, {look.minutes:.1f} min: {loss_so_far(look.loss)}"
        f"agreement by exit {shares} %, speed-up in ticks {look.speed_up:.3f}"
    )
