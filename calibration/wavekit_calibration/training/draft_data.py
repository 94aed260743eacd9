"""What a draft is trained on: texts the target wrote, and the target's states on them.

With a text of prompt length P and answer length A, L = P + A tokens x_0..x_{L-1}, row t pairs the target's states of
token t with the embedding of token t + 1 and predicts token t + 2 (see `wavekit_engines.draft_spec`). Rows
P - 1 .. L - 3 predict answer tokens and are trained, A - 1 of them; the rows before them only give keys. The target's
distribution for row t, k steps ahead, is the one at position t + 1 + k.

States are captured once and kept on disk in half precision, so that later epochs cost no pass of the target. The
distribution is kept as the final state it comes from: over a draft vocabulary it is two to ten times smaller and costs
a few percent of a training step to unfold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from wavekit_calibration.hidden_states import capture
from wavekit_calibration.measure import Progress, plan_batches
from wavekit_calibration.model import Decoder, check_finite
from wavekit_calibration.training.saved_tensors import write_tensors

_LARGEST_HALF = 3e4  # beyond this, float16 has no room left


@dataclass(frozen=True)
class AnsweredText:
    """A prompt and the target's answer to it, token ids; ``greedy`` where every token was the likeliest."""

    number: int
    """Of the prompt; a text's states are kept under it."""
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
    """The target's states on every text, one file a text: what it takes to train without the target.

    A file holds ``taps`` [L - 2, C, H], rows 0..L-3 at the C captured boundaries, ``final`` [A - 1, H], boundary N at
    positions P..L-2, and ``likeliest`` int64 [A - 1], the target's choice there. States are float16, or bfloat16 in
    files where that has no room. A file that is there is complete, so an interrupted capture goes on where it was.
    """

    def __init__(self, folder: Path, boundaries: Sequence[int]) -> None:
        """Open the store for these boundaries, shallow to deep; files that are missing come later."""
        self.boundaries = tuple(boundaries)
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def bytes_needed(texts: Sequence[AnsweredText], boundaries: int, hidden: int) -> int:
        """What the files take on disk."""
        rows, finals = sum(len(text.tokens) - 2 for text in texts), sum(text.trained_rows for text in texts)
        return 2 * hidden * (rows * boundaries + finals) + 8 * finals

    def has(self, number: int) -> bool:
        """Whether a text's states are there."""
        return self._file(number).is_file()

    def fill(self, texts: Sequence[AnsweredText], decoder: Decoder, batch_size: int, progress: Progress) -> None:
        """Run the target over the texts whose states are missing.

        Raises:
            NonFiniteStatesError: the target's states overflow.
        """
        missing = [text for text in texts if not self.has(text.number)]
        batches = plan_batches([len(text.tokens) for text in missing], batch_size)
        for index, batch in enumerate(batches):
            self._capture(decoder, [missing[i] for i in batch])
            progress("reading states", index + 1, len(batches))

    def _capture(self, decoder: Decoder, texts: Sequence[AnsweredText]) -> None:
        width = max(len(text.tokens) for text in texts)
        ids = torch.tensor([[*text.tokens, *[0] * (width - len(text.tokens))] for text in texts])
        positions = [(index, p) for index, text in enumerate(texts) for p in range(len(text.tokens) - 1)]
        lengths = [len(text.tokens) - 1 for text in texts]
        kept: dict[int, tuple[torch.Tensor, ...]] = {}

        def take(boundary: int, states: torch.Tensor) -> None:
            if boundary in self.boundaries or boundary == decoder.num_layers:
                check_finite(boundary, states)
                kept[boundary] = torch.split(states, lengths)

        capture(decoder, ids, positions, take)
        for index, text in enumerate(texts):
            final = kept[decoder.num_layers][index][len(text.prompt) :]
            taps = torch.stack([kept[boundary][index][:-1] for boundary in self.boundaries], dim=1)
            self.save(text.number, taps, final, decoder.logits(final).argmax(-1))

    def save(self, number: int, taps: torch.Tensor, final: torch.Tensor, likeliest: torch.Tensor) -> None:
        """Keep a text's states: [L - 2, C, H], [A - 1, H], int64 [A - 1]."""
        largest = max(float(taps.abs().max()), float(final.abs().max()))
        dtype = torch.float16 if largest < _LARGEST_HALF else torch.bfloat16
        content = {"taps": taps.to(dtype).cpu(), "final": final.to(dtype).cpu(), "likeliest": likeliest.cpu()}
        write_tensors(self._file(number), {name: value.contiguous() for name, value in content.items()})

    def load(self, number: int, boundaries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a text's states: taps [L - 2, m * H] at some of the boundaries, final and likeliest."""
        content = torch.load(self._file(number), weights_only=True)
        chosen = [self.boundaries.index(boundary) for boundary in boundaries]
        return content["taps"][:, chosen].flatten(1), content["final"], content["likeliest"]

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.pt"


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


def make_batch(store: StateStore, texts: Sequence[AnsweredText], boundaries: Sequence[int], steps: int) -> Batch:
    """Put some texts side by side."""
    taps, final, likeliest = zip(*(store.load(text.number, boundaries) for text in texts), strict=True)
    return Batch(
        taps=_padded(taps),
        next_ids=_padded([torch.tensor([*text.tokens[1:], *[0] * steps]) for text in texts]),
        rows=_padded([torch.arange(len(text.prompt) - 1, len(text.tokens) - 2) for text in texts]),
        lengths=torch.tensor([text.trained_rows for text in texts]),
        final=_padded(final),
        likeliest=_padded(likeliest),
        written=_padded([torch.tensor(text.answer[1:]) for text in texts]),
    )


def _padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def epoch_batches(
    texts: Sequence[AnsweredText], batch_size: int, rng: np.random.Generator
) -> Iterator[list[AnsweredText]]:
    """All texts once, in random batches of similar length, so that little is padding."""
    order = rng.permutation(len(texts))
    pool = batch_size * 16
    batches = []
    for start in range(0, len(order), pool):
        near = sorted(order[start : start + pool], key=lambda i: len(texts[i].tokens))
        batches += [near[at : at + batch_size] for at in range(0, len(near), batch_size)]
    for index in rng.permutation(len(batches)):
        yield [texts[i] for i in batches[index]]
