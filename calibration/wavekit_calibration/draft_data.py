"""What a draft is trained on: texts the target wrote, and the target's states on them.

With a text of prompt length P and answer length A, L = P + A tokens x_0..x_{L-1}, row t pairs the target's states of
token t with the embedding of token t + 1 and predicts token t + 2 (see `wavekit_engines.draft_spec`). Rows
P - 1 .. L - 3 predict answer tokens and are trained, A - 1 of them; the rows before them only give keys. The target's
distribution for row t, k steps ahead, is the one at position t + 1 + k.

States are captured once and kept on disk in half precision, memory-mapped, so that later epochs cost no pass of the
target. The distribution is kept as the final state it comes from: over a draft vocabulary it is two to ten times
smaller and costs a few percent of a training step to unfold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap

from wavekit_calibration.hidden_states import capture
from wavekit_calibration.measure import Progress, plan_batches
from wavekit_calibration.model import Decoder, check_finite

_LARGEST_HALF = 3e4  # beyond this, float16 has no room left


@dataclass(frozen=True)
class AnsweredText:
    """A prompt and the target's answer to it, token ids; ``greedy`` where every token was the likeliest."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    greedy: bool = True

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer

    @property
    def trained_rows(self) -> int:
        """A - 1; fewer than one make the text useless."""
        return len(self.answer) - 1


class StateStore:
    """The target's states on every text, by boundary; slots of one array a boundary, in the order of the texts.

    ``taps`` holds rows 0..L-3 of each text for every captured boundary but N; ``final`` boundary N at positions
    P..L-2, and ``likeliest`` the target's choice there.
    """

    def __init__(self, folder: Path, texts: Sequence[AnsweredText], boundaries: Sequence[int], hidden: int) -> None:
        """Open the store in ``folder``, made anew unless it is complete there for the same numbers."""
        self.texts, self.boundaries = list(texts), tuple(boundaries)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._row_starts = np.cumsum([0, *(len(text.tokens) - 2 for text in texts)])
        self._final_starts = np.cumsum([0, *(text.trained_rows for text in texts)])
        rows, finals = int(self._row_starts[-1]), int(self._final_starts[-1])
        self._arrays: dict[str, Any] = {
            f"boundary_{boundary}": self._array(f"boundary_{boundary}", (rows, hidden), "uint16")
            for boundary in self.boundaries
        }
        self._arrays["final"] = self._array("final", (finals, hidden), "uint16")
        self._arrays["likeliest"] = self._array("likeliest", (finals,), "int64")
        self._kind = folder / "captured"
        self.dtype = torch.float16

    def _array(self, name: str, shape: tuple[int, ...], kind: str) -> Any:
        file = self._folder / f"{name}.npy"
        if file.is_file():
            array = np.load(file, mmap_mode="r+")
            if array.shape == shape and array.dtype == np.dtype(kind):
                return array
        (self._folder / "captured").unlink(missing_ok=True)
        return open_memmap(str(file), mode="w+", dtype=kind, shape=shape)

    @staticmethod
    def bytes_needed(texts: Sequence[AnsweredText], boundaries: int, hidden: int) -> int:
        """What the arrays take on disk."""
        rows, finals = sum(len(text.tokens) - 2 for text in texts), sum(text.trained_rows for text in texts)
        return 2 * hidden * (rows * boundaries + finals) + 8 * finals

    def fill(self, decoder: Decoder, batch_size: int, progress: Progress) -> None:
        """Capture all texts, unless that was done before.

        Raises:
            NonFiniteStatesError: the target's states overflow.
        """
        if self._kind.is_file():
            self.dtype = getattr(torch, self._kind.read_text().strip())
            return
        batches = plan_batches([len(text.tokens) for text in self.texts], batch_size)
        for number, batch in enumerate(batches):
            largest = self._capture(decoder, batch)
            if largest > _LARGEST_HALF and self.dtype == torch.float16:
                self.dtype = torch.bfloat16
                self.fill(decoder, batch_size, progress)
                return
            progress("reading states", number + 1, len(batches))
        for array in self._arrays.values():
            array.flush()
        self._kind.write_text(str(self.dtype).removeprefix("torch."))

    def _capture(self, decoder: Decoder, batch: Sequence[int]) -> float:
        width = max(len(self.texts[i].tokens) for i in batch)
        ids = torch.tensor([[*self.texts[i].tokens, *[0] * (width - len(self.texts[i].tokens))] for i in batch])
        positions = [(b, p) for b, i in enumerate(batch) for p in range(len(self.texts[i].tokens) - 1)]
        lengths = [len(self.texts[i].tokens) - 1 for i in batch]
        starts = np.cumsum([0, *lengths])
        largest = 0.0

        def take(boundary: int, states: torch.Tensor) -> None:
            nonlocal largest
            if boundary not in self.boundaries and boundary != decoder.num_layers:
                return
            check_finite(boundary, states)
            largest = max(largest, float(states.abs().max()))
            for b, i in enumerate(batch):
                own = states[starts[b] : starts[b + 1]]
                if boundary in self.boundaries:
                    span = slice(self._row_starts[i], self._row_starts[i + 1])
                    self._arrays[f"boundary_{boundary}"][span] = _bits(own[:-1], self.dtype)
                if boundary == decoder.num_layers:
                    answer = own[len(self.texts[i].prompt) :]
                    span = slice(self._final_starts[i], self._final_starts[i + 1])
                    self._arrays["final"][span] = _bits(answer, self.dtype)
                    self._arrays["likeliest"][span] = decoder.logits(answer).argmax(-1).cpu().numpy()

        capture(decoder, ids, positions, take)
        return largest

    def taps(self, text: int, boundaries: Sequence[int]) -> torch.Tensor:
        """States [L - 2, m * H] of a text at some boundaries, shallow to deep."""
        span = slice(self._row_starts[text], self._row_starts[text + 1])
        return torch.cat([self._read(f"boundary_{boundary}", span) for boundary in boundaries], dim=-1)

    def final(self, text: int) -> torch.Tensor:
        """Boundary N [A - 1, H] at positions P..L-2."""
        return self._read("final", slice(self._final_starts[text], self._final_starts[text + 1]))

    def likeliest(self, text: int) -> torch.Tensor:
        """The target's choices int64 [A - 1] there."""
        return torch.from_numpy(
            self._arrays["likeliest"][self._final_starts[text] : self._final_starts[text + 1]].copy()
        )

    def _read(self, name: str, span: slice) -> torch.Tensor:
        return torch.from_numpy(self._arrays[name][span].view(np.int16).copy()).view(self.dtype)


