"""Several processes that train one head, as ``torchrun`` or ``accelerate launch`` starts them, or one alone.

Every process holds the whole head and takes its share of each batch; gradients are averaged. What is written to disk is
written by the first process, while the others wait. Knows nothing of heads or texts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch

_PATIENCE = timedelta(days=7)  # the others wait while the first has texts written


class Processes:
    """This process among its peers."""

    def __init__(self) -> None:
        """Join the group that accelerate has set up; without accelerate, or started alone, there is only this one."""
        self._state: Any = None
        if find_spec("accelerate"):
            from accelerate import PartialState

            self._state = PartialState(cpu=not torch.cuda.is_available(), timeout=_PATIENCE)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self._state.num_processes) if self._state is not None else 1

    @property
    def rank(self) -> int:
        """Number of this one, from 0."""
        return int(self._state.process_index) if self._state is not None else 0

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and tells the user."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this process: its own GPU where ``name`` is a kind of which each has one."""
        return f"{name}:{self._state.local_process_index}" if self.count > 1 and name == "cuda" else name

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Let the first process run the block alone, then the others, which find what it left."""
        if self.count > 1 and not self.is_first:
            self._state.wait_for_everyone()
        yield
        if self.count > 1 and self.is_first:
            self._state.wait_for_everyone()

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            self._state.wait_for_everyone()

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes; one that has none counts as zero."""
        if self.count == 1:
            return
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(gradient)
            parameter.grad = gradient / self.count

    def agree(self, values: list[float]) -> list[float]:
        """The first process's numbers, in all."""
        if self.count == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        if torch.distributed.get_backend() == "nccl":
            tensor = tensor.cuda()
        torch.distributed.broadcast(tensor, src=0)
        return [float(value) for value in tensor.tolist()]
