"""The figure of a training run: loss, held-out tau and acceptance by position, against the step."""

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from wavekit_calibration.draft_train import Look
from wavekit_calibration.figures import DARK, LIGHT, MIDDLE, STYLE, WIDTH


def draw_training(looks: Sequence[Look]) -> Figure:
    """Two panels, one above the other: loss and tau; acceptance of each position."""
    steps = [look.step for look in looks]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        losses = [(look.step, look.loss) for look in looks if not math.isnan(look.loss)]
        above.plot(*zip(*losses, strict=True) if losses else ([], []), color=LIGHT, label="training loss (left)")
        above.set(ylabel="loss")
        beside = above.twinx()
        beside.plot(steps, [look.tau for look in looks], color=DARK, marker="o", markersize=3, label="held-out tau")
        beside.set(ylabel="tokens a pass")
        beside.spines["right"].set_visible(True)
        for position in range(len(looks[0].acceptance)):
            shade = 1 - 0.75 * position / max(len(looks[0].acceptance) - 1, 1)
            below.plot(
                steps, [100 * look.acceptance[position] for look in looks], color=MIDDLE, alpha=shade,
                label=f"position {position + 1}",
            )  # fmt: skip
        below.set(xlabel="step", ylabel="accepted, of those tried (%)", ylim=(0, 100))
        figure.legend(loc="outside lower center", ncols=2)
    return figure
