"""How depth exploration, its baselines and its oracles compare as a model is cut more finely, from a recorded trace.

For each number of stages the planner takes the best depths that the trace recorded. Time is counted in layers, with a
device for each stage: a layer costs 1, heads and further rows nothing (or what ``--costs`` says). These are predictions
by exact ticks; no stage ran for them.

    python benchmarks/dex_depths.py exits/trace.npz -o docs/figures
"""

import argparse
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from wavekit_calibration.figures import DARK, LIGHT, MIDDLE, STYLE, WIDTH, save_figure
from wavekit_calibration.simulation.comparison import compare
from wavekit_calibration.simulation.plan import plan
from wavekit_calibration.simulation.timing import read_costs, unit_costs
from wavekit_calibration.simulation.trace import load_trace

NAME = "dex_depths"
LINES = {
    "depth exploration": (DARK, "-", "o"),
    "without DECS": (DARK, ":", "o"),
    "pipelining": (MIDDLE, "-", "s"),
    "selection": (MIDDLE, ":", "^"),
    "oracle of the EAD": (LIGHT, "--", ""),
    "oracle of the first right exit": (LIGHT, "-.", ""),
}


def main() -> None:
    """Print the table and draw the figure."""
    options = _options()
    trace = load_trace(options.trace)
    costs = read_costs(options.costs, trace.num_layers) if options.costs else unit_costs(trace.num_layers)
    rows: dict[int, dict[str, float]] = {}
    print("| stages end at | ticks a token |", " | ".join(LINES), "| peak nodes |")
    print(f"|{' --- |' * (3 + len(LINES))}")
    for planned in plan(trace, costs, options.max_stages):
        depths = planned.stages.depths
        found, apart = (compare(trace, depths, costs, decs) for decs in (True, False))
        ways = {way.name.split(",")[0]: way for way in found.ways}
        speeds = {name: ways[name].speedup for name in LINES if name in ways}
        speeds["without DECS"] = next(way.speedup for way in apart.ways if way.name == "depth exploration")
        rows[len(depths)] = speeds
        cells = [f"{speeds[name]:.2f}x" for name in LINES]
        ticks = ways["depth exploration"].ticks
        print(f"| {','.join(map(str, depths))} | {ticks:.3f} | {' | '.join(cells)} | {found.detail.peak_live} |")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        save_figure(draw(rows, costs.unit), options.output, NAME)


def draw(rows: dict[int, dict[str, float]], unit: str) -> Figure:
    """Speed-up over plain decoding against the number of stages."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, (colour, line, marker) in LINES.items():
            values = [speeds[name] for speeds in rows.values()]
            axes.plot([*rows], values, color=colour, linestyle=line, marker=marker, markersize=4, label=name)
        axes.set(xlabel="stages", ylabel=f"predicted speed-up, in {unit}", xticks=[*rows])
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace file, or the folder of `wavekit calibrate`")
    parser.add_argument("--costs", type=Path, help="measured costs, as `wavekit record` writes them")
    parser.add_argument("--max-stages", type=int, default=8, help="(%(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="folder for the figure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
