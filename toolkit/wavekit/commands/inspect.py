"""``wavekit inspect``: what is in a bundle, in 100 columns."""

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click

from wavekit.commands.engine_table import engine_table, makers, target
from wavekit.commands.formatting import millions, size, table
from wavekit.profiles import Profile, all_profiles
from wavekit.tuning.candidates import described
from wavekit_engines.bundle import GRAPHS, DraftInfo, ExitsInfo, GraphInfo, Manifest, TensorInfo, open_bundle
from wavekit_engines.tensorrt.engine_cache import FOLDER, entries

_CACHE = ("key_", "value_")
_WIDTH = 100
_INDENT = 12


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show the stages of BUNDLE, its draft head and exits: layers, parameters, bytes, taps, inputs and outputs.

    Where `wavekit build` has built TensorRT engines, they are shown too, as their build logs describe them, and where
    `wavekit tune` has tuned the bundle, for which machine and how it is opened there.

    \b
    wavekit inspect bundle
    wavekit inspect bundle --json
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
        return
    click.echo("\n".join([*_summary(manifest), "", _part_table(manifest), "", _tensor_table(manifest), ""]))
    click.echo(f"Cache tensors (key_<layer>, value_<layer>) are left out, in place: {_cache_shape(manifest)} each.")
    if built := entries(bundle / FOLDER):
        click.echo(f"\n{engine_table(built, ('for', [target(info) for info in built]))}")
        click.echo(f"Built with {makers(built)}, as the build logs say; layers are those of all profiles together.")
    for name, profile, problem in all_profiles(opened):
        click.echo("\n" + "\n".join(_profile(name, profile, problem)))


def _profile(name: str, profile: Profile | None, problem: str | None) -> Iterator[str]:
    yield _paragraph("tuned for", str(profile.machine) if profile is not None else f"nobody knows: profiles/{name}")
    if profile is not None:
        speed = f"{profile.speed:.2f}x plain decoding with all cores"
        yield _paragraph(
            "", f"{described(profile.setting)}: {speed}; made {profile.created} by wavekit {profile.wavekit}"
        )
    yield _paragraph("", f"not used here: {problem}" if problem else "used here unless --threads or --lanes is given")


def _summary(manifest: Manifest) -> Iterator[str]:
    decoder, engine, made = manifest.decoder, manifest.engine, manifest.provenance
    total = sum(info.bytes for info in manifest.files.values())
    head = "" if engine.head_precision == engine.precision else f" (head and embedding {engine.head_precision})"
    block = f", blocks of {engine.block_size}" if engine.precision in ("int4", "int8") else ""
    yield _paragraph(
        "model",
        f"{made.checkpoint} ({decoder.family}), {decoder.num_layers} layers, hidden {decoder.hidden_size}, "
        f"vocabulary {decoder.vocab_size}, context {decoder.max_positions}",
    )
    yield _paragraph("engines", f"{engine.kind}, {engine.precision}{head}{block}, {size(total)}")
    yield _paragraph("taps", _listed(manifest.taps) or "none")
    if manifest.draft is not None:
        yield _paragraph("draft", _draft_summary(manifest.draft))
    if manifest.exits is not None:
        yield _paragraph("exits", _exits_summary(manifest.exits))
    yield _paragraph("made", f"{made.created} by {made.command or 'the Python API'}")


def _draft_summary(draft: DraftInfo) -> str:
    head = "" if draft.head_precision == draft.precision else f" (fc and head {draft.head_precision})"
    made = f"; {draft.origin}" if draft.origin else ""
    return (
        f"boundaries {_listed(draft.spec.boundaries)}, vocabulary {draft.spec.draft_vocab_size}, "
        f"{draft.precision}{head}, best {draft.top_k} of a row{made}"
    )


def _exits_summary(exits: ExitsInfo) -> str:
    spec = exits.spec
    adapters = f"adapters of rank {spec.rank}" if spec.rank else "no adapters"
    made = f"; {exits.origin}" if exits.origin else ""
    return (
        f"boundaries {_listed(spec.boundaries)}, {adapters}, vocabulary {spec.exit_vocab_size}, {exits.precision}, "
        f"best {exits.top_k} of a row{made}; stored {exits.created} by {exits.command or 'the Python API'}"
    )


def _paragraph(name: str, text: str) -> str:
    return textwrap.fill(
        name.ljust(_INDENT) + text,
        _WIDTH,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _part_table(manifest: Manifest) -> str:
    tapped = set(manifest.taps)
    rows = []
    for number, stage in enumerate(manifest.stages):
        taps = _listed(tuple(boundary for boundary in stage.boundaries if boundary in tapped))
        layers = f"{stage.first}..{stage.last - 1}"
        rows.append(_row(f"stage {number}", layers, stage.graph.parameters, stage.graph.weight_bytes, taps or "-"))
    rows.append(_row("head", "-", manifest.head.parameters, manifest.head.weight_bytes, "-"))
    for part, graph in _optional_parts(manifest):
        # Their weights are counted without the tables of the vocabulary that other parts have.
        own = manifest.files[str(PurePosixPath(graph.file).with_suffix(".weights"))].bytes
        rows.append(_row(part, "-", graph.parameters, own, "-"))
    if manifest.exits is not None:
        rows.append(_exits_row(manifest.exits, manifest))
    return table(("part", "layers", "parameters", "weights", "taps"), rows, right=frozenset({2, 3}))


def _optional_parts(manifest: Manifest) -> list[tuple[str, GraphInfo]]:
    draft = manifest.draft.graph if manifest.draft is not None else None
    return [(part, graph) for part, graph in (("greedy head", manifest.greedy_head), ("draft", draft)) if graph]


def _exits_row(exits: ExitsInfo, manifest: Manifest) -> tuple[str, ...]:
    spec = exits.spec
    parameters = sum(math.prod(shape) for shape in spec.weight_shapes().values())
    own = sum(info.bytes for file, info in manifest.files.items() if file.startswith(f"{GRAPHS}/exits"))
    return _row("exits", "-", parameters + spec.exit_vocab_size * spec.hidden_size, own, "-")


def _row(name: str, layers: str, parameters: int, weight_bytes: int, taps: str) -> tuple[str, ...]:
    return name, layers, millions(parameters), size(weight_bytes), taps


def _tensor_table(manifest: Manifest) -> str:
    parts: list[tuple[str, GraphInfo]] = [
        (f"stage {number}", stage.graph) for number, stage in enumerate(manifest.stages)
    ]
    parts += [("head", manifest.head), *_optional_parts(manifest)]
    if manifest.exits is not None:
        parts.append(("each exit", manifest.exits.graphs[0]))
    rows = []
    for part, graph in parts:
        for side, tensors in (("in", graph.inputs), ("out", graph.outputs)):
            for line in textwrap.wrap(_names(tensors), _WIDTH - 2 * _INDENT, break_long_words=False):
                rows.append((part, side, line))
                part = side = ""
    return table(("part", "", "tensors"), rows)


def _names(tensors: tuple[TensorInfo, ...]) -> str:
    return " ".join(tensor.name for tensor in tensors if not tensor.name.startswith(_CACHE))


def _listed(boundaries: tuple[int, ...]) -> str:
    return ", ".join(map(str, boundaries))


def _cache_shape(manifest: Manifest) -> str:
    cache = next(tensor for tensor in manifest.stages[0].graph.inputs if tensor.name.startswith(_CACHE))
    return f"{cache.dtype} [{', '.join(map(str, cache.shape))}]"
