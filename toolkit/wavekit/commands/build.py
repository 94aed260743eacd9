"""``wavekit build``: TensorRT engines from a bundle, on any machine, with or without a GPU."""

from pathlib import Path

import click

from wavekit.commands.engine_table import engine_table, makers, target
from wavekit.commands.extras import require
from wavekit.commands.progress import progress
from wavekit_engines.bundle import open_bundle

_GIGABYTE = 1e9


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--compute-capability",
    "capabilities",
    default="",
    metavar="A,B,...",
    help="GPUs to build for, as in 8.6,8.9,12.0.  [default: any that the library knows]",
)
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
    require("export", "onnx_ir")
    from wavekit_engines.tensorrt.engines import BuildOptions, build_engines
    from wavekit_engines.tensorrt.profiles import Limits

    opened = open_bundle(bundle)
    context = max_context or min(4096, opened.manifest.decoder.max_positions)
    options = BuildOptions(
        limits=Limits(context, max_tree),
        precision=precision,  # type: ignore[arg-type]
        compute_capabilities=tuple(part.strip() for part in capabilities.split(",") if part.strip()),
        memory_limit=int(memory_limit * _GIGABYTE) if memory_limit is not None else None,
    )
    with progress("building") as told:
        built = build_engines(opened, options, progress=told)
    infos = [engine.info for engine in built]
    cells = ["there already" if engine.cached else f"{engine.info.seconds:.1f} s" for engine in built]
    click.echo(engine_table(infos, ("built in", cells)))
    click.echo(f"{target(infos[0])}: built with {makers(infos)}, not run; running them takes the GPU")
