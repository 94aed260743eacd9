"""The figure of exits in training: loss, held-out speed-up and agreement by boundary, against the step."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from wavekit_calibration.training.exit_train import ExitLook
from wavekit_calibration.training.training_figure import draw_looks


def draw_exits(looks: Sequence[ExitLook], boundaries: Sequence[int]) -> Figure:
    """Two panels, one above the other: loss and speed-up in ticks; agreement of each exit, deepest darkest."""
    shares = {
        f"boundary {boundary}": [look.agreement[exit_] for look in looks]
        for exit_, boundary in reversed(list(enumerate(boundaries)))
    }
    return draw_looks(looks, "speed-up", "speed-up, in ticks", shares, "tokens that an exit gives")
