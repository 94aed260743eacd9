"""A training loop for whatever is trained here: batches, learning rate, held-out looks, checkpoints, an early end.

AdamW (0.9, 0.95) with warm-up, cosine decay and clipping. Progress is the larger of steps done and time used, so that
a run cut to ``max_minutes`` still ends its decay. The best weights on the held-out texts are what a run results in.
What is trained, by what loss, and what a look at held-out texts finds, is a `Learner`'s business. Knows no files but
its checkpoint.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch

from wavekit_calibration.measure import Progress
from wavekit_calibration.processes import Processes
from wavekit_calibration.training.draft_data import AnsweredText, epoch_batches
from wavekit_calibration.training.saved_tensors import write_tensors
from wavekit_engines.errors import MisuseError

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class LoopSettings:
    """How something is trained; a run can only be resumed with the same."""

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
    """Looks without a better score after which the run ends; 0: never."""
    precision: Precision = "float32"
    """``bfloat16``: mixed, weights and sums stay float32; for devices that are faster with it."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers below what makes sense."""
        for name, least in (("batch_size", 1), ("evaluate_every", 1), ("patience", 0)):
            self._at_least(name, least)
        if not (self.epochs > 0 and self.learning_rate > 0 and 0 <= self.warm_up < 1 and self.clip > 0):
            raise MisuseError("--epochs, --learning-rate and --clip must be above 0, --warm-up from 0 to below 1")

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise MisuseError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")


@dataclass
class Standing:
    """How far a run is; looks at held-out texts add what they found."""

    step: int
    epoch: float
    minutes: float
    loss: float
    """Of the training batches since the last look, averaged."""


@dataclass
class HeldOutLook(Standing):
    """One look at the held-out texts."""

    score_name: ClassVar[str]

    @property
    def score(self) -> float:
        """What the best weights have most of; ``score_name`` says what it is."""
        raise NotImplementedError


LookT = TypeVar("LookT", bound=HeldOutLook)
_LearnedLook = TypeVar("_LearnedLook", bound=HeldOutLook, covariant=True)


class Learner(Protocol[_LearnedLook]):
    """What is trained."""

    @property
    def module(self) -> torch.nn.Module:
        """Holds the parameters, all of which are trained."""

    @property
    def look_type(self) -> type[_LearnedLook]:
        """What `look` returns."""

    def backward(self, texts: Sequence[AnsweredText]) -> float:
        """Add the gradients of the loss on some texts; returns the loss."""

    def look(self, standing: Standing, texts: Sequence[AnsweredText]) -> _LearnedLook:
        """Look at held-out texts."""


@dataclass
class TrainState(Generic[LookT]):
    """Where a run stands."""

    step: int = 0
    minutes: float = 0.0
    best: float = 0.0
    """Score of the best look."""
    since_best: int = 0
    looks: list[LookT] = field(default_factory=list)


class Trainer(Generic[LookT]):
    """One run of training."""

    def __init__(
        self,
        learner: Learner[LookT],
        texts: tuple[Sequence[AnsweredText], Sequence[AnsweredText]],
        settings: LoopSettings,
        checkpoint: Path,
        processes: Processes | None = None,
    ) -> None:
        """Train ``learner`` on ``texts[0]``, watching ``texts[1]``.

        ``processes``: share every step with these; a step then takes ``batch_size`` texts in each.
        """
        self.settings = settings
        self.state: TrainState[LookT] = TrainState()
        self._learner, self._module = learner, learner.module
        self._train, self._held_out = list(texts[0]), list(texts[1])
        self._checkpoint = checkpoint
        self._processes = processes or Processes()
        self._step_size = settings.batch_size * self._processes.count
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self._best: dict[str, torch.Tensor] = {}
        self._epoch_steps = -(-len(self._train) // self._step_size)
        self.total_steps = max(1, math.ceil(self._epoch_steps * settings.epochs))

    def run(self, max_minutes: float | None, progress: Progress, report: Callable[[LookT], None]) -> None:
        """Train to the end, or until ``max_minutes`` of training are used; the module then holds the best weights."""
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
        self._module.load_state_dict(self._best)

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
        own = texts[self._processes.rank :: self._processes.count]
        value = self._learner.backward(own) if own else 0.0
        self._processes.average(self._module.parameters())
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), self.settings.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value

    def _look(self, loss: float, report: Callable[[LookT], None]) -> None:
        state = self.state
        standing = Standing(state.step, state.step / self._epoch_steps, state.minutes, loss)
        look = self._learner.look(standing, self._held_out)
        state.looks.append(look)
        state.since_best += 1
        if look.score > state.best:
            state.best, state.since_best = look.score, 0
            self._best = {name: value.detach().clone() for name, value in self._module.state_dict().items()}
        report(look)

    def _save(self) -> None:
        """Write the checkpoint."""
        if not self._processes.is_first:
            return
        state = asdict(self.state)
        state[self._best_name] = state.pop("best")
        content = {
            "state": state,
            "head": self._module.state_dict(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        write_tensors(self._checkpoint, content)

    def resume(self) -> bool:
        """Go back to the checkpoint, if there is one."""
        if not self._checkpoint.is_file():
            return False
        device = next(self._module.parameters()).device
        content = torch.load(self._checkpoint, map_location=device, weights_only=True)
        state: dict[str, Any] = content["state"]
        looks = [self._learner.look_type(**look) for look in state.pop("looks")]
        self.state = TrainState(best=state.pop(self._best_name), looks=looks, **state)
        self._module.load_state_dict(content["head"])
        self._best = content["best"]
        self._optimizer.load_state_dict(content["optimizer"])
        return True

    @property
    def _best_name(self) -> str:
        return f"best_{self._learner.look_type.score_name}"


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The arithmetic of a run."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def _schedule(share: float, warm_up: float) -> float:
    """Learning rate relative to its peak: a linear rise, then half a cosine down to a tenth."""
    if share < warm_up:
        return max(share, 1e-3) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up)))
