"""The training loop of a draft: batches, learning rate, held-out tau as it goes, checkpoints, an early end.

AdamW (0.9, 0.95) with warm-up, cosine decay and clipping. Progress is the larger of steps done and time used, so that
a run cut to ``max_minutes`` still ends its decay. The best head on the held-out texts is what a run results in. Knows
no files but its checkpoint; texts, states and the first weights come from `draft_data` and `draft_start`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch

from wavekit_calibration.draft_data import AnsweredText, Batch, StateStore, epoch_batches, make_batch
from wavekit_calibration.draft_head import DraftHead
from wavekit_calibration.draft_loss import Acceptance, Teacher, batch_loss, count_accepted
from wavekit_calibration.measure import Progress
from wavekit_calibration.processes import Processes
from wavekit_engines.errors import MisuseError


@dataclass(frozen=True)
class TrainSettings:
    """How a draft is trained; a run can only be resumed with the same."""

    steps_ahead: int = 5
    """T of the training-time test; drafts get worse beyond it."""
    epochs: float = 5.0
    batch_size: int = 8
    """Texts a step."""
    learning_rate: float = 5e-4
    warm_up: float = 0.03
    """Share of the run in which the learning rate rises."""
    weight_decay: float = 0.0
    clip: float = 0.5
    evaluate_every: int = 100
    """Steps between looks at the held-out texts."""
    patience: int = 0
    """Looks without a better tau after which the run ends; 0: never."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16``: mixed, weights and sums stay float32; for devices that are faster with it."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers below what makes sense."""
        for name, least in (("steps_ahead", 1), ("batch_size", 1), ("evaluate_every", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise MisuseError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not (self.epochs > 0 and self.learning_rate > 0 and 0 <= self.warm_up < 1 and self.clip > 0):
            raise MisuseError("--epochs, --learning-rate and --clip must be above 0, --warm-up from 0 to below 1")


@dataclass
class Look:
    """One look at the held-out texts."""

    step: int
    epoch: float
    minutes: float
    loss: float
    """Of the training batches since the last look, averaged."""
    tau: float
    acceptance: list[float]
    """By position: of the drafts right so far, the share right here."""


@dataclass
class TrainState:
    """Where a run stands."""

    step: int = 0
    minutes: float = 0.0
    best_tau: float = 0.0
    since_best: int = 0
    looks: list[Look] = field(default_factory=list)


Report = Callable[[Look], None]


class Trainer:
    """One run of training."""

    def __init__(
        self,
        head: DraftHead,
        teacher: Teacher,
        store: StateStore,
        texts: tuple[Sequence[AnsweredText], Sequence[AnsweredText]],
        settings: TrainSettings,
        checkpoint: Path,
        device: torch.device,
        processes: Processes | None = None,
    ) -> None:
        """Train ``head`` on ``texts[0]``, whose states are in ``store``, watching ``texts[1]``.

        ``processes``: share every step with these; a step then takes ``batch_size`` texts in each.
        """
        self.head, self.settings, self.state = head.to(device), settings, TrainState()
        self._teacher, self._store, self._device = teacher, store, device
        self._train, self._held_out = list(texts[0]), list(texts[1])
        self._checkpoint = checkpoint
        self._processes = processes or Processes()
        self._step_size = settings.batch_size * self._processes.count
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self._best: dict[str, torch.Tensor] = {}
        self._epoch_steps = -(-len(self._train) // self._step_size)
        self.total_steps = max(1, math.ceil(self._epoch_steps * settings.epochs))

    def run(self, max_minutes: float | None, progress: Progress, report: Report) -> None:
        """Train to the end, or until ``max_minutes`` of training are used; the head then holds the best weights."""
        started = monotonic() - 60 * self.state.minutes
        losses: list[float] = []
        if self.state.step == 0:
            self._look(math.nan, report)
        for batch in self._remaining_batches():
            (self.state.minutes,) = self._processes.agree([(monotonic() - started) / 60])
            share = max(self.state.step / self.total_steps, self.state.minutes / max_minutes if max_minutes else 0.0)
            if share >= 1:
                break
            losses.append(self._step(batch, share))
            self.state.step += 1
            progress(f"training (loss {np.mean(losses[-20:]):.3f})", self.state.step, self.total_steps)
            if self.state.step % self.settings.evaluate_every == 0:
                self.state.minutes = (monotonic() - started) / 60
                self._look(float(np.mean(losses)), report)
                self._save()
                losses = []
                if 0 < self.settings.patience <= self.state.since_best:
                    break
        if losses:
            self._look(float(np.mean(losses)), report)
        self.head.load_state_dict(self._best)

    def _remaining_batches(self) -> Iterator[list[AnsweredText]]:
        """The batches of all epochs from the present step on, the same in a resumed run."""
        first, done = divmod(self.state.step, self._epoch_steps)
        for epoch in range(first, -(-self.total_steps // self._epoch_steps)):
            rng = np.random.default_rng([self.settings.seed, epoch])
            batches = epoch_batches(self._train, self._step_size, rng)
            for index, batch in enumerate(batches):
                if (epoch > first or index >= done) and epoch * self._epoch_steps + index < self.total_steps:
                    yield batch

    def _step(self, texts: Sequence[AnsweredText], share: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _schedule(share, self.settings.warm_up)
        own, steps, value = texts[self._processes.rank :: self._processes.count], self.settings.steps_ahead, 0.0
        if own:
            with self._autocast():
                loss = batch_loss(self.head, self._teacher, self._batch(own, steps), steps)
            loss.backward()  # type: ignore[no-untyped-call]
            value = float(loss.detach())
        self._processes.average(self.head.parameters())
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value

    def _batch(self, texts: Sequence[AnsweredText], steps: int) -> Batch:
        return make_batch(self._store, texts, self.head.spec.boundaries, steps).to(self._device)

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")

    def evaluate(self, texts: Sequence[AnsweredText], steps: int) -> Acceptance:
        """How drafts of up to ``steps`` tokens fare on some texts."""
        found = Acceptance(steps)
        ordered = sorted(texts, key=lambda text: len(text.tokens))
        for start in range(0, len(ordered), self.settings.batch_size):
            batch = self._batch(ordered[start : start + self.settings.batch_size], steps)
            with self._autocast():
                count_accepted(self.head, self._teacher, batch, found)
        return found

    def _look(self, loss: float, report: Report) -> None:
        found = self.evaluate(self._held_out, self.settings.steps_ahead)
        state = self.state
        state.looks.append(
            Look(state.step, state.step / self._epoch_steps, state.minutes, loss, found.tau, found.by_position)
        )
        state.since_best += 1
        if found.tau > state.best_tau:
            state.best_tau, state.since_best = found.tau, 0
            self._best = {name: value.detach().clone() for name, value in self.head.state_dict().items()}
        report(state.looks[-1])

    def _save(self) -> None:
        """Write the checkpoint under a temporary name and rename it."""
        if not self._processes.is_first:
            return
        content = {
            "state": asdict(self.state),
            "head": self.head.state_dict(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        temporary = self._checkpoint.with_name(self._checkpoint.name + ".tmp")
        torch.save(content, temporary)
        temporary.replace(self._checkpoint)

    def resume(self) -> bool:
        """Go back to the checkpoint, if there is one."""
        if not self._checkpoint.is_file():
            return False
        content = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        looks = [Look(**look) for look in content["state"].pop("looks")]
        self.state = TrainState(**content["state"], looks=looks)
        self.head.load_state_dict(content["head"])
        self._best = content["best"]
        self._optimizer.load_state_dict(content["optimizer"])
        return True


def _schedule(share: float, warm_up: float) -> float:
    """Learning rate relative to its peak: a linear rise, then half a cosine down to a tenth."""
    if share < warm_up:
        return max(share, 1e-3) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up)))
