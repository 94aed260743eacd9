"""The demo's calibration: the model's own hidden states choose what its bundles tap and where they are cut.

Smaller than `wavekit calibrate` makes by default, so that the demo stays short; kept for the next demo.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from wavekit.commands.progress import Progress

if TYPE_CHECKING:
    from wavekit_calibration.result import Calibration

_PROMPTS, _TOKENS, _READ_AT_EVERY_DEPTH, _ANSWER = 24, 768, 256, 32
_QUICK_PROMPTS, _QUICK_TOKENS, _QUICK_READ, _QUICK_ANSWER = 4, 64, 32, 16


def command(model: Path, output: Path, quick: bool) -> str:
    """The command line that makes the same calibration."""
    prompts, tokens, read, answer = _sizes(quick)
    numbers = {
        "--max-prompts": prompts,
        "--sample-tokens": tokens,
        "--readiness-tokens": read,
        "--max-new-tokens": answer,
    }
    options = [part for name, number in numbers.items() for part in (name, str(number))]
    return shlex.join(["wavekit", "calibrate", str(model), "-o", str(output), *options])


def kept_calibration(model: Path, output: Path) -> "Calibration | None":
    """The calibration that an earlier demo made of this model, if it did."""
    from wavekit_calibration.errors import CalibrationFileError
    from wavekit_calibration.result import load_calibration
    from wavekit_engines.checkpoint import open_checkpoint

    try:
        calibration = load_calibration(output)
        calibration.check_model(open_checkpoint(model).digest())
    except CalibrationFileError:
        return None
    return calibration


def calibrate(model: Path, output: Path, threads: int, quick: bool, told: Progress) -> "Calibration":
    """Measure the model on the shipped prompts."""
    import torch

    from wavekit_calibration.calibrate import Job
    from wavekit_calibration.calibrate import calibrate as run
    from wavekit_calibration.prompts import shipped_prompts
    from wavekit_calibration.settings import MeasureSettings

    torch.set_num_threads(threads)
    prompts, tokens, read, answer = _sizes(quick)
    measure = MeasureSettings(max_prompts=prompts, sample_tokens=tokens, readiness_tokens=read, max_new_tokens=answer)
    line = command(model, output, quick)
    return run(Job(str(model), shipped_prompts(), output, measure, unfinished="restart", command=line), told)


def _sizes(quick: bool) -> tuple[int, int, int, int]:
    if quick:
        return _QUICK_PROMPTS, _QUICK_TOKENS, _QUICK_READ, _QUICK_ANSWER
    return _PROMPTS, _TOKENS, _READ_AT_EVERY_DEPTH, _ANSWER
