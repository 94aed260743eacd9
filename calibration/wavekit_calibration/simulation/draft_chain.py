"""Drafts for a replay where none were recorded: right as often as said, by how far they look ahead."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.errors import TraceError
from wavekit_calibration.simulation.trace import ExitTrace
from wavekit_engines.errors import MisuseError


def imagined_draft(trace: ExitTrace, acceptance: Sequence[float], seed: int = 0) -> NDArray[np.int32]:
    """Draw a draft [n, L], see `ExitTrace.draft`.

    Args:
        trace: whose tokens are drafted.
        acceptance: p_1 .. p_L: how often the m-th token of a chain is right where all before it are.
        seed: of the draw. Each token of the text is as easy for every draft that comes by, so that a draft asked
            later, for which it is nearer, is not wrong where an earlier one was right, if acceptance falls.

    Raises:
        MisuseError: acceptance not between 0 and 1.
    """
    if not acceptance or not all(0.0 <= p <= 1.0 for p in acceptance):
        raise MisuseError("draft acceptance is a share from 0 to 1 for each token ahead, such as 0.7,0.6,0.5")
    n, length = len(trace), len(acceptance)
    hardness = np.random.default_rng(seed).random(n)
    ahead = np.minimum(np.arange(n)[:, None] + np.arange(length), n - 1)
    right = np.logical_and.accumulate(hardness[ahead] < np.array(acceptance), axis=1)
    other = (-2 - ahead).astype(np.int32)  # no exit proposes a negative token; two wrong drafts for a place agree
    drawn: NDArray[np.int32] = np.where(right, trace.final[ahead], other)
    return drawn


def recorded_draft(trace: ExitTrace) -> NDArray[np.int32]:
    """The draft in the trace.

    Raises:
        TraceError: it holds none.
    """
    if trace.draft is None:
        raise TraceError("the trace holds no drafts; give --draft-acceptance a share for each token ahead instead")
    return trace.draft
