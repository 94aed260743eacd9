"""Which of the engines in a bundle run here; where none do, one line that says why, and the command that builds them.

Engines go together that were built by the same library for the same limits, precision and GPUs, one for every graph.
They must be of this bundle's files, whole, and made by the version that is installed: TensorRT promises nothing else.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from wavekit_engines.bundle import Bundle
from wavekit_engines.errors import BundleError, MisuseError
from wavekit_engines.tensorrt.engine_cache import FOLDER, EngineInfo, descriptions, parts, read_entry
from wavekit_engines.tensorrt.library import PORTABLE

Found = Mapping[str, EngineInfo]
"""Engines by the graph that they run."""


@dataclass(frozen=True)
class Here:
    """The library that is installed, and the GPU."""

    library: str
    version: str
    capability: str


def find_engines(bundle: Bundle, here: Here) -> Found:
    """The engines of a bundle that run here; of several sets, those for exactly this GPU, then the newest.

    Raises:
        MisuseError: there are none, or they were built for something else.
        BundleError: one is damaged.
    """
    sets = _sets(bundle)
    if not sets:
        raise MisuseError(f"{bundle.path} has no TensorRT engines; build them: {_command(bundle, None, here)}")
    judged = [(found, _obstacle(bundle, found, here)) for found in sets]
    fitting = [found for found, obstacle in judged if obstacle is None]
    if not fitting:
        nearest, obstacle = max(judged, key=lambda pair: pair[1].rank if pair[1] is not None else 0)
        assert obstacle is not None
        raise MisuseError(f"{obstacle.reason}; {rebuild(bundle, nearest, here)}")
    fitting.sort(key=lambda found: not _one(found).compute_capabilities)
    damaged = [_damaged(bundle, found) for found in fitting]
    if None not in damaged:
        raise BundleError(f"the TensorRT engine of {damaged[0]} is damaged; {rebuild(bundle, fitting[0], here)}")
    return fitting[damaged.index(None)]


def rebuild(bundle: Bundle, found: Found, here: Here) -> str:
    """What builds such engines for this machine."""
    return f"build again: {_command(bundle, _one(found), here)}"


@dataclass(frozen=True)
class _Obstacle:
    """Why engines do not run here; those that are nearest to running have the highest ``rank``."""

    rank: int
    reason: str


def _one(found: Found) -> EngineInfo:
    """Any of a set: they agree in what the set is for."""
    return next(iter(found.values()))


def _damaged(bundle: Bundle, found: Found) -> str | None:
    """The graph whose engine is not what it was when it was built."""
    return next((part for part, info in found.items() if read_entry(bundle.path / FOLDER, info.name) is None), None)


def _sets(bundle: Bundle) -> list[dict[str, EngineInfo]]:
    """What was built together, the newest first."""
    wanted = parts(bundle.manifest)
    sets: dict[object, dict[str, EngineInfo]] = {}
    for info in descriptions(bundle.path / FOLDER):
        if info.part in wanted:
            built = info.library, info.version, info.precision, info.limits, tuple(info.compute_capabilities)
            sets.setdefault(built, {}).setdefault(info.part, info)
    return list(sets.values())


def _obstacle(bundle: Bundle, found: Found, here: Here) -> _Obstacle | None:
    one = _one(found)
    if (one.library, one.version) != (here.library, here.version):
        return _Obstacle(
            1,
            f"the TensorRT engines were built by {one.library} {one.version}, "
            f"and here is {here.library} {here.version}",
        )
    if one.compute_capabilities and here.capability not in one.compute_capabilities:
        cards = ", ".join(one.compute_capabilities)
        return _Obstacle(
            2, f"the TensorRT engines are for compute capability {cards}, and this GPU has {here.capability}"
        )
    for part in parts(bundle.manifest):
        if part not in found:
            return _Obstacle(3, f"the TensorRT engine of {part} is missing or its description damaged")
        files = bundle.manifest.files
        if any(file not in files or files[file].sha256 != digest for file, digest in found[part].files.items()):
            return _Obstacle(4, f"the TensorRT engine of {part} was built from other weights")
    return None


def _command(bundle: Bundle, like: EngineInfo | None, here: Here) -> str:
    words = ["wavekit", "build", str(bundle.path)]
    if like is not None:
        words += ["--precision", like.precision]
        words += ["--max-context", str(like.limits.context), "--max-tree", str(like.limits.tree)]
    if here.library == PORTABLE and like is not None and like.compute_capabilities:
        words += ["--compute-capability", ",".join(sorted({*like.compute_capabilities, here.capability}))]
    return shlex.join(words)
