"""The figure of `wavekit bench`, where matplotlib is installed, and what figures of measurements share."""

import io
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from wavekit.benchmarking.report import BenchReport
from wavekit.benchmarking.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")


def bench_figures(report: BenchReport) -> dict[str, bytes]:
    """By format: tokens a second of every way, with quartiles; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return {}
    rows = []
    for way in report.ways:
        tau, spread = way.summary.tau, way.summary.tokens_per_second
        if spread is not None:
            rows.append((way.name, spread, f"tau {tau:.2f}" if tau is not None else ""))
    if not rows:
        return {}
    figure = _drawn(rows, "tokens a second, median and quartiles")
    return {kind: encoded(figure, kind) for kind in FORMATS}


def _drawn(rows: Sequence[tuple[str, Spread, str]], label: str) -> "Figure":
    import matplotlib
    from matplotlib.figure import Figure

    from wavekit_calibration.figures import STYLE, WIDTH

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + 0.3 * len(rows)), layout="constrained")
        draw_bars(figure.subplots(), rows, label)
    return figure


def draw_bars(axes: "Axes", rows: Sequence[tuple[str, Spread, str]], label: str, dark: Collection[int] = (0,)) -> None:
    """Horizontal bars with quartiles, the first on top, each with a remark; those in ``dark`` stand out."""
    from wavekit_calibration.figures import DARK, LIGHT, MIDDLE

    for place, (_, spread, remark) in enumerate(rows):
        beside = [[spread.median - spread.low], [spread.high - spread.median]]
        colour = MIDDLE if place in dark else LIGHT
        axes.barh(place, spread.median, xerr=beside, color=colour, ecolor=DARK, height=0.62)
        axes.annotate(
            f"{spread.median:.3g}  {remark}", (spread.high, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel=label, xlim=(0, 1.35 * max(spread.high for _, spread, _ in rows)))


def encoded(figure: "Figure", kind: str) -> bytes:
    """The bytes of a file of this kind."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160)
    return buffer.getvalue()
