"""Engines and bindings in torch: arrays of the host in and out, weights and caches on the device.

A pass is copied to the device, computed and copied back. Where kernels round according to the number of rows (fp16), or
where a recorded pass can be replayed (CUDA), a pass of up to ``FIXED_ROWS`` rows always runs with that many, over all
rows of the cache: the last row is repeated, writes what it wrote and is not copied back. So a row of a pass has the
very same numbers whether it ran alone or beside others, and plain decoding writes what speculation writes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from wavekit_engines.bundle import Bundle
from wavekit_engines.engine import Array
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.torch_engine.cuda import CudaLane
from wavekit_engines.torch_engine.graphs import DraftHead, Exit, Graph, Head, Stage
from wavekit_engines.torch_engine.lanes import HostLane, Lane
from wavekit_engines.torch_engine.layers import Cache, Tensor
from wavekit_engines.torch_engine.stored_weights import StoredWeights

FIXED_ROWS = 64


class TorchEngines:
    """Opens the graphs of a bundle on one device; weights that they share are held once."""

    def __init__(self, bundle: Bundle, device: str, threads: int) -> None:
        """Prepare to open graphs.

        Args:
            bundle: the bundle.
            device: as torch spells it: ``cpu``, ``cuda``, ``cuda:1``.
            threads: threads of a run on the CPU; torch has one such number for the whole process.

        Raises:
            MisuseError: torch knows no such device, or finds none on this machine.
        """
        self._manifest = bundle.manifest
        self._device = _device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        self._stored = StoredWeights(bundle, self._device)

    def stage(self, number: int) -> "TorchEngine":
        """A stage, by number."""
        return self._engine(Stage(self._manifest, self._manifest.stages[number], self._stored))

    def head(self) -> "TorchEngine":
        """The final norm and head."""
        return self._engine(Head(self._manifest, self._stored, best=False))

    def greedy_head(self) -> "TorchEngine":
        """The head that copies tokens back instead of logits; it needs nothing that a bundle may lack."""
        return self._engine(Head(self._manifest, self._stored, best=True))

    def draft(self) -> "TorchEngine":
        """The draft head of a bundle that has one."""
        assert self._manifest.draft is not None
        return self._engine(DraftHead(self._manifest, self._manifest.draft, self._stored))

    def exit(self, boundary: int) -> "TorchEngine":
        """The exit at a boundary, of a bundle that has it."""
        assert self._manifest.exits is not None
        return self._engine(Exit(self._manifest, self._manifest.exits, boundary, self._stored))

    def _engine(self, graph: Graph) -> "TorchEngine":
        return TorchEngine(graph, self._device, self._stored.dtype)


class TorchEngine:
    """One graph on a device."""

    def __init__(self, graph: Graph, device: torch.device, dtype: torch.dtype) -> None:
        self._graph, self._device = graph, device
        self._fixed = device.type == "cuda" or dtype != torch.float32

    def bind(self) -> "TorchBinding":
        """A new set of buffers, with a lane of its own."""
        return TorchBinding(self._graph, _lane(self._device), self._fixed)

    def cache(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str) -> KVCache:
        """A cache on the device."""
        return TorchCache(layers, kv_heads, head_dim, capacity, dtype, self._device)

    def close(self) -> None:
        """Nothing to do: weights go with the last engine and binding that holds them."""


class TorchCache(KVCache):
    """A cache of one sequence on a device; ``array`` is a copy where that is not the host."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str, device: torch.device
    ) -> None:
        super().__init__(layers, kv_heads, head_dim, capacity, dtype)  # pages of the host that nothing writes
        shape = (layers, 2, 1, kv_heads, capacity, head_dim)
        self.tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    @property
    def array(self) -> Array:
        """See `KVCache.array`."""
        array: Array = self.tensor.cpu().numpy()
        return array

    def of_layer(self, index: int) -> Cache:
        """Keys and values of a layer, [kv_heads, capacity, head_dim]."""
        keys, values = self.tensor[index, :, 0]
        return keys, values

    def _move(self, start: int, rows: Sequence[int]) -> None:
        moved = self.tensor[..., torch.tensor(rows, device=self.tensor.device), :]
        self.tensor[..., start : start + len(rows), :] = moved


