"""Options that say what runs a bundle, and where."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from wavekit.backends import ENGINES

_Command = TypeVar("_Command", bound=Callable[..., Any])


def engine_options(command: _Command) -> _Command:
    """Give a command ``--engine`` and ``--device``, which `wavekit.load` takes as they are."""
    command = click.option(
        "--device", help="cpu or cuda; with torch any device of torch.  [default: cpu; with tensorrt cuda]"
    )(command)
    return click.option("--engine", type=click.Choice(ENGINES), default="onnxruntime", show_default=True)(command)
