"""What a calibration has done so far, on disk, so that it can go on after an interruption.

    state/key.json        what the state belongs to: model, prompts, settings of the measurement
    state/answers.jsonl   one line a sequence whose answer is written
    state/measured.json   how many batches of the pass are in the arrays
    state/*.npy           memory-mapped arrays; every sampled position has its own slot

A batch is counted only after its slots are on disk, and a batch that was cut short is run again into the same slots,
so a resumed run ends with the same arrays as an uninterrupted one. The arrays being files also keeps them out of the
way of the model: the system writes their pages back when memory is short.

Knows arrays and token ids, no models.
"""

import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from wavekit_engines.atomic import write_file
from wavekit_engines.errors import MisuseError, WavekitError

Unfinished = Literal["refuse", "resume", "restart"]
"""What to do with an unfinished run that is found."""


@dataclass(frozen=True)
class MeasuredArrays:
    """Per sampled position, by slot; S positions, R of them for readiness, N layers of width D."""

    rows: NDArray[np.float32]
    """[S, N + 1, D]: the residual stream."""
    entropy: NDArray[np.float64]
    """[S]: next-token entropy in nats."""
    lens: NDArray[np.int64]
    """[R, N + 1]: the token each boundary gives through the final norm and head; the last is the model's own."""

    def flush(self) -> None:
        """Write dirty pages to disk."""
        for array in (self.rows, self.entropy, self.lens):
            if isinstance(array, np.memmap):
                array.flush()


class RunState:
    """The state folder of one run."""

    def __init__(self, folder: Path, key: dict[str, Any], unfinished: Unfinished = "refuse") -> None:
        """Open the folder.

        Args:
            folder: the state folder; it need not exist.
            key: what the run belongs to.
            unfinished: what to do with an unfinished run in the folder.

        Raises:
            MisuseError: there is one and ``unfinished`` says ``refuse``, or it is to be resumed and belongs to another
                model, other prompts or other settings.
        """
        self._folder = folder
        if unfinished == "restart":
            shutil.rmtree(folder, ignore_errors=True)
        if (folder / "key.json").is_file():
            if unfinished == "refuse":
                raise MisuseError(
                    f"{folder.parent} holds an unfinished run; add --resume to go on with it or --restart to begin anew"
                )
            self._check_key(key)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write_json(folder / "key.json", key)

    def _check_key(self, key: dict[str, Any]) -> None:
        try:
            before: dict[str, Any] = json.loads((self._folder / "key.json").read_text("utf-8"))
        except ValueError:
            before = {}
        changed = sorted(name for name in {*before, *key} if before.get(name) != key.get(name))
        if changed:
            raise MisuseError(
                f"the unfinished run in {self._folder.parent} had another {', '.join(changed)}; "
                "give the same again, or --restart to begin anew"
            )

    def answers(self) -> dict[int, list[int]]:
        """Answers written so far, by sequence; a line cut short by an interruption is ignored."""
        found: dict[int, list[int]] = {}
        file = self._folder / "answers.jsonl"
        for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
                found[int(entry["sequence"])] = [int(t) for t in entry["answer"]]
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def add_answers(self, sequences: Sequence[int], answers: Sequence[Sequence[int]]) -> None:
        """Append a batch of answers and make sure that it is on disk."""
        lines = [json.dumps({"sequence": s, "answer": list(a)}) + "\n" for s, a in zip(sequences, answers, strict=True)]
        with (self._folder / "answers.jsonl").open("a+b") as stream:
            # a line cut short must not swallow the next one
            stream.seek(0, os.SEEK_END)
            if stream.tell() > 0:
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
            stream.write("".join(lines).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def arrays(self, sampled: int, for_lens: int, boundaries: int, width: int) -> MeasuredArrays:
        """Return the arrays of the pass, as they are on disk if batches are in them, else new ones.

        Raises:
            WavekitError: the disk is too small.
        """

        def array(name: str, shape: tuple[int, ...], kind: str) -> Any:
            file = self._folder / f"{name}.npy"
            if self.measured and file.is_file():
                return np.load(file, mmap_mode="r+")
            made = open_memmap(str(file), mode="w+", dtype=kind, shape=shape)
            _reserve(file)
            return made

        return MeasuredArrays(
            array("rows", (sampled, boundaries, width), "float32"),
            array("entropy", (sampled,), "float64"),
            array("lens", (for_lens, boundaries), "int64"),
        )

    @property
    def measured(self) -> int:
        """Batches of the pass that are complete on disk."""
        file = self._folder / "measured.json"
        return int(json.loads(file.read_text("utf-8"))["batches"]) if file.is_file() else 0

    def count_batch(self, arrays: MeasuredArrays, batches: int) -> None:
        """Record that ``batches`` batches are done, after their slots are on disk."""
        arrays.flush()
        _write_json(self._folder / "measured.json", {"batches": batches})

    def remove(self) -> None:
        """Delete the folder: the run is complete."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _reserve(file: Path) -> None:
    """Take a mapped file's room on the disk now: on a full one, writing to a mapping kills the process."""
    size = file.stat().st_size
    try:
        with file.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except (OSError, AttributeError) as error:  # not every system and file system can
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            file.unlink()
            raise WavekitError(
                f"the disk of {file.parent} has no room for the {size / 1e6:.1f} MB that are measured; what is done is "
                "kept: make room, and give the same command with --resume to go on"
            ) from None


def _write_json(file: Path, content: Any) -> None:
    write_file(file, json.dumps(content, indent=1).encode() + b"\n")
