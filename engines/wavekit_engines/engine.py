"""What a backend offers the decoder: graphs opened once, buffers bound by name, runs without copies.

An `Engine` is one opened graph, shared by everything that runs it; a `Binding` is one runner's set of buffers. A bound
array is read and written in place at every run, so a caller changes a number by writing into the array and rebinds only
when a shape changes. Only caches may lie where the host does not reach: an engine makes those that its bindings write.
Backends: `ort_engine` (ONNX Runtime), `torch_engine`.
"""

from typing import Any, Protocol

import numpy.typing as npt

from wavekit_engines.kv_cache import KVCache

Array = npt.NDArray[Any]


class Binding(Protocol):
    """One set of buffers for one engine. Not for use by two threads at once."""

    def bind_input(self, name: str, array: Array) -> None:
        """Read input ``name`` from this C-contiguous array from now on."""
        ...

    def bind_output(self, name: str, array: Array) -> None:
        """Write output ``name`` into this C-contiguous array from now on; it may be one bound as an input too."""
        ...

    def bind_cache(self, name: str, cache: KVCache, index: int) -> None:
        """Append to layer ``index`` of a cache that the engine made: it is ``key_<name>`` and ``value_<name>``."""
        ...

    def run(self) -> None:
        """Run the graph once on the bound buffers and wait for it."""
        ...


class Engine(Protocol):
    """An opened graph. Any number of bindings may run at the same time."""

    def bind(self) -> Binding:
        """A new, empty set of buffers."""
        ...

    def cache(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str) -> KVCache:
        """A cache of one sequence, which any bindings of this engine may append to."""
        ...

    def close(self) -> None:
        """Free the engine; its bindings must not be run again."""
        ...
