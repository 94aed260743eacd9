"""``wavekit add-exits``: early exits for a bundle that is there already."""

from pathlib import Path

import click

from wavekit.commands.command_line import command_line
from wavekit.commands.exits import EXIT_PRECISION_HELP, exits_made, read_exits_for
from wavekit.commands.extras import require
from wavekit.commands.formatting import size
from wavekit_engines.bundle import open_bundle
from wavekit_engines.quantization import PRECISIONS, Precision


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("exits", type=click.Path(path_type=Path))
@click.option("--exit-precision", type=click.Choice(PRECISIONS), help=EXIT_PRECISION_HELP)
@click.option("--force", is_flag=True, help="Replace exits that the bundle has, once the new ones are complete.")
def add_exits(bundle: Path, exits: Path, exit_precision: Precision | None, force: bool) -> None:
    """Add early EXITS to BUNDLE, at the ends of its stages; its other engines stay as they are.

    EXITS is a folder that `wavekit train exits` wrote. Neither the checkpoint nor another export is needed.

    \b
    wavekit add-exits bundle ./exits/exits
    """
    require("export", "onnx_ir")
    from wavekit_engines import exit_export

    before = open_bundle(bundle, check_hashes=False).manifest
    manifest = exit_export.add_exits(
        bundle,
        read_exits_for(exits, before.decoder, before.provenance.checkpoint_digest),
        precision=exit_precision,
        replace=force,
        command=command_line(),
    )
    assert manifest.exits is not None
    own = sum(info.bytes for name, info in manifest.files.items() if name.startswith(exit_export.EXIT_FILES))
    click.echo(f"{bundle}: {exits_made(manifest)}, {manifest.exits.precision}, {size(own)}")
