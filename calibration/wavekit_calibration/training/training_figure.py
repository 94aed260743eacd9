"""The figure of a training run: loss, the held-out score and the shares behind it, against the step."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from wavekit_calibration.figures import DARK, LIGHT, MIDDLE, STYLE, WIDTH
from wavekit_calibration.training.training_loop import HeldOutLook


def draw_looks(
    looks: Sequence[HeldOutLook], score: str, unit: str, shares: Mapping[str, Sequence[float]], what: str
) -> Figure:
    """Two panels, one above the other: loss and score; shares, darkest first.

    Args:
        looks: in order.
        score: name of the score.
        unit: what the score is counted in.
        shares: by label, one for each look, 0 to 1.
        what: they are shares of, for the axis.
    """
    steps = [look.step for look in looks]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        losses = [(look.step, look.loss) for look in looks if not math.isnan(look.loss)]
        above.plot(*zip(*losses, strict=True) if losses else ([], []), color=LIGHT, label="training loss (left)")
        above.set(ylabel="loss")
        beside = above.twinx()
        beside.plot(
            steps, [look.score for look in looks], color=DARK, marker="o", markersize=3, label=f"held-out {score}"
        )
        beside.set(ylabel=unit)
        beside.spines["right"].set_visible(True)
        for index, (label, values) in enumerate(shares.items()):
            shade = 1 - 0.75 * index / max(len(shares) - 1, 1)
            below.plot(steps, [100 * value for value in values], color=MIDDLE, alpha=shade, label=label)
        below.set(xlabel="step", ylabel=f"{what} (%)", ylim=(0, 100))
        figure.legend(loc="outside lower center", ncols=2)
    return figure
