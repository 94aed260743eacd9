"""Building TensorRT engines from a command line: its options, and what is told about what was built."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wavekit.commands.engine_table import engine_table, makers, target
from wavekit.commands.extras import require
from wavekit.commands.progress import progress
from wavekit_engines.bundle import Bundle

if TYPE_CHECKING:
    from wavekit_engines.tensorrt.engines import BuildOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_CONTEXT = 4096
_TREE = 64


def capability_option(command: Command) -> Command:
    """``--compute-capability``, given to the command as ``capabilities``."""
    return click.option(
        "--compute-capability",
        "capabilities",
        default="",
        metavar="A,B,...",
        help="GPUs to build engines for, as in 8.6,8.9,12.0.  [default: any that the library knows]",
    )(command)


def engine_options(
    max_positions: int,
    capabilities: str,
    precision: str = "fp16",
    max_context: int | None = None,
    max_tree: int = _TREE,
    memory_limit: int | None = None,
) -> "BuildOptions":
    """Checked options of a build for a model with a context of ``max_positions``.

    Raises:
        MisuseError: options that no engine can be built for, or no library that builds.
    """
    require("export", "onnx_ir")
    from wavekit_engines.tensorrt.engines import BuildOptions
    from wavekit_engines.tensorrt.library import installed
    from wavekit_engines.tensorrt.profiles import Limits

    options = BuildOptions(
        limits=Limits(max_context or min(_CONTEXT, max_positions), max_tree),
        precision=precision,  # type: ignore[arg-type]
        compute_capabilities=tuple(part.strip() for part in capabilities.split(",") if part.strip()),
        memory_limit=memory_limit,
    )
    options.check(max_positions)
    installed()
    return options


def build_and_tell(bundle: Bundle, options: "BuildOptions") -> None:
    """Build the engines that a bundle lacks, and print a table of all."""
    from wavekit_engines.tensorrt.engines import build_engines

    with progress("building") as told:
        built = build_engines(bundle, options, progress=told)
    infos = [engine.info for engine in built]
    cells = ["there already" if engine.cached else f"{engine.info.seconds:.1f} s" for engine in built]
    click.echo(engine_table(infos, ("built in", cells)))
    click.echo(f"{target(infos[0])}: built with {makers(infos)}, not run; running them takes the GPU")
