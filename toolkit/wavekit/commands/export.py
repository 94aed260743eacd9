"""``wavekit export``: a checkpoint becomes a bundle."""

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wavekit.commands.command_line import command_line
from wavekit.commands.engine_builds import build_and_tell, capability_option, engine_options
from wavekit.commands.exits import EXIT_PRECISION_HELP, exits_made, read_exits_for
from wavekit.commands.extras import require
from wavekit.commands.formatting import size
from wavekit.commands.progress import progress
from wavekit_engines.bundle import Manifest, open_bundle
from wavekit_engines.errors import BundleError, CheckpointError, MisuseError
from wavekit_engines.quantization import BLOCK_SIZES, PRECISIONS, Precision

if TYPE_CHECKING:
    from wavekit_calibration.result import Calibration
    from wavekit_engines.checkpoint import Checkpoint
    from wavekit_engines.draft_spec import Draft
    from wavekit_engines.exit_spec import Exits
    from wavekit_engines.tensorrt.engines import BuildOptions


class Boundaries(click.ParamType[tuple[int, ...]]):
    """Comma-separated boundary numbers."""

    name = "A,B,..."

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        """Parse a list such as 2,15,27."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of boundary numbers such as 2,15,27", param, context)


@click.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The bundle's directory.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="Of the weights.")
@click.option(
    "--head-precision",
    type=click.Choice(PRECISIONS),
    help="Of the head and the embedding.  [default: int8 with int4, otherwise --precision]",
)
@click.option(
    "--block-size",
    type=click.Choice([str(block) for block in BLOCK_SIZES]),
    default="32",
    show_default=True,
    help="Weights that share one scale, for int8 and int4.",
)
@click.option("--stages", type=click.IntRange(min=1), help="Cut the layers into this many stages of equal length.")
@click.option("--split", type=Boundaries(), help="Cut the layers at these boundaries instead, as in 6,12,18,24.")
@click.option("--taps", type=Boundaries(), help="Boundaries to put out besides, as in 2,15,27.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Take from this calibration the taps, and with --stages where to cut; see `wavekit calibrate`.",
)
@click.option(
    "--draft",
    type=click.Path(path_type=Path),
    help="Bring this draft head along, trained by wavekit or another's; the boundaries it taps are put out too.",
)
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISIONS),
    help="Of the draft head.  [default: int8 with fp32, otherwise --precision]",
)
@click.option(
    "--exits",
    type=click.Path(path_type=Path),
    help="Bring these early exits along; without --stages and --split, the stages end where they lie.",
)
@click.option("--exit-precision", type=click.Choice(PRECISIONS), help=EXIT_PRECISION_HELP)
@click.option(
    "--engine",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="tensorrt: build TensorRT engines into the bundle as well, in fp16, as `wavekit build` does.",
)
@capability_option
@click.option("--force", is_flag=True, help="Replace an existing bundle, once the new one is complete.")
def export(
    model: str,
    output: Path,
    precision: Precision,
    head_precision: Precision | None,
    block_size: str,
    stages: int | None,
    split: tuple[int, ...] | None,
    taps: tuple[int, ...] | None,
    calibration: Path | None,
    draft: Path | None,
    draft_precision: Precision | None,
    exits: Path | None,
    exit_precision: Precision | None,
    engine: str,
    capabilities: str,
    force: bool,
) -> None:
    """Export MODEL to a self-contained bundle of ONNX engines.

    MODEL is a Hugging Face folder, a GGUF file or, where the hub can be reached, a repository id.

    \b
    wavekit export ./SmolLM2-135M-Instruct -o bundle --precision int4 --stages 5 --taps 2,15,27
    wavekit export ./SmolLM2-135M-Instruct -o bundle --calibration ./calibrated --stages 2
    wavekit export ./SmolLM2-135M-Instruct -o bundle --precision int4 --draft ./draft
    wavekit export ./SmolLM2-135M-Instruct -o bundle --exits ./exits
    wavekit export ./SmolLM2-135M-Instruct -o bundle --engine tensorrt --compute-capability 8.9
    """
    require("export", "onnx_ir")
    from wavekit_engines.checkpoint import open_checkpoint
    from wavekit_engines.export import ExportOptions, export_bundle

    checkpoint = open_checkpoint(model)
    advice = _advice(checkpoint, calibration)
    early = _exits(checkpoint, exits)
    if early is not None and split is None and stages is None:
        split = early.spec.boundaries
    options = ExportOptions(
        precision=precision,
        head_precision=head_precision,
        block_size=int(block_size),
        split=_split(checkpoint, stages, split, advice),
        taps=taps if taps is not None else advice.boundaries if advice is not None else (),
        draft=_draft(checkpoint, draft),
        draft_precision=draft_precision,
        exits=early,
        exit_precision=exit_precision,
    )
    build = _engine_options(checkpoint, engine, capabilities)
    has_tokenizer = _check_tokenizer(checkpoint)
    command = command_line()
    with progress("exporting") as told:
        manifest = export_bundle(checkpoint, output, options, command=command, replace=force, progress=told)
    click.echo(f"{output}: {_made(manifest)}")
    if build is not None:
        build_and_tell(open_bundle(output, check_hashes=False), build)
    if has_tokenizer:
        click.echo(f'next: wavekit generate {shlex.quote(str(output))} "Once upon a time"')
    else:
        click.echo("next: wavekit.load(...) in Python, with token ids: the checkpoint has no tokenizer.json")


def _engine_options(checkpoint: "Checkpoint", engine: str, capabilities: str) -> "BuildOptions | None":
    """What engines to build after exporting, refused now if they cannot be; None for none."""
    from wavekit_engines.families import decoder_spec

    if engine == "tensorrt":
        return engine_options(decoder_spec(checkpoint.config).max_positions, capabilities)
    if capabilities:
        raise MisuseError("--compute-capability is for engines, and none are built here; add --engine tensorrt")
    return None


def _made(manifest: Manifest) -> str:
    stages = f"{len(manifest.stages)} stage{'s' * (len(manifest.stages) > 1)}"
    head = ", a draft head" if manifest.draft is not None else ""
    exits = f", {exits_made(manifest)}" if manifest.exits is not None else ""
    total = size(sum(info.bytes for info in manifest.files.values()))
    return (
        f"{manifest.decoder.family}, {manifest.decoder.num_layers} layers in {stages}{head}{exits}, "
        f"{manifest.engine.precision}, {total}"
    )


def _advice(checkpoint: "Checkpoint", calibration: Path | None) -> "Calibration | None":
    from wavekit_calibration.result import load_calibration

    if calibration is None:
        return None
    advice = load_calibration(calibration)
    advice.check_model(checkpoint.digest())
    return advice


def _draft(checkpoint: "Checkpoint", folder: Path | None) -> "Draft | None":
    if folder is None:
        return None
    from wavekit_engines.draft_formats import read_draft
    from wavekit_engines.families import decoder_spec

    draft = read_draft(folder, target=decoder_spec(checkpoint.config))
    if draft.target_digest not in (None, checkpoint.digest()):
        click.echo(
            f"{folder} was trained for another checkpoint of this shape: texts stay as they are, but fewer of its "
            "drafts may be accepted",
            err=True,
        )
    return draft


def _exits(checkpoint: "Checkpoint", folder: Path | None) -> "Exits | None":
    if folder is None:
        return None
    from wavekit_engines.families import decoder_spec

    return read_exits_for(folder, decoder_spec(checkpoint.config), checkpoint.digest())


def _split(
    checkpoint: "Checkpoint", stages: int | None, split: tuple[int, ...] | None, advice: "Calibration | None"
) -> tuple[int, ...]:
    from wavekit_engines.families import decoder_spec
    from wavekit_engines.stages import even_split

    if stages is not None and split is not None:
        raise MisuseError("--stages and --split say the same thing in two ways; give one of them")
    if split is not None:
        return split
    if advice is not None and stages is not None and stages > 1:
        return advice.exits(stages)[:-1]
    return even_split(decoder_spec(checkpoint.config).num_layers, stages or 1)


def _check_tokenizer(checkpoint: "Checkpoint") -> bool:
    """Refuse now, not once the weights are written, a tokenizer that generating would refuse; False: there is none."""
    from wavekit.streaming import TextStream
    from wavekit.tokenizer import Tokenizer

    files = checkpoint.tokenizer_files()
    if "tokenizer.json" not in files:
        return False
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            TextStream(Tokenizer.from_files(folder))
        except BundleError as error:
            reason = str(error).replace(f"{folder}/", "")
            raise CheckpointError(f"the tokenizer of {checkpoint.name} cannot be used: {reason}") from None
    return True
