"""Figures as inline SVG: lines over boundaries on a logarithmic scale, and bars beside each other.

Text is large enough for a phone, where a figure is half as wide as it is drawn.
"""

import html
import math
from collections.abc import Mapping, Sequence

COLOURS = ("#16324f", "#c2571a", "#2f7d5b", "#7a4fa3")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560, 320, 66, 52, 38, 12
_FLOOR = 1e-9


def lines(
    series: Mapping[str, Sequence[float | None]], x_label: str, marks: Sequence[int] = (), limit: float | None = None
) -> str:
    """Lines over 0, 1, 2, ... on a logarithmic scale.

    Args:
        series: values by name; None leaves a gap.
        x_label: what is counted.
        marks: places on the x axis to mark, such as tapped boundaries.
        limit: a value to draw a dashed line at.
    """
    values = [max(v, _FLOOR) for line in series.values() for v in line if v is not None and math.isfinite(v)]
    if limit is not None:
        values.append(limit)
    low, high = _decades(values or [1.0])
    last = max(len(line) for line in series.values()) - 1

    def x(place: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * place / max(last, 1)

    def y(value: float) -> float:
        share = (math.log10(max(value, _FLOOR)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(max(share, 0.0), 1.0)

    parts = [_vertical(x(mark), "#dbe4ec") for mark in marks]
    for decade in range(low, high + 1, max(1, (high - low) // 5)):
        parts.append(_horizontal(y(10.0**decade), "#d9e0e6"))
        parts.append(_text(_LEFT - 6, y(10.0**decade) + 5, f"1e{decade}" if decade else "1", "end"))
    for place in range(0, last + 1, max(1, -(-last // 8))):
        parts.append(_text(x(place), _HEIGHT - _BOTTOM + 20, str(place), "middle"))
    if limit is not None:
        parts.append(_horizontal(y(limit), "#a33", "5 4"))
    for colour, line in zip(COLOURS, series.values(), strict=False):
        points = [(x(place), y(v if math.isfinite(v) else 10.0**high)) for place, v in enumerate(line) if v is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in points]
    return _figure(parts, list(series), x_label)


def bars(series: Mapping[str, Sequence[float]], x_label: str) -> str:
    """Shares between 0 and 1 at places 1, 2, ..., the series beside each other."""
    places = max(len(values) for values in series.values())
    room = (_WIDTH - _LEFT - _RIGHT) / max(places, 1)
    wide = 0.7 * room / max(len(series), 1)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += [_horizontal(y(share), "#d9e0e6"), _text(_LEFT - 6, y(share) + 5, f"{share:.0%}", "end")]
    for place in range(places):
        parts.append(_text(_LEFT + room * (place + 0.5), _HEIGHT - _BOTTOM + 20, str(place + 1), "middle"))
    for number, (colour, values) in enumerate(zip(COLOURS, series.values(), strict=False)):
        for place, value in enumerate(values):
            at = _LEFT + room * (place + 0.15) + wide * number
            parts.append(
                f'<rect x="{at:.1f}" y="{y(value):.1f}" width="{wide:.1f}" '
                f'height="{y(0) - y(value):.1f}" fill="{colour}"/>'
            )
    return _figure(parts, list(series), x_label)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _figure(parts: Sequence[str], names: Sequence[str], x_label: str) -> str:
    legend, at = [], float(_LEFT)
    for colour, name in zip(COLOURS, names, strict=False):
        legend.append(f'<rect x="{at:.0f}" y="9" width="12" height="12" fill="{colour}"/>')
        legend.append(_text(at + 17, 20, name, "start"))
        at += 30 + 9.6 * len(name)
    below = _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_label, "middle")
    label = html.escape(f"{', '.join(names)} by {x_label}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="17" '
        f'font-family="system-ui,sans-serif" fill="#1c2733">{"".join([*parts, *legend, below])}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _horizontal(y: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"{dashed}/>'


def _vertical(x: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="{colour}" stroke-width="7"/>'
