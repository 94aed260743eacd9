"""``wavekit build``: TensorRT engines from a bundle, on any machine, with or without a GPU."""

from pathlib import Path

import click

from wavekit.commands.engine_builds import build_and_tell, capability_option, engine_options
from wavekit_engines.bundle import open_bundle

_GIGABYTE = 1e9


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@capability_option
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    default="fp16",
    show_default=True,
    help="Of activations.",
)
@click.option("--max-context", type=click.IntRange(min=1), help="Tokens of a text.  [default: 4096 or the model's]")
@click.option("--max-tree", type=click.IntRange(min=1), default=64, show_default=True, help="Rows of a decoding pass.")
@click.option(
    "--memory-limit", type=click.FloatRange(min=0), metavar="GB", help="Memory to use.  [default: what is free]"
)
def build(
    bundle: Path,
    capabilities: str,
    precision: str,
    max_context: int | None,
    max_tree: int,
    memory_limit: float | None,
) -> None:
    """Build TensorRT engines for every graph of BUNDLE, into the bundle; those that are there already stay.

    No GPU is needed where tensorrt_rtx is installed. Building goes on where it was interrupted.

    \b
    wavekit build bundle --compute-capability 8.9
    wavekit build bundle --compute-capability 8.6,8.9,12.0 --precision bf16 --max-context 8192
    """
    limit = int(memory_limit * _GIGABYTE) if memory_limit is not None else None
    opened = open_bundle(bundle)
    max_positions = opened.manifest.decoder.max_positions
    build_and_tell(opened, engine_options(max_positions, capabilities, precision, max_context, max_tree, limit))
