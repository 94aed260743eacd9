"""``wavekit train draft``: an EAGLE-3 head for chosen boundaries of a model, from text the model writes itself."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wavekit.commands.extras import require
from wavekit.commands.progress import Steps
from wavekit_engines.errors import MisuseError

if TYPE_CHECKING:
    from wavekit_calibration.draft_job import DraftJob
    from wavekit_calibration.draft_train import Look

_PATH = click.Path(path_type=Path)


@click.group()
def train() -> None:
    """Train what makes a model decode faster.

    \b
    wavekit train draft ./SmolLM2-135M-Instruct --calibration calibration -o draft
    """


@train.command()
@click.argument("model")
@click.option("-o", "--output", "out", type=_PATH, required=True, help="Folder for draft/, training.json, texts.jsonl.")
@click.option("--calibration", type=_PATH, help="Take the boundaries that `wavekit calibrate` chose.")
@click.option("--taps", metavar="A,B,..", help="Boundaries to feed the head with, instead.")
@click.option("--prompts", type=_PATH, help="Prompts the model answers, as for calibrate. [shipped set]")
@click.option("--texts", type=_PATH, help="texts.jsonl of an earlier run on the same model, instead of prompts.")
@click.option("--max-new-tokens", default=192, show_default=True, help="Longest answer.")
@click.option("--max-prompt-tokens", default=512, show_default=True, help="Longer prompts are left out.")
@click.option("--temperature", default=0.7, show_default=True, help="Of every second answer; the others are greedy.")
@click.option("--draft-vocab", default=8192, show_default=True, help="Most frequent tokens that the head can draft.")
@click.option("--steps-ahead", default=5, show_default=True, help="Tokens that training looks ahead.")
@click.option("--epochs", default=5.0, show_default=True)
@click.option("--batch-size", default=8, show_default=True, help="Texts a step.")
@click.option("--learning-rate", default=5e-4, show_default=True)
@click.option("--held-out", default=0.05, show_default=True, help="Share of the texts that tau is measured on.")
@click.option("--evaluate-every", default=100, show_default=True, help="Steps between looks at held-out tau.")
@click.option(
    "--patience", default=0, show_default=True, help="Stop after so many looks without a better tau. 0: never."
)
@click.option("--precision", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
              help="Of the arithmetic; bfloat16 is mixed, for devices that are faster with it.")  # fmt: skip
@click.option("--format", type=click.Choice(["speculators", "specforge", "modelopt", "eagle"]), default="speculators",
              show_default=True, help="Checkpoint format of the head.")  # fmt: skip
@click.option("--stored", type=click.Choice(["float16", "bfloat16", "float32"]), default="float16", show_default=True,
              help="Number format of the head's weights.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="A torch device.")
@click.option("--threads", type=click.IntRange(1), help="Processor threads. [all]")
@click.option("--seed", default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on with an unfinished run in the folder, if there is one.")
@click.option("--restart", is_flag=True, help="Throw an unfinished run in the folder away.")
@click.option("--max-minutes", type=float, help="End training after so long; the schedule is fitted to it.")
def draft(model: str, out: Path, **options: Any) -> None:
    """Train an EAGLE-3 draft head for MODEL.

    MODEL answers the prompts itself; the head learns to foresee what it writes. The model is not changed. A 135M model
    trains on two processor cores in about an hour. Under `torchrun -m wavekit`, or `accelerate launch`, every process takes
    its share of each step.

    \b
    wavekit train draft ./SmolLM2-135M-Instruct --calibration calibration -o draft
    wavekit train draft ./SmolLM2-135M-Instruct --taps 2,15,27 -o draft --prompts mine.jsonl --max-minutes 60
    """
    if options["resume"] and options["restart"]:
        raise MisuseError("--resume and --restart exclude each other")
    require("demo", "torch", "transformers", "matplotlib", "onnxruntime", "onnx_ir")
    import torch

    from wavekit.commands.training_texts import engine_writer
    from wavekit_calibration.draft_job import train_draft
    from wavekit_calibration.processes import Processes

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    job = _job(model, out, options)
    out.mkdir(parents=True, exist_ok=True)
    steps = Steps("training a draft")
    try:
        _, record = train_draft(
            job, lambda: engine_writer(model, out, job.boundaries, options["threads"], steps), steps, _Shown(steps)
        )
    finally:
        steps.clear()
    if not Processes().is_first:
        return
    shares = ", ".join(f"{share:.0%}" for share in record.acceptance)
    click.echo(f"held-out tau {record.tau:.2f} (plain decoding: 1.00); accepted by position {shares}")
    click.echo(f"{record.answer_tokens} tokens of text, {record.steps} steps, {record.minutes:.0f} minutes of training")
    click.echo(f"next: wavekit export {shlex.quote(model)} --draft {shlex.quote(str(out / 'draft'))} -o bundle")


def _job(model: str, out: Path, options: dict[str, Any]) -> "DraftJob":
    from wavekit_calibration.draft_job import DraftJob
    from wavekit_calibration.draft_train import TrainSettings
    from wavekit_calibration.prompts import read_prompts, shipped_prompts

    trained = (
        "steps_ahead",
        "epochs",
        "batch_size",
        "learning_rate",
        "evaluate_every",
        "patience",
        "precision",
        "seed",
    )
    chosen = ("max_new_tokens", "max_prompt_tokens", "temperature", "draft_vocab", "held_out", "stored", "format",
              "device", "max_minutes", "texts")  # fmt: skip
    return DraftJob(
        model=model,
        out=out,
        boundaries=_boundaries(model, options["calibration"], options["taps"]),
        prompts=read_prompts(options["prompts"]) if options["prompts"] else shipped_prompts(),
        train=TrainSettings(**{name: options[name] for name in trained}),
        unfinished="restart" if options["restart"] else "resume" if options["resume"] else "refuse",
        command=shlex.join(["wavekit", *sys.argv[1:]]),
        **{name: options[name] for name in chosen},
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
    parts = [part.strip() for part in taps.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MisuseError(f"--taps takes boundaries such as 2,15,27, got {taps!r}")
    return tuple(map(int, parts))


class _Shown:
    """Tells each look at the held-out texts on a line of its own."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __call__(self, look: "Look") -> None:
        self._steps.clear()
        shares = " ".join(f"{100 * share:.0f}" for share in look.acceptance)
        click.echo(
            f"step {look.step}, epoch {look.epoch:.2f}, {look.minutes:.1f} min: loss {look.loss:.3f}, "
            f"held-out tau {look.tau:.3f}, accepted by position {shares} %",
            err=True,
        )
