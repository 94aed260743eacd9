"""The figure of `wavekit tune`: everything that was tried, and what passes cost."""

from importlib.util import find_spec

from wavekit.commands.bench_figure import draw_bars, encoded
from wavekit.tuning.candidates import described
from wavekit.tuning.report import TrialReport, TuneReport
from wavekit.tuning.search import TIE

_MOST_BARS = 30
_MOST_ROWS = 16


def tune_figure(report: TuneReport, kind: str) -> bytes | None:
    """The figure's file, or None without matplotlib or where nothing was measured."""
    shown = [trial for trial in report.trials if trial.speed is not None][-_MOST_BARS:]
    if find_spec("matplotlib") is None or not shown:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    from wavekit_calibration.figures import DARK, MIDDLE, STYLE, WIDTH

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.7 * WIDTH, 3.4 + 0.24 * len(shown)), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(1.2 + 0.24 * len(shown), 2.2))
        rows = [(f"{trial.phase}: {trial.name}", trial.speed, _remark(trial)) for trial in shown if trial.speed]
        chosen = [place for place, trial in enumerate(shown) if trial.outcome == "chosen"]
        draw_bars(above, rows, f"speed over plain decoding ({described(report.plain)})", chosen)
        above.axvspan(1, TIE, color=DARK, alpha=0.35, linewidth=0)
        for label, curve, colour in (
            ("the model", report.costs.target, DARK),
            ("the draft head", report.costs.draft, MIDDLE),
        ):
            near = [(rows_, cost) for rows_, cost in curve if rows_ <= _MOST_ROWS]
            if near:
                below.plot(*zip(*near, strict=True), marker="o", markersize=3, color=colour, label=label)
        below.set(xlabel="rows in a pass", ylabel="ms a pass", ylim=(0, None))
        below.legend()
        return encoded(figure, kind)


def _remark(trial: TrialReport) -> str:
    tau = f"tau {trial.tau:.2f}" if trial.tau is not None else ""
    return tau if trial.outcome in ("measured", "behind") else f"{tau} ({trial.outcome})"
