"""The folder of engines that were built: each under a name that says everything it was made from.

An entry is two files, ``NAME.engine`` and ``NAME.json``, which describes it and appears last. The name ends with a hash
of the graph and its weights, the profiles, the precision, the library and its version and the compute capabilities: so
what is there under the name that is wanted needs no building, and an entry that is damaged is as good as none.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from wavekit_engines.bundle import GraphInfo, Manifest, TensorInfo, sha256
from wavekit_engines.tensorrt.build_log import EngineFacts
from wavekit_engines.tensorrt.profiles import Limits, Shapes

FOLDER = "tensorrt"
"""The folder's name in a bundle."""

EnginePrecision = Literal["fp16", "bf16", "fp32"]
PRECISIONS: Mapping[EnginePrecision, str] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class EngineInfo:
    """An engine in the cache; ``part`` is the graph of the bundle that it runs: stage_0, head, draft...

    ``files`` are those of the bundle that it was made from, with their hashes; ``capacity`` is the rows of its cache.
    No compute capabilities: for any that the library knows, or for a GPU that was not asked.
    """

    part: str
    key: str
    files: dict[str, str]
    library: str
    version: str
    precision: EnginePrecision
    limits: Limits
    capacity: int
    compute_capabilities: list[str]
    profiles: list[Shapes]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    facts: EngineFacts
    bytes: int
    sha256: str
    seconds: float

    @property
    def name(self) -> str:
        """The stem of its files."""
        return entry_name(self.part, self.key)


def parts(manifest: Manifest) -> dict[str, GraphInfo]:
    """The graphs that become engines, by name; the greedy head is a shortcut for CPUs."""
    graphs = [stage.graph for stage in manifest.stages] + [manifest.head]
    graphs += [manifest.draft.graph] if manifest.draft is not None else []
    graphs += manifest.exits.graphs if manifest.exits is not None else ()
    return {part_of(graph): graph for graph in graphs}


def part_of(graph: GraphInfo) -> str:
    """What the engine of a graph is called."""
    return Path(graph.file).stem


def entry_key(made_from: dict[str, Any]) -> str:
    """A hash of everything that an engine is made from."""
    return hashlib.sha256(msgspec.json.encode(made_from, order="sorted")).hexdigest()[:16]


def entry_name(part: str, key: str) -> str:
    """The stem of an entry's files."""
    return f"{part}-{key}"


def read_entry(folder: Path, name: str) -> EngineInfo | None:
    """An entry whose engine is whole; None where there is none."""
    info, engine = _described(folder / f"{name}.json"), folder / f"{name}.engine"
    try:
        whole = info is not None and engine.stat().st_size == info.bytes and sha256(engine) == info.sha256
    except OSError:
        return None
    return info if whole else None


def entries(folder: Path) -> list[EngineInfo]:
    """All whole entries, by name."""
    found = (read_entry(folder, file.stem) for file in sorted(folder.glob("*.json")))
    return [info for info in found if info is not None]


def descriptions(folder: Path) -> list[EngineInfo]:
    """What the entries say that they are, the newest first; their engines are not looked at."""
    found = []
    for file in folder.glob("*.json"):
        info = _described(file)
        if info is not None:
            found.append((file.stat().st_mtime_ns, info))
    return [info for _, info in sorted(found, key=lambda entry: (-entry[0], entry[1].name))]


def _described(file: Path) -> EngineInfo | None:
    try:
        info = msgspec.json.decode(file.read_bytes(), type=EngineInfo)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return info if info.name == file.stem else None
