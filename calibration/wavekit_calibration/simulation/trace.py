"""Exit traces: what every early exit would have said at each token of some texts, as a file and in memory.

A trace holds one record a token, in the order of the text. Record i was taken where token ``final[i]`` was about to be
written: the ids that the exit at each recorded boundary ranks best there, and ``final[i]`` itself, the token that was
written. Sequences follow one another. Early exits are recorded at boundaries between 1 and N - 1 (numbering as
everywhere: k is the output of layer k - 1); the last boundary's word is ``final``.

The file is one npz: ``header`` (JSON as bytes, versioned), ``candidates`` int32 [n, B, k], ``final`` int32 [n],
``starts`` int64 [S] and, where drafts were recorded, ``draft`` int32 [n, L]. k ranks serve decoders in which an exit
passes over tokens proposed already (DECS): K stages need K - 1 of them, one is enough without. -1 stands for nothing:
an exit that keeps silent, the end of a shorter draft. Whoever knows candidates can write a trace: training of exits,
a run, an experiment. Knows arrays and files, no models.
"""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from wavekit_calibration.errors import TraceError
from wavekit_calibration.readiness import earliest_depths
from wavekit_calibration.result import MATRICES_NAME
from wavekit_engines.atomic import write_file

SCHEMA_VERSION = 1
KIND = "wavekit exit trace"
TRACE_NAME = "trace.npz"


@dataclass(frozen=True)
class TraceHeader:
    """What a trace was recorded from."""

    num_layers: int
    boundaries: tuple[int, ...]
    """Where exits were recorded, shallow to deep."""
    model: str = ""
    checkpoint_digest: str = ""
    origin: str = ""
    """One line: what made the trace, with which exits, on which text."""
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class ExitTrace:
    """Records of n tokens in S sequences, checked against one another when made."""

    header: TraceHeader
    candidates: NDArray[np.int32]
    """[n, B, k]: ids by boundary, best first; -1 for nothing."""
    final: NDArray[np.int32]
    """[n]: the token that was written."""
    starts: NDArray[np.int64]
    """[S]: the first record of each sequence, rising from 0."""
    draft: NDArray[np.int32] | None = None
    """[n, L]: what a draft head proposes from record i on, for ``final[i]``, ``final[i + 1]``, ...; -1 after it."""
    notes: tuple[str, ...] = field(default=())
    """What a reader of results should know about the trace."""

    def __post_init__(self) -> None:
        """Raises TraceError where the arrays do not fit together."""
        problem = _first_contradiction(self)
        if problem:
            raise TraceError(f"the trace is damaged: {problem}; record it again")

    def __len__(self) -> int:
        return len(self.final)

    @property
    def num_layers(self) -> int:
        """N."""
        return self.header.num_layers

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """[n]: whether a record opens a sequence."""
        first = np.zeros(len(self), dtype=bool)
        first[self.starts] = True
        return first

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """[n]: whether a record ends a sequence."""
        return np.roll(self.is_first, -1)

    @property
    def decoded_tokens(self) -> int:
        """Tokens that take decoding: all but each sequence's first, which comes with the prompt's prefill."""
        return len(self) - len(self.starts)

    def at(self, boundary: int) -> NDArray[np.int32]:
        """[n, k]: what the exit at a boundary ranks best.

        Raises:
            TraceError: no exit was recorded there.
        """
        if boundary not in self.header.boundaries:
            known = ", ".join(map(str, self.header.boundaries)) or "none"
            raise TraceError(
                f"no exit was recorded at boundary {boundary}, only at {known} (and the end, {self.num_layers})"
            )
        found: NDArray[np.int32] = self.candidates[:, self.header.boundaries.index(boundary)]
        return found

    def right(self, boundary: int) -> NDArray[np.bool_]:
        """[n]: whether the exit at a boundary gives the final token."""
        found: NDArray[np.bool_] = self.at(boundary)[:, 0] == self.final
        return found

    def earliest_depths(self) -> NDArray[np.int64]:
        """[n]: the EAD of each token among the recorded boundaries and N, so never below 1."""
        found: NDArray[np.int64] = self._depths[earliest_depths(self._agrees)]
        return found

    def first_depths(self) -> NDArray[np.int64]:
        """[n]: the first recorded boundary whose exit is right, or N."""
        found: NDArray[np.int64] = self._depths[np.argmax(self._agrees, axis=1)]
        return found

    @property
    def _agrees(self) -> NDArray[np.bool_]:
        early: NDArray[np.bool_] = self.candidates[:, :, 0] == self.final[:, None]
        return np.concatenate([early, np.ones((len(self), 1), dtype=bool)], axis=1)

    @property
    def _depths(self) -> NDArray[np.int64]:
        return np.array([*self.header.boundaries, self.num_layers])

    def save(self, file: Path) -> None:
        """Write the trace under a temporary name, then rename it."""
        arrays: dict[str, Any] = {"candidates": self.candidates, "final": self.final, "starts": self.starts}
        if self.draft is not None:
            arrays["draft"] = self.draft
        stream = io.BytesIO()
        header = np.frombuffer(msgspec.json.encode(self.header), dtype=np.uint8)
        np.savez_compressed(stream, header=header, **arrays)
        write_file(file, stream.getvalue())


