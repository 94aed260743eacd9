"""The tables of `wavekit tune`."""

from wavekit.benchmarking.quiet import QUIET_CORES
from wavekit.benchmarking.spread import Spread
from wavekit.commands.formatting import table
from wavekit.tuning.candidates import described
from wavekit.tuning.report import TrialReport, TuneReport
from wavekit.tuning.search import TIE

_POSITIONS = 4
_ROWS = (1, 2, 4, 8, 16)
_NONE = "-"


def tables(report: TuneReport) -> str:
    """Costs, everything that was tried, and what came of it."""
    return "\n\n".join([
        f"{report.bundle} on {report.machine}; {report.prompts} prompts, texts of up to {report.new_tokens} tokens, "
        f"{report.seconds:.0f} s",
        _costs(report),
        _tried(report),
        _result(report),
    ])  # fmt: skip


def _costs(report: TuneReport) -> str:
    costs, lines = report.costs, list[str]()
    for name, curve in (("the model", costs.target), ("the draft head", costs.draft)):
        if curve:
            times = ", ".join(f"{dict(curve)[rows]:.1f}" for rows in _ROWS)
            lines.append(f"a pass of {name} of {', '.join(map(str, _ROWS))} rows takes {times} ms")
    if costs.stages is not None:
        stages = ", ".join(f"{seconds * 1e3:.1f}" for _, seconds in costs.stages.stages)
        lines.append(
            f"stages take {stages} ms of a row with all lanes at work, the head {costs.stages.head * 1e3:.1f}, "
            f"an exit {costs.stages.exit_head * 1e3:.1f}"
        )
    return "\n".join(lines)


def _tried(report: TuneReport) -> str:
    header = ("phase", "setting", "over plain", "in total", "tau", "accepted: 1, 2, ...", "texts", "noisy", "outcome")
    return table(header, [_row(trial) for trial in report.trials], frozenset({2, 3, 4, 6, 7}))


def _row(trial: TrialReport) -> tuple[str, ...]:
    return (
        trial.phase,
        trial.name,
        _times(trial.speed),
        f"{trial.total:.2f}x" if trial.texts else _NONE,
        f"{trial.tau:.2f}" if trial.tau is not None else _NONE,
        " ".join(f"{share:.0%}" for share in trial.acceptance[:_POSITIONS]) or _NONE,
        str(trial.texts),
        str(trial.disturbed),
        trial.outcome,
    )


def _result(report: TuneReport) -> str:
    plain = described(report.plain)
    rate = report.plain_tokens_per_second
    shown = f"{plain} ({rate:.1f} tokens/s)" if rate is not None else plain
    noise = (
        f"Noisy: turns during which other processes kept more than {QUIET_CORES} of a core busy.\n"
        "tau counts the token that the target adds itself (the bonus token)."
    )
    if report.chosen == report.plain:
        return f"{noise}\nchosen: {shown}; nothing that was tried is faster than it by more than {TIE - 1:.0%}"
    return f"{noise}\nchosen: {described(report.chosen)}: {report.speed:.2f}x of {shown}"


def _times(spread: Spread | None) -> str:
    return _NONE if spread is None else f"{spread.median:.2f}x ({spread.low:.2f}-{spread.high:.2f})"
