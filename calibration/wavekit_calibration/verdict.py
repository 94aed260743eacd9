"""One plain sentence on how much the choice of boundaries matters on this model and this text.

The chosen set was picked on the tokens it is judged by, so its lead is a little too good; that does not matter where it
is many standard errors, and is one more reason to distrust it where it is few.
"""

import math

from wavekit_calibration.choose import Choice
from wavekit_calibration.sets import SetRow

_CAUTION = (
    "Entropy is no acceptance rate: train drafts on both at equal data and several seeds before you count on a "
    "difference of a few percent."
)


def verdict(choice: Choice) -> str:
    """Say whether the chosen set beats the EAGLE-3 rule (or the last boundary but one) beyond chance."""
    chosen = next(r for r in choice.rows if r.boundaries == choice.boundaries)
    rule = _rule(choice)
    ours = _listed(chosen)
    if rule is None:
        return f"Boundaries {ours} were chosen; this model is too shallow for the rules in use. {_CAUTION}"
    label = _named(rule)
    if rule.boundaries == chosen.boundaries:
        return f"The choice is {label}'s own, boundaries {ours}: nothing is to be gained here."
    if rule.lead is None:
        return f"Boundaries {ours} were chosen; one sequence cannot tell whether they beat {label}. {_CAUTION}"
    lead = rule.lead
    interval = f"{_percent(lead.low)} to {_percent(lead.high)}"
    numbers = (
        f"{ours} hold {math.exp(chosen.score):.0f} effective directions and {label}, {_listed(rule)}, "
        f"{math.exp(rule.score):.0f} ({_percent(lead.difference)}; 95 % interval {interval})"
    )
    if lead.low <= 0.0 <= lead.high:
        return f"{label[0].upper()}{label[1:]} is within noise of the chosen set: boundaries {numbers}. {_CAUTION}"
    worth = "better" if lead.difference > 0 else "worse"
    return (
        f"The chosen set is {worth} than {label} beyond the noise of the sampled text: boundaries {numbers}. {_CAUTION}"
    )


def _rule(choice: Choice) -> SetRow | None:
    """Return the EAGLE-3 rule where sets have its size, else whichever rule has the chosen size, else any."""
    rules = [r for r in choice.rows if {"EAGLE-3 rule", "last but one"} & set(r.names)]
    rules.sort(key=lambda r: (len(r.boundaries) != len(choice.boundaries), "EAGLE-3 rule" not in r.names))
    return rules[0] if rules else None


def _named(row: SetRow) -> str:
    return "the EAGLE-3 rule" if "EAGLE-3 rule" in row.names else "the last boundary but one"


def _listed(row: SetRow) -> str:
    return ", ".join(map(str, row.boundaries))


def _percent(nats: float) -> str:
    """Difference of entropies as a change in effective directions."""
    return f"{100 * math.expm1(nats):+.1f} %"
