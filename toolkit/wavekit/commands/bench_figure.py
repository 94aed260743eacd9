"""The figures of `wavekit bench` and `wavekit tune`, where matplotlib is installed."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from wavekit.benchmarking.report import BenchReport
from wavekit.benchmarking.spread import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")


def bench_figures(report: BenchReport) -> dict[str, bytes]:
    """By format: tokens a second of every way, with quartiles; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return {}
    rows = [
        (way.name, way.summary.tokens_per_second, f"tau {way.summary.tau:.2f}" if way.summary.tau is not None else "")
        for way in report.ways
    ]
    figure = bars([row for row in rows if row[1] is not None], "tokens a second, median and quartiles")
    return {kind: encoded(figure, kind) for kind in FORMATS}


def bars(rows: Sequence[tuple[str, Spread | None, str]], label: str, mark: float | None = None) -> "Figure":
    """Horizontal bars with quartiles, the first on top, each with a remark; ``mark`` draws a line at a value."""
    import matplotlib
    from matplotlib.figure import Figure

    from wavekit_calibration.figures import DARK, LIGHT, MIDDLE, STYLE, WIDTH

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + 0.34 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, (_, spread, remark) in enumerate(rows):
            if spread is None:
                continue
            beside = [[spread.median - spread.low], [spread.high - spread.median]]
            axes.barh(place, spread.median, xerr=beside, color=LIGHT if place else MIDDLE, ecolor=DARK, height=0.62)
            axes.annotate(f"{spread.median:.3g}  {remark}", (spread.high, place), xytext=(6, 0),
                          textcoords="offset points", va="center")  # fmt: skip
        if mark is not None:
            axes.axvline(mark, color=DARK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set(xlabel=label, xlim=(0, None))
    return figure


def encoded(figure: "Figure", kind: str) -> bytes:
    """The bytes of a file of this kind."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160)
    return buffer.getvalue()
