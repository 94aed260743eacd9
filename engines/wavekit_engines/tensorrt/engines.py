"""The engines of a bundle: what there is to build, and a process of its own for each that the cache does not have.

Weights come from the bundle itself, whose graphs are rewritten in standard ONNX (`graphs.standard_graph`): fp32 and
fp16 weights change their format, int8 and int4 blocks stay the integers they are. So no checkpoint is needed, and an
engine decodes with the numbers that the bundle's other engines decode with.

Every engine takes its place once it is complete, so building goes on where it was interrupted. This module does not
import TensorRT (`library` does, in the builder's process), and nothing here runs an engine.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wavekit_engines.atomic import atomic_update
from wavekit_engines.bundle import GRAPHS, Bundle, GraphInfo, sha256
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.graphs.graph_info import describe_graph
from wavekit_engines.graphs.standard_graph import REVISION, write_standard_graph
from wavekit_engines.graphs.stored_table import stored_tensors
from wavekit_engines.tensorrt.build_log import read_build_log
from wavekit_engines.tensorrt.cuda import capability_here
from wavekit_engines.tensorrt.engine_cache import (
    FOLDER,
    PRECISIONS,
    EngineInfo,
    EnginePrecision,
    entry_key,
    entry_name,
    parts,
    read_entry,
)
from wavekit_engines.tensorrt.library import PORTABLE, Job, installed
from wavekit_engines.tensorrt.profiles import Limits, profiles, shapes

Progress = Callable[[str, int, int], None]
"""Called with what is being done, engines done and engines in all."""

_BASE_BYTES = 600_000_000  # a builder of a small graph: most of it the library itself
_BYTES_A_WEIGHT_BYTE = 4.5  # measured: 2.2 GB for 0.4 GB of bf16 weights
_BF16_SINCE = (8, 0)


@dataclass(frozen=True)
class BuildOptions:
    """What to build engines for. ``memory_limit`` is in bytes; None: what is free."""

    limits: Limits
    precision: EnginePrecision = "fp16"
    compute_capabilities: tuple[str, ...] = ()
    memory_limit: int | None = None

    def check(self, max_positions: int) -> None:
        """Raises MisuseError for what no engine can be built for."""
        self.limits.check(max_positions)
        for text in self.compute_capabilities:
            major, _, minor = text.partition(".")
            if not (major.isdigit() and minor.isdigit()):
                raise MisuseError(f"--compute-capability {text}: write it as NVIDIA does, 8.6 or 12.0")
            if self.precision == "bf16" and (int(major), int(minor)) < _BF16_SINCE:
                raise MisuseError(f"a GPU of compute capability {text} has no bf16: build with --precision fp16")


@dataclass(frozen=True)
class Built:
    """An engine, and whether the cache had it."""

    info: EngineInfo
    cached: bool


def build_engines(
    bundle: Bundle,
    options: BuildOptions,
    folder: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[Built]:
    """Build every engine of a bundle that is not there yet.

    Args:
        bundle: an opened bundle.
        options: what to build for.
        folder: the cache; by default in the bundle.
        progress: told of every step.

    Raises:
        MisuseError: no library, or options it does not have; another process builds into the folder.
        WavekitError: the library refuses a graph, the builder died, memory or disk do not suffice.
    """
    options.check(bundle.manifest.decoder.max_positions)
    plans = [_plan(bundle, part, graph, options) for part, graph in parts(bundle.manifest).items()]
    folder = folder or bundle.path / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MisuseError(f"cannot write to {folder}: {error.strerror}") from None
    built = []
    for number, plan in enumerate(plans):
        progress(plan.part, number, len(plans))
        info = read_entry(folder, entry_name(plan.part, plan.key))
        cached = info is not None
        if info is None:

            def told(step: str, plan: _Plan = plan, number: int = number) -> None:
                progress(f"{plan.part}, {step}", number, len(plans))

            info = _build(bundle, plan, folder, told)
        built.append(Built(info, cached))
    return built


@dataclass(frozen=True)
class _Plan:
    part: str
    graph: GraphInfo
    options: BuildOptions
    files: dict[str, str]
    library: str
    version: str
    compute_capabilities: list[str]
    capacity: int
    profiles: list[Any]
    key: str

    @property
    def name(self) -> str:
        return entry_name(self.part, self.key)


def _plan(bundle: Bundle, part: str, graph: GraphInfo, options: BuildOptions) -> _Plan:
    library, version = installed()
    limits, capacity = options.limits, options.limits.capacity(graph)
    ranges = shapes(graph, profiles(graph, limits), capacity)
    weights = {f"{GRAPHS}/{tensor.location}" for tensor in stored_tensors(bundle.path / graph.file).values()}
    files = {file: bundle.manifest.files[file].sha256 for file in (graph.file, *sorted(map(str, weights)))}
    here = None if library == PORTABLE else capability_here()
    wanted = sorted(options.compute_capabilities, key=lambda text: [int(part) for part in text.split(".")])
    capabilities = wanted or ([here] if here is not None else [])
    made_from = {
        "revision": REVISION,
        "files": files,
        "precision": options.precision,
        "limits": limits,
        "capacity": capacity,
        "profiles": ranges,
        "compute_capabilities": capabilities,
        "library": [library, version],
    }
    key = entry_key(made_from)
    return _Plan(part, graph, options, files, library, version, capabilities, capacity, ranges, key)


def _build(bundle: Bundle, plan: _Plan, folder: Path, told: Callable[[str], None]) -> EngineInfo:
    start, options = time.monotonic(), plan.options
    with atomic_update(folder, f"{plan.name}.json", 2 * plan.graph.weight_bytes) as partial:
        engine = partial / f"{plan.name}.engine"
        with _scratch(folder) as scratch:
            graph, log = scratch / f"{plan.part}.onnx", scratch / "log"
            told("its graph")
            write_standard_graph(bundle.path / plan.graph.file, graph, PRECISIONS[options.precision], plan.capacity)
            _check_memory(plan, graph.with_suffix(".weights").stat().st_size)
            job = Job(
                graph=str(graph),
                engine=str(engine),
                profiles=plan.profiles,
                compute_capabilities=list(options.compute_capabilities),
                decomposable_attention=options.precision == "fp32",
            )
            run_builder(plan.library, job, log, plan.part, told)
            described = describe_graph(graph, plan.graph.parameters)
            facts = read_build_log(log.read_text(encoding="utf-8"))
        info = EngineInfo(
            part=plan.part,
            key=plan.key,
            files=plan.files,
            library=plan.library,
            version=plan.version,
            precision=options.precision,
            limits=options.limits,
            capacity=plan.capacity,
            compute_capabilities=plan.compute_capabilities,
            profiles=plan.profiles,
            inputs=described.inputs,
            outputs=described.outputs,
            facts=facts,
            bytes=engine.stat().st_size,
            sha256=sha256(engine),
            seconds=round(time.monotonic() - start, 2),
        )
        (partial / f"{plan.name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
    return info


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder for the rewritten graph beside the cache; what killed processes left goes first."""
    for leftover in folder.glob(".graph-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=".graph-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _check_memory(plan: _Plan, weight_bytes: int) -> None:
    needed = int(_BASE_BYTES + _BYTES_A_WEIGHT_BYTE * weight_bytes)
    limit = plan.options.memory_limit if plan.options.memory_limit is not None else _free_memory()
    if limit is not None and needed > limit:
        raise WavekitError(
            f"building {plan.part} takes about {needed / 1e9:.1f} GB of memory, {limit / 1e9:.1f} GB may be used: "
            "make room, raise --memory-limit, or export with more stages"
        )


def _free_memory() -> int | None:
    """Bytes that programs can have, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def run_builder(library: str, job: Job, log: Path, part: str, told: Callable[[str], None]) -> None:
    """Build one engine in a process of its own, which ends when this is interrupted.

    Raises:
        WavekitError: it failed or died; the message says which ``part`` and why.
        OSError: the disk failed it.
    """
    errors = log.with_suffix(".errors")
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "wavekit_engines.tensorrt.worker", library, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for this process, which ends the other
        )
        try:
            last = _follow(process, job, told)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    _raise_failure(last, code, part, errors)


def _follow(process: "subprocess.Popen[bytes]", job: Job, told: Callable[[str], None]) -> dict[str, Any]:
    """Hand the job over and pass on what is said, until the process ends; its last words."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
    except BrokenPipeError:
        return {}
    last: dict[str, Any] = {}
    for last in _messages(process.stdout):
        if "phase" in last:
            told(f"{last['phase']} {last['done']} of {last['total']}")
    return last


def _messages(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            message = msgspec.json.decode(line)
        except msgspec.MsgspecError:  # a library that writes to standard output
            continue
        if isinstance(message, dict):
            yield message


def _raise_failure(last: dict[str, Any], code: int, part: str, errors: Path) -> None:
    if code == 0 and last.get("done") is True:
        return
    if last.get("errno"):
        raise OSError(last["errno"], os.strerror(last["errno"]))
    if "error" in last:
        kind = MisuseError if last.get("exit_code") == MisuseError.exit_code else WavekitError
        raise kind(f"{part}: {last['error']}")
    if code < 0:
        name = signal.Signals(-code).name
        reason = "; it may have run out of memory: close other programs or export with more stages"
        raise WavekitError(f"the builder of {part} was ended by {name}{reason if code == -signal.SIGKILL else ''}")
    said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise WavekitError(f"the builder of {part} ended without an engine: {said[-1] if said else f'exit code {code}'}")
