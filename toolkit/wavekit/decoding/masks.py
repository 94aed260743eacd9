"""What is added to attention scores, laid out and bound for one pass.

Which rows may see which is the caller's knowledge, given as row numbers; nothing here knows tokens or stages.
"""

from collections.abc import Sequence

import numpy as np

from wavekit_engines.engine import Array, Binding

MASK_COLUMNS = 64
_HIDDEN = -np.inf


def mask_columns(rows: int, capacity: int) -> int:
    """The columns of a mask over ``rows`` rows in use: rounded up, since binding another shape costs host time."""
    return min(-(-rows // MASK_COLUMNS) * MASK_COLUMNS, capacity)


class Mask:
    """What is added to the scores of the layers with one attention window: [1, 1, S, T], 0 or minus infinity.

    Causality by row number is the attention's own, so a continuation whose rows are all within the window needs only
    zeros. T is rounded up, since binding another shape costs more than the pass's whole host work; the attention never
    reads the columns of rows not in use.
    """

    def __init__(self, binding: Binding, window: int | None, cells: int, dtype: str) -> None:
        self._binding, self._window = binding, window
        # Pages that are not written take no memory.
        self._zeros = np.zeros(cells, dtype)
        self._cells = np.zeros(cells, dtype)
        self._bound: tuple[bool, tuple[int, ...]] | None = None

    def lay_out(
        self,
        rows: range,
        columns: int,
        row_positions: Array,
        visible: Sequence[Sequence[int]] | None = None,
        committed: int = 0,
    ) -> None:
        """Write and bind the mask of a pass.

        Args:
            rows: the cache rows of the pass.
            columns: T, at least ``rows.stop``.
            row_positions: position of every cache row; read only where there is a window.
            visible: for each new row the rows from ``committed`` on that it attends to, besides itself; they must be
                lower than its own. Rows beyond the last entry, and all of them for None, see every earlier row.
            committed: rows below this are seen by every new row.
        """
        count, window = len(rows), self._window
        beyond_window = window is not None and rows.stop > window
        written = visible is not None or beyond_window
        shape = (1, 1, count, columns)
        cells = (self._cells if written else self._zeros)[: count * columns].reshape(shape)
        if (written, shape) != self._bound:
            self._binding.bind_input(mask_name(window), cells)
            self._bound = (written, shape)
        if not written:
            return
        mask = cells[0, 0]
        mask[:] = 0
        if visible is not None:
            mask[: len(visible), committed:] = _HIDDEN
            for index, seen in enumerate(visible):
                mask[index, [*seen, rows.start + index]] = 0
        if window is not None and beyond_window:
            first_seen = row_positions[rows.start : rows.stop, None] - window + 1
            mask[:, : rows.stop][row_positions[None, : rows.stop] < first_seen] = _HIDDEN


def mask_name(window: int | None) -> str:
    """The graph input that masks the layers of this window."""
    return "mask" if window is None else f"mask_{window}"
