"""report.html: what a calibration found, as one file that needs nothing else and reads well on a phone."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from wavekit_calibration.figures import draw_all, save_figure
from wavekit_calibration.result import Calibration
from wavekit_calibration.sets import BeamCheck
from wavekit_engines.atomic import write_file

REPORT_NAME = "report.html"
FIGURES_FOLDER = "figures"

_CSS = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2733;background:#fff;margin:0 auto;padding:16px;max-width:680px}
h1{font-size:1.5em;line-height:1.2;margin:.2em 0}h2{font-size:1.2em;margin:1.8em 0 .3em}
p.lead{font-size:1.05em;background:#eef3f7;border-left:4px solid #16324f;padding:10px 12px;margin:12px 0}
img{width:100%;max-width:560px;height:auto;display:block;margin:8px auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88em;width:100%}
th,td{padding:5px 8px;text-align:right;border-bottom:1px solid #d9e0e6;white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.chosen td{font-weight:600;background:#eef3f7}
.note{color:#4a5a68;font-size:.9em}li{overflow-wrap:anywhere}
"""

_CAPTIONS = {
    "activation_wave": "Matrix entropy by depth; the chosen boundaries are marked.",
    "cka": "Similarity of all pairs of boundaries (debiased CKA) with the compartments outlined.",
    "sets": "Entropy of the compared sets, with one standard error over the sequences.",
    "readiness": "Earliest available depth of the measured tokens, and agreement of the logit lens by depth.",
}


def write_report(found: Calibration, matrices: Mapping[str, NDArray[Any]], folder: Path) -> Path:
    """Draw the figures into ``folder``/figures (PNG and SVG) and write ``folder``/report.html; returns its path."""
    figures = folder / FIGURES_FOLDER
    figures.mkdir(exist_ok=True)
    images = {}
    for name, figure in draw_all(found, matrices).items():
        picture = base64.b64encode(save_figure(figure, figures, name).read_bytes()).decode("ascii")
        images[name] = f'<img alt="{_CAPTIONS[name]}" src="data:image/png;base64,{picture}">'
    write_file(folder / REPORT_NAME, render(found, images).encode())
    return folder / REPORT_NAME


