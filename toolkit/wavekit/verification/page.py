"""report.html: what a verification found, as one file that needs nothing else and reads well on a phone.

It looks like the report of a calibration; charts are drawn in the page itself.
"""

import html
from collections.abc import Iterator, Sequence

from wavekit.verification.charts import bars, lines
from wavekit.verification.findings import Check, Divergence, Findings, Group

_CSS = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2733;background:#fff;margin:0 auto;padding:16px;max-width:680px}
h1{font-size:1.5em;line-height:1.2;margin:.2em 0}h2{font-size:1.2em;margin:1.8em 0 .3em}
h3{font-size:1em;margin:1.2em 0 .2em}
p.lead{font-size:1.05em;background:#eef3f7;border-left:4px solid #16324f;padding:10px 12px;margin:12px 0;
overflow-wrap:anywhere}
p.bad{background:#fbeeec;border-left-color:#a32a1d}
svg{width:100%;max-width:560px;height:auto;display:block;margin:8px auto}
ul.checks{list-style:none;margin:0;padding:0}
ul.checks li{display:grid;grid-template-columns:4.6em 1fr;gap:0 8px;padding:6px 0;border-bottom:1px solid #d9e0e6}
.mark{font-size:.82em;font-weight:600;text-align:center;border-radius:4px;padding:1px 0;align-self:start;margin-top:2px}
.pass{background:#e3f1e8;color:#1d5a3a}.FAIL{background:#a32a1d;color:#fff}.skipped{background:#eceff2;color:#4a5a68}
.says{color:#4a5a68;font-size:.92em;display:block}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88em;width:100%}
th,td{padding:5px 8px;text-align:right;border-bottom:1px solid #d9e0e6;white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.bad td{font-weight:600;background:#fbeeec}
.note{color:#4a5a68;font-size:.9em}li{overflow-wrap:anywhere}
"""

_GROUPS: dict[Group, str] = {
    "decoding": "Every way of writing, against plain decoding",
    "engines": "The engines against themselves",
    "sampling": "Drawn tokens",
    "text": "Text and token ids",
    "checkpoint": "Against the checkpoint",
    "draft": "The draft head",
}


def render(found: Findings, limit: float | None = None) -> str:
    """Return the page; ``limit`` is what drift may come to, where it is held to anything."""
    name = html.escape(found.subject.bundle)
    body = [
        f"<h1>Verification of {name}</h1>",
        f'<p class="lead{" bad" if found.failed else ""}">{html.escape(found.verdict)}</p>',
        *_failed(found.failed),
        *_groups(found.checks),
        *_divergences(found.divergences),
        *_drift(found, limit),
        *_draft(found),
        "<h2>What was verified on what</h2>",
        _facts(found),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Verification of {name}</title><style>{_CSS}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _failed(checks: Sequence[Check]) -> Iterator[str]:
    if len(checks) > 1:
        yield "<h2>What is wrong</h2>"
        yield _list(checks)


def _groups(checks: Sequence[Check]) -> Iterator[str]:
    for group, title in _GROUPS.items():
        listed = [check for check in checks if check.group == group]
        if listed:
            yield f"<h2>{title}</h2>"
            yield _list(listed)


def _list(checks: Sequence[Check]) -> str:
    lines_ = [
        f'<li><span class="mark {check.verdict}">{check.verdict}</span><span>{html.escape(check.name)}'
        f'<span class="says">{html.escape(check.says)}</span></span></li>'
        for check in checks
    ]
    return f'<ul class="checks">{"".join(lines_)}</ul>'


def _divergences(found: Sequence[Divergence]) -> Iterator[str]:
    if not found:
        return
    yield "<h2>Where texts part</h2>"
    heads = ("way", "choice", "prompt", "token", "expected", "found", "margin", "explained up to", "rounding")
    rows = [
        (
            one.way,
            one.choice,
            one.prompt,
            str(one.position + 1),
            f"{one.expected_text!r} ({one.expected})",
            f"{one.found_text!r} ({one.found})",
            "" if one.margin is None else f"{one.margin:.3g}",
            f"{one.tolerance:.3g}",
            "yes" if one.explained else "no",
        )
        for one in found
    ]
    yield _table(heads, rows, [not one.explained for one in found])
    yield (
        '<p class="note">The first token of each text that is not the expected one. Margin: how much higher the '
        "expected token's logit is; for drawn tokens, how far the draw is from the edge of that token's share.</p>"
    )


def _drift(found: Findings, limit: float | None) -> Iterator[str]:
    if found.drift is None:
        return
    drift, rows = found.drift, found.drift.boundaries
    marks = found.subject.draft_boundaries
    yield "<h2>Drift by boundary</h2>"
    yield lines({"median": [r.drift for r in rows], "worst token": [r.worst for r in rows]}, "boundary", marks, limit)
    marked = " Shaded: the boundaries that the draft head reads." if marks else ""
    dashed = " Dashed: what rounding explains." if limit is not None else ""
    yield (
        f"<p class=\"note\">How far the engines' states are from the checkpoint's, over these, on {drift.tokens} "
        f"tokens; boundary k lies after k layers.{marked}{dashed} Logits differ by {drift.logits:.2g} of the largest; "
        f"both prefer the same token at {drift.top1:.1%} of the positions.</p>"
    )
    yield "<h2>What each layer does differently</h2>"
    yield lines({"attention": [r.attention for r in rows], "MLP": [r.mlp for r in rows]}, "boundary after the layer")
    yield (
        '<p class="note">Both sides given the same state: the difference in what each half of a layer adds, over '
        "what it adds; medians over tokens. A layer that stands out is where a fault is.</p>"
    )


def _draft(found: Findings) -> Iterator[str]:
    draft = found.draft
    if draft is None:
        return
    yield "<h2>How the draft head drafts</h2>"
    yield bars({"torch": draft.acceptance_torch, "engines": draft.acceptance_engines}, "drafted token")
    yield (
        f"<p>tau is <strong>{draft.tau_engines:.3f}</strong> in the engines and {draft.tau_torch:.3f} in torch: tokens "
        f"a pass of the model, the one it adds itself included, on {draft.tokens} tokens of {draft.texts} fixed texts."
        "</p>"
        '<p class="note">Bars: share of all passes in which the first, second, ... drafted token was right.</p>'
    )


def _facts(found: Findings) -> str:
    subject = found.subject
    facts = {
        "Bundle": f"{subject.bundle}, made from {subject.model} ({subject.family}), {subject.layers} layers in "
        f"{subject.stages} stages, {subject.precision}, head {subject.head_precision}",
        "Compared with": " and ".join(part for part in (subject.checkpoint, subject.draft) if part) or "itself only",
        "Texts": f"{found.new_tokens} new tokens after each prompt, greedy and drawn",
        "Run": f"{found.created}, {found.seconds:.0f} s",
        "Versions": ", ".join(f"{package} {number}" for package, number in found.versions.items()),
        "Command": found.command,
    }
    listed = [f"<li><strong>{name}:</strong> {html.escape(text)}</li>" for name, text in facts.items()]
    prompts = [
        f"<li>{html.escape(prompt.name)}, {prompt.tokens} tokens: {html.escape(prompt.begins)}</li>"
        for prompt in found.prompts
    ]
    return f"<ul>{''.join(listed)}</ul><h3>Prompts</h3><ul>{''.join(prompts)}</ul>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[bool]) -> str:
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "".join(
        f"<tr{' class=bad' if mark else ''}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row, mark in zip(rows, bad, strict=True)
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
