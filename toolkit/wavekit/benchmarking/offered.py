"""The ways that a bundle offers to compare: modes as much as pays, each opened as suits it, and its profile's setting.

Modes are those that `wavekit verify` checks, see `verification.ways`.
"""

from collections.abc import Sequence

from wavekit.benchmarking.runs import Way
from wavekit.decoding.decoder import Decoder
from wavekit.decoding.speculation import Mode, Speculation
from wavekit.profiles import Profile, Setting, speculation_keeps_texts
from wavekit.verification.ways import ways_of
from wavekit_engines.errors import MisuseError

PLAIN, TUNED, ALL = "plain", "tuned", "all"
_USUAL = (PLAIN, "draft", "lookup", "draft+lookup", "exits", "draft+exits", TUNED)


def modes_of(decoder: Decoder) -> list[Mode]:
    """Modes that propose something and that the bundle has what they need for."""
    return [way.speculation.mode for way in ways_of(decoder) if way.speculation == Speculation(way.speculation.mode)]


def ways_to_compare(
    decoder: Decoder, asked: Sequence[str], threads: int, lanes: int, profile: Profile | None
) -> tuple[list[Way], list[str]]:
    """The ways, plain decoding first, and a line for each that was left out.

    Args:
        decoder: of the bundle.
        asked: names of modes, "plain", "tuned" or "all"; none: the usual ones that are there and keep texts.
        threads: of a way with one lane; otherwise the lanes share them.
        lanes: where exits propose.
        profile: the bundle's of this machine.

    Raises:
        MisuseError: a way that the bundle does not offer.
    """
    there = {PLAIN: Setting(threads, 1, Speculation("off"))}
    for mode in modes_of(decoder):
        several = min(lanes, len(decoder.manifest.stages)) if "exits" in mode else 1
        there[mode] = Setting(max(1, threads // several), several, Speculation(mode))
    if profile is not None:
        there[TUNED] = profile.setting
    if not asked:
        return _usual(there, decoder)
    names = [*there] if ALL in asked else [PLAIN, *(name for name in dict.fromkeys(asked) if name != PLAIN)]
    if unknown := [name for name in names if name not in there]:
        advice = "; `wavekit tune` makes a profile of this machine" if unknown[0] == TUNED else ""
        raise MisuseError(f"this bundle does not offer {unknown[0]}: it has {', '.join(there)}{advice}")
    return [Way(name, there[name]) for name in names], []


def _usual(there: dict[str, Setting], decoder: Decoder) -> tuple[list[Way], list[str]]:
    names = [name for name in _USUAL if name in there]
    if speculation_keeps_texts(decoder.manifest):
        return [Way(name, there[name]) for name in names], []
    kept = [name for name in names if there[name].speculation.mode == "off"]
    precision = decoder.manifest.engine.precision
    return [Way(name, there[name]) for name in kept], [
        f"{name} is left out: an {precision} bundle without a draft head may write other tokens with it; "
        f"--modes {name} measures it all the same"
        for name in names
        if name not in kept
    ]
