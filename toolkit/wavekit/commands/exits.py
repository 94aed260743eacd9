"""What the commands that put early exits into a bundle share."""

from pathlib import Path

import click

from wavekit_engines.bundle import Manifest
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.exit_files import read_exits
from wavekit_engines.exit_spec import Exits

EXIT_PRECISION_HELP = "Of the exits.  [default: int8 with fp32, otherwise that of the head]"


def read_exits_for(folder: Path, decoder: DecoderSpec, checkpoint_digest: str) -> Exits:
    """Read exits for a decoder, and say on standard error if they were trained for other weights of its shape."""
    exits = read_exits(folder, target=decoder)
    if exits.target_digest not in (None, checkpoint_digest):
        click.echo(
            f"{folder} was trained for another checkpoint of this shape: texts stay as they are, but its exits may be "
            "right less often",
            err=True,
        )
    return exits


def exits_made(manifest: Manifest) -> str:
    """The exits of a bundle in a few words."""
    assert manifest.exits is not None
    boundaries = manifest.exits.spec.boundaries
    return f"{'exits' if len(boundaries) > 1 else 'an exit'} at {', '.join(map(str, boundaries))}"
