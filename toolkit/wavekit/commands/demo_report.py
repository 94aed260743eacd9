"""What the demo tells at its end: a table, what its columns mean, two of the texts, and whether all is well."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wavekit.commands.demo_comparison import TIE, Comparison, Text
from wavekit.commands.formatting import size, table

if TYPE_CHECKING:
    from wavekit_calibration.result import Calibration

_TEXT_WIDTH = 76
_UNEVEN = 2.0  # on a quiet machine the fastest text is less than this many times as fast as the slowest


@dataclass(frozen=True)
class Row:
    """One bundle: how it is called, whether its tokens must equal the reference's, its bytes, and how it did."""

    label: str
    exact: bool
    bytes: int
    comparison: Comparison


def calibration_summary(calibration: "Calibration", folder: Path) -> str:
    """What the model's hidden states chose, beside the rule in common use."""
    layers = calibration.model.num_layers
    usual = _listed((2, layers // 2, layers - 3))
    return (
        f"calibrated on {calibration.measured.tokens_kept} tokens: a draft head is fed best with boundaries "
        f"{_listed(calibration.boundaries)}\n(EAGLE-3's rule: {usual}); why, with figures: {folder / 'report.html'}"
    )


def _listed(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries))


def result_table(rows: Sequence[Row], reference_tokens_per_second: float) -> str:
    """One line for transformers and one for each bundle."""
    header = ("written by", "size", "tokens equal", "tokens/s", "speed (range)")
    lines = [("transformers, fp32", "-", "reference", f"{reference_tokens_per_second:.1f}", "1")]
    lines += [
        (
            row.label,
            size(row.bytes),
            f"{row.comparison.leading} of {row.comparison.of}{'' if row.exact else ' *'}",
            f"{row.comparison.tokens_per_second:.1f}",
            f"{row.comparison.ratio:.1f}x ({row.comparison.slowest:.1f}-{row.comparison.fastest:.1f})",
        )
        for row in rows
    ]
    return table(header, lines, right=frozenset({1, 3}))


def notes(rows: Sequence[Row], texts: int, planned: int, threads: int, busy: bool) -> list[str]:
    """How to read the table."""
    lines = [
        "tokens equal: token ids like those of transformers, in each text up to the first",
        "difference. *: weights in 4 bits are another model numerically, no error.",
        f"speed: relative to transformers, without the prefill; median of {texts} text{'s' * (texts > 1)},",
        f"{threads} thread{'s' * (threads > 1)} for each engine.",
    ]
    if texts < planned:
        lines.append(f"Only {texts} of {planned} texts {'were' if texts > 1 else 'was'} written: the time was up.")
    if busy:
        lines.append("Other programs keep this machine busy; run it again when it is quiet.")
    elif any(row.comparison.fastest > _UNEVEN * row.comparison.slowest for row in rows if row.exact):
        lines.append("The ranges are wide; run it again when nothing else does.")
    for row in rows:
        ties = [difference for difference in row.comparison.differences if row.exact and difference.is_tie]
        lines += [
            f"{row.label}: text {tie.prompt + 1} differs from token {tie.position + 1} on, by a numeric tie\n"
            f"(in transformers the logits of the two tokens are {tie.margin:.0e} apart)."
            for tie in ties
        ]
    return lines


def exploring(row: Row, in_turn: Sequence[Text], at_once: Sequence[Text]) -> str:
    """What exits save where all stages run at once, in ticks; its time on one machine says nothing."""
    before, after = (
        sum(text.ticks for text in texts) / sum(len(text.token_ids) - 1 for text in texts)
        for texts in (in_turn, at_once)
    )
    return (
        f"Early exits: all 5 stages at once write {row.comparison.leading} of {row.comparison.of} tokens equal, in "
        f"{after:.1f} ticks a token\n"
        f"instead of {before:.0f}. That counts where each stage has a device of its own: see docs/dex.md."
    )


def failure(rows: Sequence[Row]) -> str | None:
    """One line on the first fp32 text that is not transformers', unless a tie explains it."""
    for row in rows:
        for difference in row.comparison.differences:
            if row.exact and not difference.is_tie:
                gap = (
                    "ends there"
                    if difference.margin is None
                    else f"logits {difference.margin:.2g} apart, a tie is {TIE:g}"
                )
                return (
                    f"{row.label}: text {difference.prompt + 1} is not that of transformers from token "
                    f"{difference.position + 1} on ({gap}); this is a bug, please report it with the table above"
                )
    return None


def shown_text(prompt: str, text: str, cut: bool) -> str:
    """A prompt and the text after it, as a person reads them."""
    lines = [line for paragraph in (text + " ..." * cut).splitlines() for line in textwrap.wrap(paragraph, _TEXT_WIDTH)]
    return "\n".join([f"> {prompt}", *(f"  {line}" for line in lines)])


def duration(seconds: float) -> str:
    """1 min 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
