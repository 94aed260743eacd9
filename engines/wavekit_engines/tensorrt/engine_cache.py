"""The folder of engines that were built: each under a name that says everything it was made from.

An entry is two files, ``NAME.engine`` and ``NAME.json``, which describes it and appears last. The name ends with a hash
of the graph and its weights, the profiles, the precision, the library and its version and the compute capabilities: so
what is there under the name that is wanted needs no building, and an entry that is damaged is as good as none.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wavekit_engines.bundle import TensorInfo, sha256
from wavekit_engines.tensorrt.build_log import EngineFacts
from wavekit_engines.tensorrt.profiles import Shapes

FOLDER = "tensorrt"
"""The folder's name in a bundle."""


@dataclass(frozen=True)
class EngineInfo:
    """An engine in the cache; ``part`` is the graph of the bundle that it runs: stage_0, head, draft..."""

    part: str
    key: str
    library: str
    version: str
    precision: str
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


def entry_key(made_from: dict[str, Any]) -> str:
    """A hash of everything that an engine is made from."""
    return hashlib.sha256(msgspec.json.encode(made_from, order="sorted")).hexdigest()[:16]


def entry_name(part: str, key: str) -> str:
    """The stem of an entry's files."""
    return f"{part}-{key}"


def read_entry(folder: Path, name: str) -> EngineInfo | None:
    """An entry whose engine is whole; None where there is none."""
    try:
        info = msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=EngineInfo)
        engine = folder / f"{name}.engine"
        whole = engine.stat().st_size == info.bytes and sha256(engine) == info.sha256
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return info if whole and info.name == name else None


def entries(folder: Path) -> list[EngineInfo]:
    """All whole entries, by name."""
    found = (read_entry(folder, file.stem) for file in sorted(folder.glob("*.json")))
    return [info for info in found if info is not None]
