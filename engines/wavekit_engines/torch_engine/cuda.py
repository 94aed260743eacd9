"""The lane for CUDA: a stream, pinned buffers of the host, and passes recorded as CUDA graphs.

Everything that only a GPU can run is here. Passes of a fixed shape run as they are the first time, which also makes
what a recording must not (handles and workspaces of libraries), are recorded the second time and replayed from then on.
Where a recording fails, passes run as they are.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from wavekit_engines.engine import Array
from wavekit_engines.torch_engine.lanes import Outputs

_logger = logging.getLogger(__name__)
_recording = threading.Lock()
"""CUDA records one graph of a process at a time without trouble."""


class CudaLane:
    """One stream, and what runs on it in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pinned: dict[str, torch.Tensor] = {}
        self._coming: list[tuple[torch.Tensor, Array]] = []
        self._seen: set[object] = set()
        self._recorded: dict[object, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._records = True

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Lane.turn`. What others did on the device before, like moving cache rows, comes before the pass."""
        self._coming.clear()
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield

    def sent(self, name: str, array: Array) -> torch.Tensor:
        """See `Lane.sent`."""
        target = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=self.device)
        self.send(name, target, array)
        return target

    def send(self, name: str, target: torch.Tensor, array: Array) -> None:
        """See `Lane.send`."""
        pinned = self._staged(f">{name}", array)
        pinned.copy_(torch.from_numpy(array))
        target.copy_(pinned, non_blocking=True)

    def compute(self, key: object, function: Callable[[], Outputs]) -> Outputs:
        """See `Lane.compute`."""
        if key not in self._recorded and self._records and key in self._seen:
            self._record(key, function)
        if key not in self._recorded:
            self._seen.add(key)
            return function()
        graph, outputs = self._recorded[key]
        graph.replay()
        return outputs

    def _record(self, key: object, function: Callable[[], Outputs]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with _recording, torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                outputs = function()
        except RuntimeError as error:
            _logger.warning("a pass cannot be recorded as a CUDA graph, and runs without: %s", error)
            self._records = False
        else:
            self._recorded[key] = graph, outputs

    def fetch(self, name: str, tensor: torch.Tensor, array: Array) -> None:
        """See `Lane.fetch`."""
        pinned = self._staged(f"<{name}", array)
        pinned.copy_(tensor, non_blocking=True)
        self._coming.append((pinned, array))

    def wait(self) -> None:
        """See `Lane.wait`."""
        self._done.record(self._stream)
        self._done.synchronize()
        for pinned, array in self._coming:
            np.copyto(array, pinned.numpy())

    def _staged(self, name: str, array: Array) -> torch.Tensor:
        """A pinned buffer of the array's shape; a larger one than before is made where need be."""
        held = self._pinned.get(name)
        if held is None or held.numel() < array.size:
            dtype = getattr(torch, array.dtype.name)
            held = self._pinned[name] = torch.empty(array.size, dtype=dtype, pin_memory=True)
        return held[: array.size].view(array.shape)
