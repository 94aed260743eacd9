"""What a benchmark found, as it is kept in JSON. docs/bench.md explains every field."""

from dataclasses import dataclass

import msgspec

from wavekit.benchmarking.runs import Run
from wavekit.benchmarking.summary import Difference, Summary
from wavekit.machine import Machine
from wavekit.profiles import Setting

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class WayReport:
    """One row of the tables: a way of this bundle, or a peer, which has no ``setting``.

    ``peak_memory`` is in bytes, of a process of its own that loads the bundle and writes one text.
    """

    name: str
    setting: Setting | None
    summary: Summary
    sets: dict[str, Summary]
    differences: tuple[Difference, ...]
    texts: int
    peak_memory: int | None


@dataclass(frozen=True)
class Subject:
    """What was measured, in names that hold no folders."""

    bundle: str
    model: str
    precision: str
    head_precision: str
    stages: int
    draft: bool
    exits: tuple[int, ...]
    engine: str
    device: str | None


@dataclass(frozen=True)
class BenchReport:
    """Everything. ``loads``: the system's load averages before the first run and after the last."""

    subject: Subject
    machine: Machine
    loads: tuple[tuple[float, ...] | None, tuple[float, ...] | None]
    versions: dict[str, str]
    command: str
    created: str
    new_tokens: int
    rounds: int
    sets: dict[str, int]
    ways: tuple[WayReport, ...]
    left_out: tuple[str, ...]
    runs: tuple[Run, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> bool:
        """Whether a way of the bundle wrote another text than plain decoding."""
        return any(way.differences for way in self.ways if way.setting is not None)

    def encode(self) -> bytes:
        """Everything as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
