"""``wavekit bench``: how fast a bundle writes, mode by mode, and beside other engines."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from wavekit.commands.command_line import command_line
from wavekit.commands.engine_options import engine_options
from wavekit.commands.progress import Steps
from wavekit.machine import available_cores
from wavekit_engines.atomic import write_file
from wavekit_engines.outputs import check_file, check_folder, make_folder

if TYPE_CHECKING:
    from wavekit.benchmarking.peers import PeerProcess
    from wavekit.benchmarking.report import BenchReport

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("bundle", type=_PATH)
@click.option(
    "--prompts", multiple=True, metavar="NAME=FILE",
    help="Write after the prompts of this file; may be given several times.  [a few that come along]",
)  # fmt: skip
@click.option("--modes", metavar="MODE,...", help="Modes beside plain, tuned, or all.  [the usual ones that are there]")
@click.option("--count", type=click.IntRange(1), default=6, show_default=True, help="Prompts of each set.")
@click.option("-n", "--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens at most.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of each mode on a prompt.")
@click.option("--threads", type=click.IntRange(1), help="Threads of an engine; lanes share them.  [default: the cores]")
@click.option(
    "--lanes", type=click.IntRange(1), help="Stages that run at once where exits propose.  [default: a core each]"
)
@engine_options
@click.option("--against", metavar="PEER=FOLDER,...", help="Also onnxruntime-genai or transformers, with this model.")
@click.option("--peer-python", metavar="PYTHON", help="Python of the environment that has the peers.  [this one]")
@click.option("-o", "--output", "out", type=_PATH, help="Folder for bench.json, table.txt and the figure.")
@click.option("--json", "json_file", type=_PATH, help="Write everything that was measured to a JSON file.")
def bench(
    bundle: Path,
    prompts: tuple[str, ...],
    modes: str | None,
    count: int,
    new_tokens: int,
    rounds: int,
    threads: int | None,
    lanes: int | None,
    engine: str,
    device: str | None,
    against: str | None,
    peer_python: str | None,
    out: Path | None,
    json_file: Path | None,
) -> int:
    """Measure how fast BUNDLE writes in each of its modes, side by side; texts must be those of plain decoding.

    \b
    wavekit bench bundle
    wavekit bench bundle --prompts code=humaneval.jsonl --prompts chat=mt_bench.jsonl -o bench
    wavekit bench bundle --modes draft,lookup --count 10 -n 128 --rounds 5
    wavekit bench bundle --modes draft --against onnxruntime-genai=peer_model,transformers=checkpoint
    """
    from wavekit.benchmarking.bench import Plan
    from wavekit.benchmarking.bench import bench as run
    from wavekit.benchmarking.openings import Place
    from wavekit.commands.bench_tables import tables

    check_folder(out)
    check_file(json_file)
    threads = threads or available_cores()
    place = Place(engine, device)
    plan = Plan(
        bundle, _listed(modes), prompts, count, new_tokens, rounds, threads, lanes or available_cores(), place
    )  # fmt: skip
    command = command_line()
    steps = Steps("bench")
    try:
        report = run(plan, _peers(against, peer_python, threads), command, steps)
    finally:
        steps.clear()
    text = tables(report)
    click.echo(text)
    _write(report, text, out, json_file)
    return 1 if report.failed else 0


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()] if names else []


def _peers(against: str | None, python: str | None, threads: int) -> "list[PeerProcess]":
    from wavekit.benchmarking.peers import peers

    given = []
    for item in _listed(against):
        kind, _, folder = item.partition("=")
        given.append((kind, folder))
    return peers(given, python, threads)


def _write(report: "BenchReport", text: str, out: Path | None, json_file: Path | None) -> None:
    """JSON, table and figure, each whole or not at all."""
    from wavekit.commands.bench_figure import bench_figures

    if json_file is not None:
        write_file(json_file, report.encode())
    if out is None:
        return
    make_folder(out)
    write_file(out / "bench.json", report.encode())
    write_file(out / "table.txt", f"{text}\n".encode())
    figures = bench_figures(report)
    for suffix, content in figures.items():
        write_file(out / f"figure.{suffix}", content)
    click.echo(f"\nwritten to {out}" + ("" if figures else "; no figure, since matplotlib is not installed"))
