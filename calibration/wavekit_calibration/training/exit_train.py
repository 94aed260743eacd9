"""What training exits means to the training loop: distillation from the final distribution, agreement as it goes.

At each position of an answer that is in the store, every exit is to give the target's own distribution there. The loss
is KL(target || exit), both renormalised over the exit vocabulary, averaged over positions and exits; positions where
the target's choice lies outside that vocabulary are left out. Gradients are taken piece by piece: the scores of one
exit on a few rows are all that is in memory at once.

An exit agrees where its best token is the one that was written, the target's own choice on the greedy texts that are
held out. The score of a look is the speed-up over the same stages run in turn, K / E[ticks], if a token takes j + 1
ticks when exit j is the first that agrees and K when none is (see `dex_replay`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from wavekit_calibration.readout import Readout
from wavekit_calibration.training.draft_data import AnsweredText, StateStore
from wavekit_calibration.training.exit_adapters import ExitAdapters
from wavekit_calibration.training.training_loop import HeldOutLook, LoopSettings, Standing, autocast

_SCORES_AT_ONCE = 1 << 23  # 32 MB in float32; several such arrays are alive at once


@dataclass
class ExitLook(HeldOutLook):
    """One look at the held-out texts."""

    speed_up: float
    """K / E[ticks], over the same K stages run in turn; a step's cost and time are not in it."""
    agreement: list[float]
    """By exit, shallow to deep: the share of tokens that it gives."""

    score_name: ClassVar[str] = "speed_up"

    @property
    def score(self) -> float:
        """The speed-up."""
        return self.speed_up


Report = Callable[[ExitLook], None]


@dataclass(frozen=True)
class ExitRows:
    """What exits learn from some texts: n positions, E exits."""

    states: torch.Tensor
    """[n, E, H]: the target's states at the exits' boundaries."""
    final: torch.Tensor
    """[n, H]: at boundary N."""
    likeliest: torch.Tensor
    """int64 [n]: the target's choice."""
    written: torch.Tensor
    """int64 [n]: the token that was written."""


def exit_rows(store: StateStore, texts: Sequence[AnsweredText], boundaries: Sequence[int]) -> ExitRows:
    """The positions of some texts that the store has all states of, text by text.

    With prompts of P and texts of L tokens, those are P to L - 3, which predict the answer's tokens but its first and
    last: A - 2 a text.
    """
    parts = []
    for text in texts:
        taps, final, likeliest = store.load(text.number, boundaries)
        states = taps[len(text.prompt) :].reshape(len(final) - 1, len(boundaries), final.shape[1])
        parts.append((states, final[:-1], likeliest[:-1], torch.tensor(text.answer[1:-1], dtype=torch.long)))
    return ExitRows(*(torch.cat(part) for part in zip(*parts, strict=True)))


def residual_sizes(store: StateStore, texts: Sequence[AnsweredText], boundaries: Sequence[int]) -> list[float]:
    """Root mean square of the states at each boundary, the median over the positions of some texts."""
    states = exit_rows(store, texts, boundaries).states.float()
    if not len(states):
        return [1.0] * len(boundaries)
    found: list[float] = states.square().mean(-1).sqrt().median(0).values.tolist()
    return found


class ExitLearner:
    """Adapters being trained on the states in a store."""

    look_type = ExitLook

    def __init__(
        self,
        adapters: ExitAdapters,
        readout: Readout,
        token_ids: NDArray[np.int64],
        store: StateStore,
        settings: LoopSettings,
        device: torch.device,
    ) -> None:
        """Move ``adapters`` to a device; they are changed in place. ``token_ids`` is the vocabulary of ``readout``."""
        self.module = adapters.to(device)
        self._readout, self._store, self._settings, self._device = readout, store, settings, device
        self._ids = torch.from_numpy(token_ids).to(device)
        self._boundaries = adapters.spec.boundaries

    def backward(self, texts: Sequence[AnsweredText]) -> float:
        """Add the gradients of the loss on some texts; returns the loss."""
        rows = self._rows(texts)
        usable = torch.isin(rows.likeliest, self._ids)
        states, final = rows.states[usable], rows.final[usable]
        terms, total = max(len(final), 1) * len(self._boundaries), final.new_zeros((), dtype=torch.float32)
        for part in self._pieces(len(final)):
            with autocast(self._device, self._settings.precision):
                with torch.no_grad():
                    target = self._readout.scores(final[part]).log_softmax(-1)
                for exit_ in range(len(self._boundaries)):
                    scores = self._readout.scores(self.module(states[part, exit_].float(), exit_))
                    loss = functional.kl_div(scores.log_softmax(-1), target, reduction="sum", log_target=True) / terms
                    loss.backward()  # type: ignore[no-untyped-call]
                    total += loss.detach()
        return float(total)

    @torch.no_grad()
    def candidates(self, texts: Sequence[AnsweredText], ranks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What each exit ranks best at the positions of some texts, [n, E, ranks], and what was written there, [n]."""
        parts = []
        for first in range(0, len(texts), self._settings.batch_size):
            rows = self._rows(texts[first : first + self._settings.batch_size])
            found = torch.zeros((len(rows.final), len(self._boundaries), ranks), dtype=torch.long)
            for part in self._pieces(len(rows.final)):
                for exit_ in range(len(self._boundaries)):
                    with autocast(self._device, self._settings.precision):
                        scores = self._readout.scores(self.module(rows.states[part, exit_].float(), exit_))
                    found[part, exit_] = self._ids[scores.topk(ranks).indices].cpu()
            parts.append((found.numpy(), rows.written.cpu().numpy()))
        best, written = zip(*parts, strict=True)
        return np.concatenate(best), np.concatenate(written)

    def look(self, standing: Standing, texts: Sequence[AnsweredText]) -> ExitLook:
        """Compare the exits' best tokens with held-out texts."""
        best, written = self.candidates(texts, 1)
        speed_up, agreement = summary(best[..., 0] == written[:, None])
        return ExitLook(**vars(standing), speed_up=speed_up, agreement=agreement)

    def _rows(self, texts: Sequence[AnsweredText]) -> ExitRows:
        rows = exit_rows(self._store, texts, self._boundaries)
        return ExitRows(**{name: value.to(self._device) for name, value in vars(rows).items()})

    def _pieces(self, rows: int) -> Iterator[slice]:
        step = max(1, _SCORES_AT_ONCE // self._readout.vocab_size)
        return (slice(start, start + step) for start in range(0, rows, step))


def summary(agrees: NDArray[np.bool_]) -> tuple[float, list[float]]:
    """Speed-up and agreement from whether each exit gave each token, [n, E]."""
    right = np.concatenate([agrees, np.ones((len(agrees), 1), dtype=bool)], axis=1)
    ticks = 1.0 + float(np.argmax(right, axis=1).mean())
    return right.shape[1] / ticks, agrees.mean(axis=0).tolist()