class TorchBinding:
    """Arrays of one runner."""

    def __init__(self, graph: Graph, lane: Lane, fixed: bool) -> None:
        self._graph, self._lane, self._fixed = graph, lane, fixed
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array] = {}
        self._caches: dict[str, Cache] = {}
        self._padded: dict[tuple[str, ...], _PaddedPass] = {}

    def bind_input(self, name: str, array: Array) -> None:
        """See `engine.Binding.bind_input`."""
        self._inputs[name] = array

    def bind_output(self, name: str, array: Array) -> None:
        """See `engine.Binding.bind_output`."""
        self._outputs[name] = array

    def bind_cache(self, name: str, cache: KVCache, index: int) -> None:
        """See `engine.Binding.bind_cache`."""
        assert isinstance(cache, TorchCache)
        self._caches[name] = cache.of_layer(index)
        self._padded.clear()  # what was recorded writes to another cache

    def run(self) -> None:
        """Run once. Raises WavekitError when torch fails (out of memory, a bad shape)."""
        try:
            with torch.inference_mode(), self._lane.turn():
                self._run()
                self._lane.wait()
        except RuntimeError as error:
            raise WavekitError(f"a pass failed in torch: {str(error).strip().splitlines()[0]}") from error

    def _run(self) -> None:
        fed = self._graph.feed(self._inputs)
        if self._fixed and _may_be_padded(fed):
            key = tuple(name for name, array in fed.items() if len(array))
            if key not in self._padded:
                capacity = max((keys.shape[1] for keys, _ in self._caches.values()), default=0)
                self._padded[key] = _PaddedPass(fed, self._lane, capacity)
            found = self._padded[key].run(fed, partial(self._graph, caches=self._caches))
        else:
            found = self._graph({name: self._lane.sent(name, array) for name, array in fed.items()}, self._caches)
        for name, array in self._outputs.items():
            rows = array[0] if array.ndim > found[name].ndim else array
            self._lane.fetch(name, found[name][: len(rows)], rows)


def _may_be_padded(fed: Mapping[str, Array]) -> bool:
    """Only a draft's pass has rows of two kinds; it may have but one of them."""
    both = all(len(fed[name]) for name in ("taps", "hidden")) if "taps" in fed else False
    return not both and max(map(len, fed.values())) <= FIXED_ROWS


class _PaddedPass:
    """Buffers on the device for passes of ``FIXED_ROWS`` rows, masks over ``capacity`` cache rows."""

    def __init__(self, fed: Mapping[str, Array], lane: Lane, capacity: int) -> None:
        self._lane, self._key = lane, object()
        self._buffers = dict[str, Tensor]()
        for name, array in fed.items():
            rows = FIXED_ROWS if len(array) else 0
            rest = (capacity,) if name.startswith("mask") else array.shape[1:]
            dtype = getattr(torch, array.dtype.name)
            self._buffers[name] = torch.zeros((rows, *rest), dtype=dtype, device=lane.device)
        self._last = torch.zeros(len(fed), dtype=torch.int64, device=lane.device)
        self._each = torch.arange(FIXED_ROWS, device=lane.device)

    def run(
        self, fed: Mapping[str, Array], compute: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Copy the rows in and compute; outputs have ``FIXED_ROWS`` rows and are overwritten by the next run."""
        for name, array in fed.items():
            target = self._buffers[name][: len(array)]
            if len(array):
                self._lane.send(name, target[:, : array.shape[1]] if name.startswith("mask") else target, array)
        last = np.array([len(array) - 1 for array in fed.values()])
        self._lane.send("", self._last, last)
        return self._lane.compute(self._key, lambda: compute(self._repeated()))

    def _repeated(self) -> dict[str, Tensor]:
        """The buffers, every row beyond the last one being a copy of it."""
        return {
            name: buffer.index_select(0, torch.minimum(self._each, last)) if len(buffer) else buffer
            for (name, buffer), last in zip(self._buffers.items(), self._last, strict=True)
        }


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MisuseError(
            f"torch cannot compute on the device {name!r} here ({reason}); use another, like cpu"
        ) from None
    return device


def _lane(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane(device)
