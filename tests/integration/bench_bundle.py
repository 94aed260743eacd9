"""A small bundle with a tokenizer, two stages, a draft head and exits: everything that can be benched and tuned."""

from pathlib import Path

from command_line import save_text_model
from draft_models import draft_of
from engines import exported
from exit_models import random_exits

from wavekit_engines.checkpoint import open_checkpoint


def bench_bundle(folder: Path, **options: object) -> Path:
    """Make the checkpoint in ``folder/model`` and its bundle in ``folder/bundle``."""
    model = save_text_model("llama-untied", folder / "model", seed=1)
    checkpoint = open_checkpoint(str(model))
    made = {"draft": draft_of(checkpoint, seed=2), "draft_precision": "fp32", "split": (2,)}
    made |= {"exits": random_exits(checkpoint, (2,), vocab=None)}
    return exported(model, folder / "bundle", **{**made, **options})
