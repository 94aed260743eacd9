"""How the passes of one binding get to a device and back; `cuda` has the lane for CUDA."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from wavekit_engines.engine import Array

Outputs = dict[str, torch.Tensor]


class Lane(Protocol):
    """Copies and computations of one binding, in their order. A ``name`` always stands for arrays of one dtype."""

    device: torch.device

    def turn(self) -> AbstractContextManager[object]:
        """What a pass runs in."""
        ...

    def sent(self, name: str, array: Array) -> torch.Tensor:
        """An array of the host on the device; it may share memory with it."""
        ...

    def send(self, name: str, target: torch.Tensor, array: Array) -> None:
        """Copy an array of the host to a tensor of its shape."""
        ...

    def compute(self, key: object, function: Callable[[], Outputs]) -> Outputs:
        """What ``function`` returns, which for the same ``key`` always reads the same tensors of the same shapes."""
        ...

    def fetch(self, name: str, tensor: torch.Tensor, array: Array) -> None:
        """Copy a tensor to an array of the host, which holds it after `wait`."""
        ...

    def wait(self) -> None:
        """Return once everything so far is done."""
        ...


class HostLane:
    """Runs at once on the CPU, or on any device that torch copies to and from by itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def turn(self) -> AbstractContextManager[object]:
        """See `Lane.turn`."""
        return nullcontext()

    def sent(self, name: str, array: Array) -> torch.Tensor:
        """See `Lane.sent`."""
        return torch.from_numpy(array).to(self.device)

    def send(self, name: str, target: torch.Tensor, array: Array) -> None:
        """See `Lane.send`."""
        target.copy_(torch.from_numpy(array))

    def compute(self, key: object, function: Callable[[], Outputs]) -> Outputs:
        """See `Lane.compute`."""
        return function()

    def fetch(self, name: str, tensor: torch.Tensor, array: Array) -> None:
        """See `Lane.fetch`."""
        torch.from_numpy(array).copy_(tensor)

    def wait(self) -> None:
        """See `Lane.wait`."""