def render(found: Calibration, images: Mapping[str, str]) -> str:
    """Return the page; ``images`` maps figure names to ready ``img`` elements."""
    name = html.escape(found.model.name)
    body = [
        f"<h1>Calibration of {name}</h1>",
        f'<p class="lead">{html.escape(found.selection.verdict)}</p>',
        _chosen(found),
        "<h2>Entropy by depth</h2>",
        images["activation_wave"],
        f'<p class="note">{_CAPTIONS["activation_wave"]} High entropy: the tokens spread over many directions. '
        "Boundary k is the residual stream after k layers.</p>",
        "<h2>What resembles what</h2>",
        images["cka"],
        f'<p class="note">{_CAPTIONS["cka"]} Mean similarity within the compartments: '
        f"{found.selection.compartment_similarity:.3f}.</p>",
        "<h2>Sets of boundaries compared</h2>",
        images["sets"],
        _sets(found),
        _check(found.selection.check),
        "<h2>When tokens become predictable</h2>",
        images["readiness"],
        _readiness(found),
        "<h2>Exits worth having</h2>",
        _exits(found),
        "<h2>What was measured on what</h2>",
        _measured(found),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Calibration of {name}</title><style>{_CSS}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _chosen(found: Calibration) -> str:
    steps = "; ".join(_joined(s.boundaries) for s in found.selection.by_size)
    return (
        f"<p>{found.select.method.upper()} taps boundaries <strong>{_joined(found.boundaries)}</strong> "
        f"of 0 to {found.model.num_layers}. Best set of each size: {steps}.</p>"
    )


def _sets(found: Calibration) -> str:
    rows = [
        (
            " = ".join(s.names),
            _joined(s.boundaries),
            f"{s.score:.3f}",
            "" if s.standard_error is None else f"{s.standard_error:.3f}",
            "" if s.wins is None else f"{100 * s.wins:.0f} %",
            "" if s.lead is None else f"{s.lead.difference:+.3f} ({s.lead.low:+.3f} to {s.lead.high:+.3f})",
        )
        for s in found.selection.sets
    ]
    heads = ("set", "boundaries", "entropy", "std. error", "wins", "chosen is ahead by (95 %)")
    marked = [s.boundaries == found.boundaries for s in found.selection.sets]
    return _table(heads, rows, marked) + (
        f'<p class="note">Entropies in nats over {found.measured.tokens_kept} tokens. Wins: share of '
        f"{found.select.draws} resamples of the sequences in which a set is best of its size. The chosen set was "
        "picked on the same tokens, so its lead is slightly optimistic.</p>"
    )


def _check(check: BeamCheck | None) -> str:
    if check is None:
        return '<p class="note">There are too many sets of this size to score all of them.</p>'
    if check.gap == 0:
        beam = f"finds the best of them, {_joined(check.best)}"
    else:
        beam = f"stays {check.gap:.6f} nats below the best of them, {_joined(check.best)}"
    below = "; ".join(f"{html.escape(name)} above {100 * share:.1f} %" for name, share in check.share_below.items())
    return (
        f'<p class="note">Checked against all {check.sets} sets of this size at alpha = {check.alpha:g}: the beam '
        f"{beam}. Where the sets stand among all: {below}.</p>"
    )


def _readiness(found: Calibration) -> str:
    readiness = found.readiness
    return (
        f"<p>Over {readiness.tokens} tokens the earliest available depth is {readiness.mean_ead:.1f} of "
        f"{found.model.num_layers} layers on average; an oracle that knew it would save "
        f"{100 * readiness.oracle_saving:.1f} % of the layers.</p>"
        '<p class="note">Read through the model\'s own final norm and head. Trained exit adapters agree earlier.</p>'
    )


def _exits(found: Calibration) -> str:
    readiness = found.readiness
    rows = [
        (
            str(len(p.exits)),
            _joined(p.exits[:-1]),
            f"{p.ticks:.2f}",
            f"{p.ticks_first_match:.2f}",
            f"{p.tick_cost:.2f}",
            f"{p.gain:.2f}x",
            f"{even.gain:.2f}x",
        )
        for p, even in zip(readiness.plans, readiness.even_plans, strict=True)
    ]
    heads = ("stages", "exits at", "ticks/token", "first match", "tick", "gain", "even exits")
    measured = found.select.layer_costs is not None
    unit = "measured costs" if measured else f"layers; one head counts {readiness.head_cost:.1f} of them"
    return _table(heads, rows, [False] * len(rows)) + (
        '<p class="note">For each number of stages the exits that minimise expected time a token, every stage on a '
        f"lane of its own. Tick: cost of the slowest stage ({unit}). Ticks a token by EAD, and when the first agreeing "
        "exit commits. Gain: plain decoding's cost over tick times ticks; below 1 untrained exits do not pay.</p>"
    )


def _measured(found: Calibration) -> str:
    model, source, made, measure = found.model, found.measured, found.made_by, found.measure
    answers = "written by the model itself, greedily" if measure.answers == "self" else "from the prompt file"
    where = "answers" if measure.positions == "answer" else "prompts and answers"
    memory = f", peak memory {made.peak_memory_mb} MB" if made.peak_memory_mb else ""
    facts = {
        "Model": f"{model.name} ({model.architecture}), {model.num_layers} layers of width {model.hidden_size}, "
        f"{model.vocab_size} tokens, {model.dtype}; checkpoint {model.checkpoint_digest[:16]}",
        "Prompts": f"{source.prompts}: {source.prompts_used} used, {source.prompts_too_long} too long, "
        f"{source.prompts_not_drawn} not drawn, {source.lines_left_out} lines left out",
        "Answers": f"{answers}, up to {measure.max_new_tokens} tokens",
        "Tokens": f"{source.tokens_read} read; {source.tokens_sampled} of {source.positions_eligible} positions in the "
        f"{where} sampled; kept: {_filter(found)} ({source.tokens_kept} tokens, "
        f"threshold {source.entropy_threshold:.2f} nats)",
        "Settings": f"alpha {found.select.alpha:g}, beam {found.select.beam}, seed {measure.seed}",
        "Run": f"{made.created}, {made.seconds:.0f} s on {made.device}{memory}",
        "Versions": ", ".join(f"{package} {number}" for package, number in made.versions.items()),
        "Command": made.command or "called as a library",
    }
    lines = [f"<li><strong>{name}:</strong> {html.escape(text)}</li>" for name, text in facts.items()]
    unusable = [f"<li>line {line.line}: {html.escape(line.reason)}</li>" for line in source.left_out]
    return f"<ul>{''.join(lines)}</ul>" + (f"<p>Left out:</p><ul>{''.join(unusable)}</ul>" if unusable else "")


def _filter(found: Calibration) -> str:
    rule = found.select.filter
    if rule.quantile is not None:
        return f"the {100 * (1 - rule.quantile):.0f} % of highest next-token entropy"
    return f"those of at least {rule.nats:g} nats of next-token entropy"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool]) -> str:
    top = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    lines = [
        f"<tr{' class=chosen' if mark else ''}>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
        for row, mark in zip(rows, marked, strict=True)
    ]
    return f'<div class="wide"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def _joined(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries))
