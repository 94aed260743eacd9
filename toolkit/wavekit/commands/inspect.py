"""``wavekit inspect``: what is in a bundle."""

from pathlib import Path

import click

from wavekit.commands.formatting import millions, size, table
from wavekit_engines.bundle import GraphInfo, Manifest, TensorInfo, open_bundle

_CACHE = ("key_", "value_")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show the stages of BUNDLE: layers, parameters, bytes, inputs, outputs and taps.

    \b
    wavekit inspect bundle
    wavekit inspect bundle --json
    """
    manifest = open_bundle(bundle).manifest
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
        return
    click.echo("\n".join([*_summary(manifest), "", _stage_table(manifest), ""]))
    click.echo(f"Cache tensors (key_<layer>, value_<layer>) are left out: {_cache_shape(manifest)} each, in place.")


def _summary(manifest: Manifest) -> list[str]:
    decoder, engine, made = manifest.decoder, manifest.engine, manifest.provenance
    total = sum(info.bytes for info in manifest.files.values())
    head = "" if engine.head_precision == engine.precision else f" (head and embedding {engine.head_precision})"
    block = f", blocks of {engine.block_size}" if engine.precision in ("int4", "int8") else ""
    return [
        f"model       {made.checkpoint} ({decoder.family}), {decoder.num_layers} layers, hidden {decoder.hidden_size}, "
        f"vocabulary {decoder.vocab_size}, context {decoder.max_positions}",
        f"engines     {engine.kind}, {engine.precision}{head}{block}, {size(total)}",
        f"taps        {', '.join(map(str, manifest.taps)) or 'none'}",
        f"made        {made.created} by {made.command or 'the Python API'}",
    ]


def _stage_table(manifest: Manifest) -> str:
    tapped = set(manifest.taps)
    rows = []
    for number, stage in enumerate(manifest.stages):
        taps = ", ".join(str(boundary) for boundary in stage.boundaries if boundary in tapped)
        rows.append(_row(f"stage {number}", f"{stage.first}..{stage.last - 1}", stage.graph, taps or "-"))
    rows.append(_row("head", "-", manifest.head, "-"))
    header = ("part", "layers", "parameters", "weights", "inputs", "outputs", "taps")
    return table(header, rows, right=frozenset({2, 3}))


def _row(name: str, layers: str, graph: GraphInfo, taps: str) -> tuple[str, ...]:
    inputs, outputs = _names(graph.inputs), _names(graph.outputs)
    return name, layers, millions(graph.parameters), size(graph.weight_bytes), inputs, outputs, taps


def _names(tensors: tuple[TensorInfo, ...]) -> str:
    return " ".join(tensor.name for tensor in tensors if not tensor.name.startswith(_CACHE))


def _cache_shape(manifest: Manifest) -> str:
    cache = next(tensor for tensor in manifest.stages[0].graph.inputs if tensor.name.startswith(_CACHE))
    return f"{cache.dtype} [{', '.join(map(str, cache.shape))}]"
