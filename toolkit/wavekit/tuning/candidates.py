"""What `wavekit tune` tries: numbers of threads, modes on lanes, and limits around a setting that is good already."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from wavekit.benchmarking.offered import modes_of
from wavekit.decoding.decoder import Decoder
from wavekit.decoding.speculation import Speculation
from wavekit.profiles import Setting, speculation_keeps_texts

_FEW_CORES = 4
_DEPTHS, _TOKENS, _TOP_KS = (2, 4), (4, 8, 16), (1, 2)
_LEAST_PROBABILITIES, _NODES = (0.2, 0.5, 0.8), (8, 16)

OFF = Speculation("off")


def thread_settings(cores: int) -> list[Setting]:
    """Plain decoding with all cores, and with fewer: every number up to 4, halves of the cores beyond."""
    counts = {1, cores} if cores > _FEW_CORES else {*range(1, cores + 1)}
    half = cores // 2
    while cores > _FEW_CORES and half > 1:
        counts.add(half)
        half //= 2
    return [Setting(count, 1, OFF) for count in sorted(counts, reverse=True)]


def mode_settings(decoder: Decoder, cores: int, plain_threads: int) -> list[Setting]:
    """Every mode that the bundle offers, as much as pays; those with exits on 1, 2, 4, ... lanes.

    None where speculation may change a text, see `profiles.speculation_keeps_texts`.
    """
    if not speculation_keeps_texts(decoder.manifest):
        return []
    found = []
    most = min(cores, len(decoder.manifest.stages))
    lanes = [*dict.fromkeys([*(1 << power for power in range(most.bit_length())), most])]
    for mode in modes_of(decoder):
        openings = [(cores // count, count) for count in lanes] if "exits" in mode else [(cores, 1)]
        if (plain_threads, 1) not in openings:
            openings.append((plain_threads, 1))
        found += [Setting(threads, count, Speculation(mode)) for threads, count in openings]
    return found


def limits_around(decoder: Decoder, setting: Setting) -> list[Setting]:
    """The same setting with one limit changed."""
    speculation = setting.speculation
    if speculation.mode == "off":
        return []
    changes = [*_limits(decoder, speculation.mode)]
    found = [replace(setting, speculation=replace(speculation, **change)) for change in changes]
    return [other for other in dict.fromkeys(found) if other != setting]


def _limits(decoder: Decoder, mode: str) -> Iterator[dict[str, Any]]:
    draft, exits = decoder.manifest.draft, decoder.exit_boundaries
    if "draft" in mode and draft is not None:
        yield from ({"depth": depth} for depth in _DEPTHS)
        yield from ({"top_k": top_k} for top_k in _TOP_KS if top_k < draft.top_k)
    if "draft" in mode or "lookup" in mode:
        yield from ({"tokens": tokens} for tokens in _TOKENS)
    if "exits" in mode:
        yield from ({"exits": chosen} for chosen in _subsets(exits))
        yield from ({"least_probability": least} for least in _LEAST_PROBABILITIES)
        yield from ({"nodes": nodes} for nodes in _NODES)
        yield {"decs": False}


def _subsets(exits: Sequence[int]) -> list[tuple[int, ...]]:
    """Each alone, the deeper half and every second; all of them is where a search begins."""
    if len(exits) < 2:
        return []
    chosen = [(boundary,) for boundary in exits] + [tuple(exits[len(exits) // 2 :]), tuple(exits[1::2])]
    return [one for one in dict.fromkeys(chosen) if len(one) < len(exits)]


def described(setting: Setting) -> str:
    """A setting in a few words."""
    speculation, parts = setting.speculation, []
    usual = Speculation(speculation.mode)
    for name in ("depth", "top_k", "tokens", "least_probability", "nodes"):
        value = getattr(speculation, name)
        if value != getattr(usual, name):
            parts.append(f"{name.replace('_', ' ')} {value:g}")
    if speculation.exits is not None:
        parts.append(f"exits {','.join(map(str, speculation.exits))}")
    if not speculation.decs:
        parts.append("no decs")
    mode = "plain" if speculation.mode == "off" else speculation.mode
    threads = f"{setting.threads} {'thread' if setting.threads == 1 else 'threads'}"
    lanes = f"{setting.lanes} lanes x " if setting.lanes > 1 else ""
    return ", ".join([mode, *parts, f"{lanes}{threads}"])
