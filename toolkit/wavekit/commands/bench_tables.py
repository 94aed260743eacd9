"""The tables of `wavekit bench`."""

from collections.abc import Sequence

from wavekit.benchmarking.offered import PLAIN
from wavekit.benchmarking.quiet import QUIET_CORES
from wavekit.benchmarking.report import BenchReport, WayReport
from wavekit.benchmarking.spread import Spread
from wavekit.benchmarking.summary import Summary
from wavekit.commands.formatting import size, table

_POSITIONS = 5
_NONE = "-"


def tables(report: BenchReport) -> str:
    """Speed, what it comes from, sets beside each other, and what must be said about them."""
    subject = report.subject
    lengths = report.ways[0].summary
    place = subject.engine if subject.device is None else f"{subject.engine} ({subject.device})"
    about = (
        f"{subject.bundle} ({subject.model}, {subject.precision}) with {place} on {report.machine}; prompts of "
        f"{_spread(lengths.prompt_tokens, 0)} tokens, texts of {_spread(lengths.new_tokens, 0)}, "
        f"{report.rounds} {'round' if report.rounds == 1 else 'rounds'}; medians (quartiles)"
    )
    parts = [about, _speed_table(report.ways), _cause_table(report.ways)]
    if len(report.sets) > 1:
        parts.append(_set_table(report))
    return "\n\n".join([*parts, "\n".join(_notes(report))])


def _speed_table(ways: Sequence[WayReport]) -> str:
    header = ("mode", "threads", "tokens/s", "over plain", "first token, ms", "between, ms: p50", "p95", "p99", "noisy")
    rows = []
    for way in ways:
        found = way.summary
        gaps = [found.gaps.p50, found.gaps.p95, found.gaps.p99] if found.gaps is not None else [None] * 3
        rows.append((
            way.name,
            _threads(way),
            _spread(found.tokens_per_second, 1),
            _times(found.speed),
            _spread(found.first_token, 0),
            *(_number(gap, 1) for gap in gaps),
            f"{found.disturbed} of {found.runs}",
        ))  # fmt: skip
    return table(header, rows, frozenset(range(1, 9)))


def _cause_table(ways: Sequence[WayReport]) -> str:
    header = ("mode", "tau", "accepted: 1, 2, ... or more", "ticks a token", "ms a token: draft", "target", "host",
              "memory", "texts as plain")  # fmt: skip
    rows = []
    for way in ways:
        found, parts = way.summary, way.summary.parts
        rows.append((
            way.name,
            _number(found.tau, 2),
            _shares(found),
            _number(found.ticks, 2),
            *(_number(part, 2) for part in ((parts.draft, parts.target, parts.host) if parts else (None,) * 3)),
            size(way.peak_memory) if way.peak_memory is not None else _NONE,
            f"{way.texts - len(way.differences)} of {way.texts}",
        ))  # fmt: skip
    return table(header, rows, frozenset({1, 3, 4, 5, 6, 7, 8}))


def _set_table(report: BenchReport) -> str:
    ways = [way for way in report.ways if way.name != PLAIN]
    header = ["set", "plain, tokens/s", *(f"{way.name} over plain, tau" for way in ways)]
    rows = []
    for name in report.sets:
        cells = [f"{_times(way.sets[name].speed)}, {_number(way.sets[name].tau, 2)}" for way in ways]
        rows.append([name, _spread(report.ways[0].sets[name].tokens_per_second, 1), *cells])
    return table(header, rows, frozenset(range(1, len(header))))


def _notes(report: BenchReport) -> list[str]:
    notes = [
        "tau counts the token that the target adds itself (the bonus token).",
        "Accepted: of all passes, the share that committed so many proposed tokens or more.",
        "Between: gaps as a reader of the stream sees them; tokens of one pass come at once, 0 ms apart.",
        f"Noisy: runs during which other processes kept more than {QUIET_CORES} of a core busy; such times say little.",
    ]
    for way in report.ways:
        if way.differences:
            first = way.differences[0]
            notes.append(
                f"{way.name}: {len(way.differences)} of {way.texts} texts differ from plain decoding, the first: "
                f"{first.set}, {first.prompt}, token {first.position + 1}"
                + ("; `wavekit verify` says why" if way.setting is not None else "")
            )
    return [*notes, *report.left_out]


def _threads(way: WayReport) -> str:
    if way.setting is None:
        return _NONE
    lanes = f"{way.setting.lanes} x " if way.setting.lanes > 1 else ""
    return f"{lanes}{way.setting.threads}"


def _spread(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return _NONE
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def _times(spread: Spread | None) -> str:
    return _NONE if spread is None else f"{spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})"


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


def _shares(found: Summary) -> str:
    if not found.acceptance:
        return _NONE
    return " ".join(f"{share:.0%}" for share in found.acceptance[:_POSITIONS])
