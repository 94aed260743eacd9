"""``wavekit tune``: the fastest setting of a bundle on this machine, kept in the bundle."""

import datetime
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import click

from wavekit import __version__
from wavekit.commands.command_line import command_line
from wavekit.commands.extras import require
from wavekit.commands.progress import Steps
from wavekit.machine import this_machine
from wavekit_engines.atomic import write_file
from wavekit_engines.errors import MisuseError
from wavekit_engines.outputs import check_file

if TYPE_CHECKING:
    from wavekit.benchmarking.openings import Openings
    from wavekit.tuning.costs import CostCurves
    from wavekit.tuning.report import TuneReport
    from wavekit.tuning.tune import Tuned

_PATH = click.Path(path_type=Path)
_FIGURES = (".svg", ".png", ".pdf")


@click.command()
@click.argument("bundle", type=_PATH)
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE",
    help="Write after these prompts: such as you have.  [a few that come along]",
)
@click.option("--count", type=click.IntRange(1), default=8, show_default=True, help="Prompts of each file.")
@click.option("-n", "--new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens at most.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=5, show_default=True, help="About how long to search."
)
@click.option("-o", "--output", "figure", type=_PATH, help="Draw what was tried: a .svg, .png or .pdf file.")
@click.option("--json", "json_file", type=_PATH, help="Write everything that was tried to a JSON file.")
def tune(
    bundle: Path,
    prompts: tuple[str, ...],
    count: int,
    new_tokens: int,
    minutes: float,
    figure: Path | None,
    json_file: Path | None,
) -> None:
    """Find the setting in which BUNDLE writes fastest on this machine, and keep it in BUNDLE for `wavekit.load`.

    Threads, lanes, modes and their limits are tried beside plain decoding; one that is not faster than that is never
    kept, and no setting changes a text.

    \b
    wavekit tune bundle
    wavekit tune bundle --prompts questions.jsonl --minutes 10 -o tried.svg
    """
    require("onnxruntime", "onnxruntime")
    from wavekit.benchmarking.openings import Openings
    from wavekit.commands.tune_tables import tables
    from wavekit.profiles import Profile, check_writable, digest_of, write_profile
    from wavekit_engines.bundle import open_bundle

    for file in (figure, json_file):
        check_file(file)
    if figure is not None and figure.suffix not in _FIGURES:
        raise MisuseError(f"{figure} is no figure: let its name end with {', '.join(_FIGURES)}")
    opened = open_bundle(bundle, check_hashes=False)
    check_writable(opened)
    openings, steps = Openings(bundle), Steps("tune")
    try:
        report = _report(openings, bundle, prompts, count, new_tokens, 60 * minutes, steps)
    finally:
        openings.close()
        steps.clear()
    profile = Profile(
        report.machine,
        digest_of(opened),
        report.chosen,
        report.speed,
        __version__,
        report.created,
    )
    click.echo(tables(report))
    file = write_profile(opened, profile)
    click.echo(f"\nkept in {file}: `wavekit.load` and the commands use it where neither threads nor lanes are given")
    _write(report, figure, json_file)


def _report(
    openings: "Openings",
    bundle: Path,
    prompts: tuple[str, ...],
    count: int,
    new_tokens: int,
    seconds: float,
    told: Callable[[str, int, int], None],
) -> "TuneReport":
    from wavekit.benchmarking.prompt_sets import prompt_sets
    from wavekit.profiles import Setting
    from wavekit.tuning.tune import BundleSource
    from wavekit.tuning.tune import tune as search

    start, machine = perf_counter(), this_machine()
    told("measuring costs", 0, 1)
    llm = openings.get(Setting(machine.cores))
    samples = [sample for one in prompt_sets(llm, prompts, count, new_tokens) for sample in one.samples]
    costs = _costs(openings, machine.cores)
    source = BundleSource(openings, samples, new_tokens)
    tuned = search(
        llm.decoder,
        source,
        machine.cores,
        seconds,
        perf_counter,
        lambda phase: told(f"trying {phase}", min(int(perf_counter() - start), int(seconds)), max(int(seconds), 1)),
    )
    return _summed_up(tuned, costs, bundle, new_tokens, len(samples), perf_counter() - start)


def _costs(openings: "Openings", cores: int) -> "CostCurves":
    from wavekit.profiles import Setting
    from wavekit.tuning.costs import measure_costs

    decoder = openings.get(Setting(cores)).decoder
    if not decoder.exit_boundaries:
        return measure_costs(decoder, None)
    lanes = min(cores, len(decoder.manifest.stages))
    return measure_costs(decoder, openings.get(Setting(cores // lanes, lanes)).decoder)


def _summed_up(
    tuned: "Tuned", costs: "CostCurves", bundle: Path, new_tokens: int, prompts: int, seconds: float
) -> "TuneReport":
    from wavekit.tuning.report import TuneReport, reported

    return TuneReport(
        bundle=bundle.resolve().name,
        machine=this_machine(),
        command=command_line(),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        new_tokens=new_tokens,
        prompts=prompts,
        seconds=seconds,
        costs=costs,
        plain=tuned.plain,
        plain_tokens_per_second=tuned.plain_rate,
        chosen=tuned.setting,
        speed=tuned.speed,
        trials=tuple(reported(trial) for trial in tuned.trials),
    )


def _write(report: "TuneReport", figure: Path | None, json_file: Path | None) -> None:
    from wavekit.commands.tune_figure import tune_figure

    if json_file is not None:
        write_file(json_file, report.encode())
    if figure is not None:
        drawn = tune_figure(report, figure.suffix[1:])
        if drawn is None:
            click.echo("no figure: matplotlib is not installed, or nothing was measured")
        else:
            write_file(figure, drawn)
