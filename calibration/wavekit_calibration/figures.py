"""The report's figures, drawn with matplotlib from a calibration and its arrays.

Sized for a phone held upright (4.6 inches wide, text at 8 points or more) and told apart by brightness, line style and
marker, so that they survive a greyscale printer. Drawn without pyplot: no display, no global state.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from wavekit_calibration.result import Calibration

DARK, MIDDLE, LIGHT = "#16324f", "#c4572e", "#9fb8cc"
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "svg.hashsalt": "wavekit",
    "savefig.facecolor": "white",
}
WIDTH = 4.6

Matrices = Mapping[str, NDArray[Any]]


def draw_all(found: Calibration, matrices: Matrices) -> dict[str, Figure]:
    """Draw every figure of the report, by the name its files get."""
    drawings: dict[str, Callable[[Calibration, Matrices], Figure]] = {
        "activation_wave": activation_wave,
        "cka": cka_map,
        "sets": set_ranking,
        "readiness": readiness_chart,
    }
    with matplotlib.rc_context(STYLE):
        return {name: draw(found, matrices) for name, draw in drawings.items()}


def save_figure(figure: Figure, folder: Path, name: str) -> Path:
    """Write NAME.png (200 dots per inch) and NAME.svg to a folder; returns the PNG's path."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png", dpi=200)
    return folder / f"{name}.png"


def activation_wave(found: Calibration, _matrices: Matrices) -> Figure:
    """Entropy of every boundary and of all boundaries up to it, with the chosen ones marked."""
    figure, axes = _axes(3.5)
    entropy = np.asarray(found.depths.entropy)
    together = np.asarray(found.depths.concatenation_entropy)
    depth = np.arange(len(entropy))
    chosen = list(found.boundaries)
    for boundary in chosen:
        axes.axvline(boundary, color=LIGHT, linewidth=1.0, zorder=0)
    axes.plot(depth, together, linestyle="--", color=MIDDLE, label="boundaries 0 to k together")
    axes.plot(depth, entropy, color=DARK, marker=".", markersize=4, label="boundary k alone")
    axes.plot(chosen, entropy[chosen], "o", color=DARK, markersize=8, label="chosen: " + _joined(chosen))
    rule = next((list(s.boundaries) for s in found.selection.sets if "EAGLE-3 rule" in s.names), chosen)
    if rule != chosen:
        label = "EAGLE-3 rule: " + _joined(rule)
        axes.plot(rule, entropy[rule], "s", color=MIDDLE, markerfacecolor="white", markeredgewidth=1.5, label=label)
    alpha = found.select.alpha
    axes.set(xlabel="boundary k (0 = embedding)", ylabel=f"matrix entropy $S_{{{alpha:g}}}$ (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure, axes, columns=1)
    return figure


def cka_map(found: Calibration, matrices: Matrices) -> Figure:
    """Debiased CKA of all pairs of boundaries, compartments outlined, chosen boundaries on the diagonal."""
    figure, axes = _axes(4.4)
    cka = matrices["cka"]
    low = min(0.0, float(cka.min())) if cka.min() < 0.2 else float(np.floor(cka.min() * 10) / 10)
    image = axes.imshow(cka, origin="lower", cmap="cividis", vmin=low, vmax=1.0)
    for first, last in found.selection.compartments:
        size = last - first + 1
        axes.add_patch(Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor="white", linewidth=2.2))
        axes.add_patch(Rectangle((first - 0.5, first - 0.5), size, size, fill=False, edgecolor="black", linewidth=0.9))
    chosen = list(found.boundaries)
    axes.plot(
        chosen, chosen, "o", markerfacecolor="white", markeredgecolor="black", markersize=7, clip_on=False,
        label="chosen: " + _joined(chosen),
    )  # fmt: skip
    axes.plot([], [], "s", markerfacecolor="none", markeredgecolor="black", markersize=9, label="compartments")
    axes.set(xlabel="boundary", ylabel="boundary")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="debiased CKA", fraction=0.046, pad=0.04)
    _legend_below(figure, axes, columns=2)
    return figure


def set_ranking(found: Calibration, _matrices: Matrices) -> Figure:
    """Entropy of every set in the table, with one standard error, best on top."""
    rows = found.selection.sets
    figure, axes = _axes(1.4 + 0.42 * len(rows))
    size = len(found.boundaries)
    place = np.arange(len(rows))[::-1]
    for y, row in zip(place, rows, strict=True):
        same = len(row.boundaries) == size
        chosen = row.boundaries == found.boundaries
        axes.errorbar(
            row.score, y, xerr=row.standard_error or 0.0, fmt="o" if same else "D", capsize=3,
            color=DARK if chosen else MIDDLE, markersize=8 if chosen else 6,
            markerfacecolor=(DARK if chosen else MIDDLE) if same else "white",
        )  # fmt: skip
    axes.set_yticks(place, [f"{' = '.join(r.names)}\n{_joined(r.boundaries)}" for r in rows], fontsize=8)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.margins(x=0.08)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("set entropy (nats), bar: one standard error")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


def readiness_chart(found: Calibration, _matrices: Matrices) -> Figure:
    """EAD histogram, and by depth the share of tokens that agree and that are ready."""
    figure, axes = _axes(3.5)
    readiness = found.readiness
    counts = np.asarray(readiness.ead_histogram)
    depth = np.arange(len(counts))
    axes.bar(depth, 100.0 * counts / readiness.tokens, color=LIGHT, width=0.85, label="EAD is k")
    axes.plot(depth, 100.0 * counts.cumsum() / readiness.tokens, color=DARK, label="EAD is k or shallower (ready)")
    axes.plot(
        depth, 100.0 * np.asarray(readiness.agreement), color=MIDDLE, linestyle="--",
        label="logit lens at k gives the final token",
    )  # fmt: skip
    axes.set(xlabel="boundary k", ylabel="share of tokens (%)", ylim=(0, 102))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_below(figure, axes, columns=1)
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _joined(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries))
