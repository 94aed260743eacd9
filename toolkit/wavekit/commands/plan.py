"""``wavekit plan``: where stages should end on this machine, or that plain decoding is faster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from wavekit.commands.formatting import table
from wavekit.commands.progress import progress
from wavekit.commands.simulate import open_costs

if TYPE_CHECKING:
    from wavekit_calibration.simulation.plan import Planned

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("trace", type=_PATH)
@click.option("--costs", type=_PATH, required=True, help="Measured costs, JSON, see docs/dex.md.")
@click.option("--max-stages", type=click.IntRange(min=2), default=6, show_default=True, help="Try 2 to this many.")
@click.option("--devices", type=click.IntRange(min=1), help="Spread the stages over so many.  [one a stage]")
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
def plan(trace: Path, costs: Path, max_stages: int, devices: int | None, as_json: bool) -> None:
    """Search depths and numbers of stages for the time a token takes by TRACE and measured costs.

    TRACE is a trace file or the folder of `wavekit calibrate`. Times are predictions.

    \b
    wavekit plan exits.npz --costs costs.json
    wavekit plan exits.npz --costs costs.json --devices 2 --max-stages 4
    """
    from wavekit_calibration.simulation.plan import plan as search
    from wavekit_calibration.simulation.trace import load_trace

    recorded = load_trace(trace)
    known = open_costs(costs, recorded.num_layers)
    with progress("planning") as line:
        plans = search(recorded, known, max_stages, devices, lambda k: line(f"{k} stages", k - 2, max_stages - 1))
    best = min(plans, key=lambda one: one.duration.token, default=None)
    pays = best is not None and best.duration.token < known.plain_token
    if as_json:
        content: dict[str, Any] = {
            "unit": known.unit,
            "plain": known.plain_token,
            "plans": [_as_row(one) for one in plans],
            "recommended": _as_row(best) if best is not None and pays else None,
        }
        click.echo(msgspec.json.format(msgspec.json.encode(content)).decode())
        return
    for note in recorded.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(_plan_table(plans, known.unit, known.plain_token))
    click.echo()
    if best is None or not pays:
        click.echo(f"nothing pays: plain decoding, at {known.plain_token:.2f} {known.unit} a token, is the fastest")
        return
    ends = ",".join(map(str, best.stages.depths))
    split = ",".join(map(str, best.stages.depths[:-1]))
    click.echo(f"best: {best.stages.count} stages ending at {ends}{' with DECS' if best.stages.decs else ''}")
    click.echo(f"next: wavekit export MODEL -o bundle --split {split}")


def _as_row(one: "Planned") -> dict[str, Any]:
    return {
        "depths": one.stages.depths,
        "decs": one.stages.decs,
        "ticks": one.replay.ticks_per_token,
        "tick_speedup": one.replay.speedup,
        "token": one.duration.token,
        "speedup": one.duration.speedup,
        "device": one.duration.device,
        "peak_live": one.nodes.peak_live,
        "exhaustive": one.exhaustive,
    }


def _plan_table(plans: "list[Planned]", unit: str, plain: float) -> str:
    rows = [("1", "plain decoding", "", "-", "-", f"{plain:.2f}", "1.00x", "")]
    for one in plans:
        rows.append(
            (
                str(one.stages.count),
                ",".join(map(str, one.stages.depths)),
                "yes" if one.stages.decs else "no",
                f"{one.replay.ticks_per_token:.3f}",
                str(one.nodes.peak_live),
                f"{one.duration.token:.2f}",
                f"{one.duration.speedup:.2f}x",
                "all" if one.exhaustive else "some",
            )
        )
    header = ("stages", "ending at", "DECS", "ticks a token", "peak nodes", f"{unit} a token", "in time", "sets tried")
    return table(header, rows, right=frozenset({0, 3, 4, 5, 6}))
