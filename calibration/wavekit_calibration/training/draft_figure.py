"""The figure of a draft's training: loss, held-out tau and acceptance by position, against the step."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from wavekit_calibration.training.draft_train import Look
from wavekit_calibration.training.training_figure import draw_looks


def draw_training(looks: Sequence[Look]) -> Figure:
    """Two panels, one above the other: loss and tau; acceptance of each position."""
    positions = range(len(looks[0].acceptance))
    shares = {f"position {position + 1}": [look.acceptance[position] for look in looks] for position in positions}
    return draw_looks(looks, "tau", "tokens a pass", shares, "accepted, of those tried")