def _bits(states: torch.Tensor, dtype: torch.dtype) -> Any:
    return states.to(dtype).cpu().view(torch.int16).numpy().view(np.uint16)


@dataclass(frozen=True)
class Batch:
    """Some texts side by side, padded on the right; B texts of at most R trained rows, ``steps`` ahead."""

    taps: torch.Tensor
    """[B, L, m * H]."""
    next_ids: torch.Tensor
    """int64 [B, L + steps]: tokens 1, 2, ... of each text."""
    rows: torch.Tensor
    """int64 [B, R]: the trained rows; padding repeats row 0."""
    lengths: torch.Tensor
    """int64 [B]: trained rows of each text."""
    final: torch.Tensor
    """[B, R, H]: boundary N one position after each trained row: what row r of step k predicts is at r + k."""
    likeliest: torch.Tensor
    """int64 [B, R]: the target's choice there."""
    written: torch.Tensor
    """int64 [B, R]: the token that the text has there."""

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        return Batch(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})

    def valid(self, step: int) -> torch.Tensor:
        """Bool [B, R]: the rows whose prediction, ``step`` steps ahead, lies inside the answer."""
        index = torch.arange(self.rows.shape[1], device=self.rows.device)
        return index[None] + step < self.lengths[:, None]


def make_batch(store: StateStore, numbers: Sequence[int], boundaries: Sequence[int], steps: int) -> Batch:
    """Put some texts of a store side by side."""
    texts = [store.texts[i] for i in numbers]
    return Batch(
        taps=_padded([store.taps(i, boundaries) for i in numbers]),
        next_ids=_padded([torch.tensor([*text.tokens[1:], *[0] * steps]) for text in texts]),
        rows=_padded([torch.arange(len(text.prompt) - 1, len(text.tokens) - 2) for text in texts]),
        lengths=torch.tensor([text.trained_rows for text in texts]),
        final=_padded([store.final(i) for i in numbers]),
        likeliest=_padded([store.likeliest(i) for i in numbers]),
        written=_padded([torch.tensor(text.answer[1:]) for text in texts]),
    )


def _padded(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def epoch_batches(
    texts: Sequence[AnsweredText], numbers: Sequence[int], batch_size: int, rng: np.random.Generator
) -> Iterator[list[int]]:
    """All numbers once, in random batches of texts of similar length, so that little is padding."""
    order = rng.permutation(np.asarray(numbers))
    pool = batch_size * 16
    batches = []
    for start in range(0, len(order), pool):
        near = sorted(order[start : start + pool], key=lambda i: len(texts[i].tokens))
        batches += [near[at : at + batch_size] for at in range(0, len(near), batch_size)]
    for index in rng.permutation(len(batches)):
        yield [int(i) for i in batches[index]]
