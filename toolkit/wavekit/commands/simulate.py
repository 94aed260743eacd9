"""``wavekit simulate``: what depth exploration would make of recorded exits, in ticks and in time."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from wavekit.commands.export import Boundaries
from wavekit.commands.formatting import table
from wavekit_engines.errors import MisuseError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wavekit_calibration.simulation.comparison import Comparison
    from wavekit_calibration.simulation.timing import TickCosts
    from wavekit_calibration.simulation.trace import ExitTrace

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("trace", type=_PATH)
@click.option("--depths", type=Boundaries(), required=True, help="Where the stages end, as in 6,12,18,24,30.")
@click.option("--costs", type=_PATH, help="Measured costs, JSON, see docs/dex.md.  [one a layer, nothing else]")
@click.option("--devices", type=click.IntRange(min=1), help="Spread the stages over so many.  [one a stage]")
@click.option("--decs/--no-decs", default=True, help="Whether exits pass over tokens proposed before.  [--decs]")
@click.option("--draft-acceptance", "acceptance", metavar="P,P,..|recorded",
              help="Add a draft: how often each token ahead is right, or the trace's own.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of the draft that --draft-acceptance makes up.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def simulate(
    trace: Path,
    depths: tuple[int, ...],
    costs: Path | None,
    devices: int | None,
    decs: bool,
    acceptance: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Replay what exits said, TRACE, through stages that end at given depths, beside other ways to decode.

    TRACE is a trace file or the folder of `wavekit calibrate`. Ticks are exact for the trace; times are predictions.

    \b
    wavekit simulate calibrated --depths 6,12,18,24,30
    wavekit simulate exits.npz --depths 10,20,30 --costs costs.json --draft-acceptance 0.7,0.6,0.5
    """
    from wavekit_calibration.simulation.comparison import compare
    from wavekit_calibration.simulation.trace import load_trace

    recorded = load_trace(trace)
    known = open_costs(costs, recorded.num_layers)
    found = compare(recorded, depths, known, decs, devices, _draft(acceptance, seed, recorded))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    click.echo("\n".join([*_summary(found, recorded), "", _way_table(found), "", *_details(found)]))


def open_costs(file: Path | None, num_layers: int) -> "TickCosts":
    """Costs from a file, or where there is none, in layers."""
    from wavekit_calibration.simulation.timing import read_costs, unit_costs

    return unit_costs(num_layers) if file is None else read_costs(file, num_layers)


def _draft(acceptance: str | None, seed: int, trace: "ExitTrace") -> "NDArray[np.int32] | None":
    from wavekit_calibration.simulation.draft_chain import imagined_draft, recorded_draft

    if acceptance is None:
        return None
    if acceptance == "recorded":
        return recorded_draft(trace)
    try:
        shares = [float(part) for part in acceptance.split(",")]
    except ValueError:
        raise MisuseError(f"--draft-acceptance takes shares such as 0.7,0.6,0.5, got {acceptance!r}") from None
    return imagined_draft(trace, shares, seed)


def _summary(found: "Comparison", trace: "ExitTrace") -> list[str]:
    texts = "text" if found.sequences == 1 else "texts"
    lines = [f"trace   {found.tokens:,} tokens to decode in {found.sequences:,} {texts}, {found.num_layers} layers"]
    if trace.header.origin:
        lines.append(f"        {trace.header.origin}")
    decs = " with DECS" if found.decs else ""
    device = found.detail.duration.device
    spread = "a device each" if len(set(device)) == len(device) else f"on devices {_listed(device)}"
    lines.append(f"stages  {len(found.depths)}, ending at {_listed(found.depths)}{decs}, {spread}")
    return lines + [f"note    {note}" for note in found.notes]


def _way_table(found: "Comparison") -> str:
    rows = [
        (
            way.name,
            "-" if way.ticks is None else f"{way.ticks:.3f}",
            "-" if way.tick_speedup is None else f"{way.tick_speedup:.2f}x",
            f"{way.token:.2f}",
            f"{way.speedup:.2f}x",
        )
        for way in found.ways
    ]
    header = ("way", "ticks a token", "in ticks", f"{found.unit} a token", "in time")
    return table(header, rows, right=frozenset({1, 2, 3, 4}))


def _details(found: "Comparison") -> list[str]:
    detail, seen = found.detail, found.exploration
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in detail.commits.items())
    bound = "" if "draft" in detail.commits else f" (at most {2 ** len(found.depths) - 1})"
    idle = ", ".join(f"{100 * share:.0f} %" for share in detail.duration.idle)
    return [
        f"proposed by depth   {shares}",
        f"nodes               {detail.peak_live} alive at the peak{bound}; a token explored {detail.explored:.2f}, "
        f"wasted {detail.wasted:.2f}",
        f"rows by stage       {', '.join(f'{rows:.1f}' for rows in detail.rows)}",
        f"idle by device      {idle}",
        f"exploration costs   {seen.mean_overhead:.2f} layers a token over a mean EAD of {seen.mean_ead:.2f}, "
        f"{seen.worst_overhead} at worst (bound: {seen.resolution})",
    ]


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
