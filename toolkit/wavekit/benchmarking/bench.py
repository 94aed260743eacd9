"""One benchmark from beginning to end: open, warm up, alternate, sum up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path

from wavekit.benchmarking.memory import peak_memory
from wavekit.benchmarking.offered import PLAIN, ways_to_compare
from wavekit.benchmarking.openings import Openings, Place
from wavekit.benchmarking.peers import PeerMissingError, PeerProcess
from wavekit.benchmarking.prompt_sets import PromptSet, prompt_sets
from wavekit.benchmarking.quiet import loads
from wavekit.benchmarking.report import BenchReport, Subject, WayReport
from wavekit.benchmarking.runs import Run, Way, Written, alternated, write
from wavekit.benchmarking.summary import differences, summarize
from wavekit.llm import LLM
from wavekit.machine import this_machine
from wavekit.profiles import Setting, holds_for, profile_for
from wavekit.verification.prompts import Sample
from wavekit_engines.bundle import open_bundle

Told = Callable[[str, int, int], None]
"""Told what is being done, units done and units in all."""

_Writer = Callable[[Sample, int], Written]
_WARM_UP = 16


@dataclass(frozen=True)
class Plan:
    """What to measure: modes (none: the usual ones), prompt sets (none: the shipped one), and how often."""

    bundle: Path
    modes: Sequence[str]
    prompts: Sequence[str]
    count: int
    new_tokens: int
    rounds: int
    threads: int
    lanes: int
    place: Place


def bench(plan: Plan, against: Sequence[PeerProcess], command: str, told: Told) -> BenchReport:
    """Measure everything of a plan, beside peers that are not started yet; those that are missing are left out.

    Raises:
        MisuseError, BundleError, PromptError: as `wavekit.load`, `prompt_sets`, `ways_to_compare` and `PeerProcess`.
    """
    openings = Openings(plan.bundle, plan.place)
    try:
        told("opening", 0, 1)
        llm = openings.get(Setting(plan.threads))
        sets = prompt_sets(llm, plan.prompts, plan.count, plan.new_tokens)
        tuned = holds_for(plan.place.engine, plan.place.device)
        profile = profile_for(open_bundle(plan.bundle, check_hashes=False)) if tuned else None
        ways, left_out = ways_to_compare(llm.decoder, plan.modes, plan.threads, plan.lanes, profile)
        writers: dict[str, _Writer] = {way.name: partial(_write, openings, way) for way in ways}
        versions = {name: version(name) for name in ("wavekit", "numpy")}
        for peer in against:
            told(f"opening {peer.name}", 0, 1)
            try:
                peer.start()
            except PeerMissingError as error:
                left_out.append(str(error))
                continue
            versions |= peer.versions
            writers[peer.name] = partial(_write_by_peer, peer)
        before = loads()
        runs = _measure(writers, sets, plan, told)
        after = loads()
        return BenchReport(
            _subject(llm, plan),
            this_machine(),
            (before, after),
            versions,
            command,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            plan.new_tokens,
            plan.rounds,
            {one.name: len(one.samples) for one in sets},
            tuple(_rows(ways, [*writers], sets, runs, plan, told)),
            tuple(left_out),
            tuple(runs),
        )
    finally:
        for peer in against:
            peer.stop()
        openings.close()


def _write(openings: Openings, way: Way, sample: Sample, new_tokens: int) -> Written:
    return write(openings.get(way.setting), way.setting, sample, new_tokens)


def _write_by_peer(peer: PeerProcess, sample: Sample, new_tokens: int) -> Written:
    return peer.write(sample.ids, new_tokens)


def _measure(writers: dict[str, _Writer], sets: Sequence[PromptSet], plan: Plan, told: Told) -> list[Run]:
    """Warm everybody up, which also measures what passes cost, then alternate."""
    prompts = [(one.name, sample) for one in sets for sample in one.samples]
    for number, (name, writer) in enumerate(writers.items()):
        told(f"warming up {name}", number, len(writers))
        writer(prompts[0][1], min(plan.new_tokens, _WARM_UP))
    runs, total = list[Run](), len(prompts) * len(writers) * plan.rounds
    for turn, (of, sample), name in alternated(prompts, [*writers], plan.rounds):
        told("measuring", len(runs), total)
        written = writers[name](sample, plan.new_tokens)
        runs.append(Run(name, of, sample.name, len(sample.ids), turn, written))
    return runs


def _rows(
    ways: Sequence[Way], names: Sequence[str], sets: Sequence[PromptSet], runs: Sequence[Run], plan: Plan, told: Told
) -> list[WayReport]:
    settings, by_way = {way.name: way.setting for way in ways}, {name: list[Run]() for name in names}
    for run in runs:
        by_way[run.way].append(run)
    longest = max((sample for one in sets for sample in one.samples), key=lambda sample: len(sample.ids))
    rows, plain = [], by_way[PLAIN]
    for number, (name, mine) in enumerate(by_way.items()):
        told("weighing memory", number, len(by_way))
        setting = settings.get(name)
        rows.append(
            WayReport(
                name,
                setting,
                summarize(mine, plain),
                {one.name: summarize([run for run in mine if run.set == one.name], plain) for one in sets},
                tuple(differences(mine, plain, complete=setting is not None)),
                sum(len(one.samples) for one in sets),
                _peak_memory(plan, setting, longest.ids),
            )
        )
    return rows


def _peak_memory(plan: Plan, setting: Setting | None, prompt: tuple[int, ...]) -> int | None:
    return peak_memory(plan.bundle, plan.place, setting, prompt, plan.new_tokens) if setting is not None else None


def _subject(llm: LLM, plan: Plan) -> Subject:
    manifest = llm.manifest
    return Subject(
        plan.bundle.resolve().name,
        manifest.provenance.checkpoint,
        manifest.engine.precision,
        manifest.engine.head_precision,
        len(manifest.stages),
        manifest.draft is not None,
        llm.decoder.exit_boundaries,
        plan.place.engine,
        plan.place.device,
    )
