"""``wavekit train``, and ``train draft``: an EAGLE-3 head for chosen boundaries, from text the model writes itself."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavekit.commands.train_exits import exits
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
    from wavekit_calibration.training.draft_job import DraftJob
    from wavekit_calibration.training.draft_train import Look


@click.group()
def train() -> None:
    """Train what makes a model decode faster.

    \b
    wavekit train draft ./SmolLM2-135M-Instruct --calibration calibrated -o draft
    wavekit train exits ./SmolLM2-135M-Instruct --calibration calibrated --stages 4 -o exits
    """


train.add_command(exits)


@train.command()
@click.argument("model")
@click.option("-o", "--output", "out", type=PATH, required=True, help="Folder for draft/, training.json, texts.jsonl.")
@click.option("--calibration", type=PATH, help="Take the boundaries that `wavekit calibrate` chose.")
@click.option("--taps", metavar="A,B,..", help="Boundaries to feed the head with, instead.")
@text_options
@click.option("--draft-vocab", default=8192, show_default=True, help="Most frequent tokens that the head can draft.")
@click.option("--steps-ahead", default=5, show_default=True, help="Tokens that training looks ahead.")
@loop_options("tau", learning_rate=1.5e-3)
@click.option("--format", type=click.Choice(["speculators", "specforge", "modelopt", "eagle"]), default="speculators",
              show_default=True, help="Checkpoint format of the head.")  # fmt: skip
@run_options
def draft(model: str, out: Path, **options: Any) -> None:
    """Train an EAGLE-3 draft head for MODEL.

    MODEL answers the prompts itself; the head learns to foresee what it writes. The model is not changed. A 135M model
    trains on two processor cores in about an hour. Under `torchrun -m wavekit`, or `accelerate launch`, every process
    takes its share of each step.

    \b
    wavekit train draft ./SmolLM2-135M-Instruct --calibration calibrated -o draft
    wavekit train draft ./SmolLM2-135M-Instruct --taps 2,15,27 -o draft --prompts mine.jsonl --max-minutes 60
    """
    check_options(options)
    from wavekit_calibration.training.draft_job import train_draft

    found = run_job(train_draft, _job(model, out, options), options["threads"], "training a draft", _line)
    if found is None:
        return
    _, record = found
    shares = ", ".join(f"{share:.0%}" for share in record.acceptance)
    click.echo(f"held-out tau {record.tau:.2f} (plain decoding: 1.00); accepted by position {shares}")
    click.echo(f"{record.answer_tokens} tokens of text, {record.steps} steps, {record.minutes:.0f} minutes of training")
    click.echo(f"next: wavekit export {shlex.quote(model)} --draft {shlex.quote(str(out / 'draft'))} -o bundle")


def _job(model: str, out: Path, options: dict[str, Any]) -> "DraftJob":
    from wavekit_calibration.training.draft_job import DraftJob
    from wavekit_calibration.training.draft_train import TrainSettings

    return DraftJob(
        **job_fields(model, out, options),
        boundaries=_boundaries(model, options["calibration"], options["taps"]),
        draft_vocab=options["draft_vocab"],
        format=options["format"],
        train=TrainSettings(**{name: options[name] for name in ("steps_ahead", *LOOP_FIELDS)}),
    )


def _boundaries(model: str, calibration: Path | None, taps: str | None) -> tuple[int, ...]:
    from wavekit_calibration.result import load_calibration
    from wavekit_engines.checkpoint import open_checkpoint

    if (calibration is None) == (taps is None):
        raise MisuseError("say which boundaries feed the head: --calibration FOLDER, or --taps 2,15,27")
    if calibration is not None:
        found = load_calibration(calibration)
        found.check_model(open_checkpoint(model).digest())
        return found.boundaries
    assert taps is not None
    return parse_boundaries("--taps", taps)


def _line(look: "Look") -> str:
    shares = " ".join(f"{100 * share:.0f}" for share in look.acceptance)
    return (
        f"step {look.step}, epoch {look.epoch:.2f}, {look.minutes:.1f} min: {loss_so_far(look.loss)}"
        f"held-out tau {look.tau:.3f}, accepted by position {shares} %"
    )