def load_trace(path: Path) -> ExitTrace:
    """Read a trace file, by its name or its folder's, or make a trace of the agreement in a calibration's folder.

    Raises:
        TraceError: missing, damaged, or of a newer schema.
    """
    if path.is_dir() and (path / TRACE_NAME).is_file():
        path = path / TRACE_NAME
    if path.is_dir():
        return _load_calibration(path)
    if not path.is_file():
        raise TraceError(f"{path} does not exist; give a trace file or the folder of wavekit calibrate")
    arrays = _read_arrays(path)
    if "header" not in arrays:
        raise TraceError(f"{path} is no exit trace: it has no header")
    try:
        raw = msgspec.json.decode(arrays["header"].tobytes())
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise TraceError(f"{path} has schema {version} and this wavekit reads {SCHEMA_VERSION}; record it again")
        header = msgspec.convert(raw, TraceHeader)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path} is damaged: {error}; record it again") from None
    if missing := {"candidates", "final", "starts"} - set(arrays):
        raise TraceError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}; record it again")
    try:
        return ExitTrace(header, arrays["candidates"], arrays["final"], arrays["starts"], arrays.get("draft"))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def trace_of_agreement(agrees: NDArray[np.bool_], model: str = "") -> ExitTrace:
    """Make a trace of an agreement matrix [T, N + 1], see `readiness`.

    The matrix knows which exits were right and not what the others said, so all wrong candidates count as different,
    which makes for the most nodes; and one rank only, so DECS cannot help. Its tokens were sampled here and there:
    they are taken as one sequence, which changes no ticks of exits, as those depend on each token alone.
    """
    layers = agrees.shape[1] - 1
    boundaries = tuple(range(1, layers))
    wrong = np.arange(1, layers, dtype=np.int32)
    candidates = np.where(agrees[:, 1:layers], np.int32(0), wrong)[:, :, None].astype(np.int32)
    header = TraceHeader(layers, boundaries, model, origin="agreement of the logit lens, from a calibration")
    notes = ("from a calibration: logit lens, wrong candidates all counted as different, no second ranks for DECS",)
    final = np.zeros(len(agrees), dtype=np.int32)
    return ExitTrace(header, candidates, final, np.zeros(1, dtype=np.int64), notes=notes)


def _load_calibration(folder: Path) -> ExitTrace:
    file = folder / MATRICES_NAME
    if not file.is_file():
        raise TraceError(
            f"{folder} holds neither {TRACE_NAME} nor {MATRICES_NAME}; give a trace or the folder of wavekit calibrate"
        )
    agrees = _read_arrays(file).get("agrees")
    if agrees is None or agrees.dtype != bool or agrees.ndim != 2 or not len(agrees) or agrees.shape[1] < 2:
        raise TraceError(f"{file} holds no agreement by depth; calibrate again")
    return trace_of_agreement(agrees)


def _read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    try:
        content = np.load(file, allow_pickle=False)
        if isinstance(content, np.lib.npyio.NpzFile):
            with content:
                return {name: content[name] for name in content.files}
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception:  # whatever broken archives make their readers stumble over; some advise to trust the file
        raise TraceError(f"{file} is no exit trace, or a damaged one; record it again") from None
    raise TraceError(f"{file} is no exit trace, but a single array")


def _first_contradiction(trace: ExitTrace) -> str | None:
    header, shape, n = trace.header, trace.candidates.shape, len(trace.final)
    boundaries = list(header.boundaries)
    if header.kind != KIND:
        return f"its kind is {header.kind!r}"
    if boundaries != sorted(set(boundaries)) or not all(0 < b < header.num_layers for b in boundaries):
        return f"{boundaries} are no boundaries inside a model of {header.num_layers} layers, shallow to deep"
    for name in ("candidates", "final", "draft"):
        array = getattr(trace, name)
        if array is not None and (array.dtype != np.int32 or array.ndim != {"candidates": 3, "final": 1}.get(name, 2)):
            return f"{name} is {array.dtype} {list(array.shape)}"
    if trace.starts.dtype != np.int64 or trace.starts.ndim != 1:
        return f"starts is {trace.starts.dtype} {list(trace.starts.shape)}"
    if n == 0 or shape[:2] != (n, len(boundaries)) or shape[2] == 0:
        return f"candidates {list(shape)} for {n} tokens and {len(boundaries)} boundaries"
    starts = trace.starts
    if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= n:
        return f"the sequences do not start at rising records from 0 to below {n}"
    if trace.draft is not None and len(trace.draft) != n:
        return f"drafts for {len(trace.draft)} of {n} tokens"
    if (trace.final < 0).any():
        return "a final token is negative"
    return None
