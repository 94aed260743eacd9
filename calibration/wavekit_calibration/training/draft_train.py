"""What training a draft means to the training loop: the loss of a batch, held-out tau as it goes.

Texts, states and the first weights come from `draft_data` and `draft_start`; the loop is `training_loop`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from wavekit_calibration.training.draft_data import AnsweredText, Batch, StateStore, make_batch
from wavekit_calibration.training.draft_head import DraftHead
from wavekit_calibration.training.draft_loss import Acceptance, Teacher, batch_loss, count_accepted
from wavekit_calibration.training.training_loop import HeldOutLook, LoopSettings, Standing, autocast


@dataclass(frozen=True)
class TrainSettings(LoopSettings):
    """How a draft is trained; a run can only be resumed with the same."""

    steps_ahead: int = 5
    """T of the training-time test; drafts get worse beyond it."""

    def __post_init__(self) -> None:
        """Refuse numbers below what makes sense."""
        self._at_least("steps_ahead", 1)
        super().__post_init__()


@dataclass
class Look(HeldOutLook):
    """One look at the held-out texts."""

    tau: float
    acceptance: list[float]
    """By position: of the drafts right so far, the share right here."""

    score_name: ClassVar[str] = "tau"

    @property
    def score(self) -> float:
        """Tokens a pass."""
        return self.tau


Report = Callable[[Look], None]


class DraftLearner:
    """A head being trained on the states in a store."""

    look_type = Look

    def __init__(
        self, head: DraftHead, teacher: Teacher, store: StateStore, settings: TrainSettings, device: torch.device
    ) -> None:
        """Move ``head`` to a device; it is changed in place."""
        self.module = head.to(device)
        self._teacher, self._store, self._settings, self._device = teacher, store, settings, device

    def backward(self, texts: Sequence[AnsweredText]) -> float:
        """Add the gradients of the loss on some texts; returns the loss."""
        steps = self._settings.steps_ahead
        with autocast(self._device, self._settings.precision):
            loss = batch_loss(self.module, self._teacher, self._batch(texts, steps), steps)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def evaluate(self, texts: Sequence[AnsweredText], steps: int) -> Acceptance:
        """How drafts of up to ``steps`` tokens fare on some texts."""
        found = Acceptance(steps)
        ordered = sorted(texts, key=lambda text: len(text.tokens))
        for start in range(0, len(ordered), self._settings.batch_size):
            batch = self._batch(ordered[start : start + self._settings.batch_size], steps)
            with autocast(self._device, self._settings.precision):
                count_accepted(self.module, self._teacher, batch, found)
        return found

    def look(self, standing: Standing, texts: Sequence[AnsweredText]) -> Look:
        """Draft on held-out texts."""
        found = self.evaluate(texts, self._settings.steps_ahead)
        return Look(**vars(standing), tau=found.tau, acceptance=found.by_position)

    def _batch(self, texts: Sequence[AnsweredText], steps: int) -> Batch:
        return make_batch(self._store, texts, self.module.spec.boundaries, steps).to(self._device)
