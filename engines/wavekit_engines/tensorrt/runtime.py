"""TensorRT engines as a backend: arrays of the host in and out, weights, caches and what a pass needs on the GPU.

An engine is loaded once and shared by its bindings. A binding has a lane, buffers whose addresses never change, and a
context for each profile it uses. Kernels choose their order of adding by the number of rows, so a pass of up to
``--max-tree`` rows always runs with exactly that many: the last row is repeated, goes to cache rows that are not in
use, and is not copied back. So a row of a pass has the very same numbers whether it ran alone or beside others, plain
decoding writes what speculation writes, and one recorded CUDA graph serves all of decoding.

What differs from the bundle's own graphs is in `graphs.standard_graph`; `buffers` makes it of what is bound. Nothing
here has run on a GPU: tests run it against an imitation of CUDA and of the library.
"""

from collections.abc import Mapping

import numpy as np

from wavekit_engines.bundle import Bundle, GraphInfo, TensorInfo
from wavekit_engines.engine import Array
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.kv_cache import KVCache
from wavekit_engines.tensorrt.buffers import Masks, Rows, Table
from wavekit_engines.tensorrt.cuda import Cuda, open_cuda
from wavekit_engines.tensorrt.device_cache import DeviceCache
from wavekit_engines.tensorrt.engine_cache import FOLDER, EngineInfo, part_of
from wavekit_engines.tensorrt.found_engines import Here, find_engines, rebuild
from wavekit_engines.tensorrt.library import installed
from wavekit_engines.tensorrt.passes import Lane, Passes
from wavekit_engines.tensorrt.profiles import profiles
from wavekit_engines.tensorrt.runtime_library import LoadedEngine, Runtime

_FIRST_ROW = "first_row"
_LAST_ROWS = "last_rows"
_UNUSED = frozenset({"total_rows"})  # the mask says it


class TensorRTEngines:
    """The engines of a bundle that fit this machine, opened one by one on one GPU."""

    def __init__(self, bundle: Bundle, device: str) -> None:
        """Find them.

        Args:
            bundle: the bundle, with engines that `wavekit build` made.
            device: ``cuda``, or ``cuda:1`` for a second GPU.

        Raises:
            MisuseError: there is no library, no GPU, or no engine that fits both.
            BundleError: an engine is damaged.
        """
        library, version = installed()
        self._cuda = open_cuda(device)
        self._cuda.enter()
        self._bundle, self._here = bundle, Here(library, version, self._cuda.capability())
        self._found = find_engines(bundle, self._here)
        self._runtime = Runtime(library)
        one = next(iter(self._found.values()))
        self.limits = one.limits
        self.rounds = one.precision != "fp32"
        """Whether activations are rounded."""

    def engine(self, graph: GraphInfo) -> "TensorRTEngine":
        """Load the engine of a graph.

        Raises:
            WavekitError: the library does not take it, or the GPU has no room.
        """
        part = part_of(graph)
        info = self._found[part]
        file = self._bundle.path / FOLDER / f"{info.name}.engine"
        try:
            loaded = self._runtime.load(file, part)
        except WavekitError as error:
            raise WavekitError(f"{error}; {rebuild(self._bundle, self._found, self._here)}") from None
        except OSError as error:
            raise WavekitError(f"cannot read {file}: {error.strerror}") from None
        return TensorRTEngine(self._cuda, loaded, info, graph)


class TensorRTEngine:
    """One graph's engine."""

    def __init__(self, cuda: Cuda, loaded: LoadedEngine, info: EngineInfo, graph: GraphInfo) -> None:
        self.cuda, self.info = cuda, info
        self._loaded: LoadedEngine | None = loaded
        self._profiles = profiles(graph, info.limits)

    def bind(self) -> "TensorRTBinding":
        """A new set of buffers, with a lane of its own."""
        return TensorRTBinding(self)

    def cache(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str) -> KVCache:
        """A cache on the GPU, of the engine's dtype.

        Raises:
            MisuseError: the engine was built for fewer rows.
            WavekitError: the GPU has no room.
        """
        rows, filled = self.info.capacity, self.info.limits.tree - 1
        if capacity + filled > rows:
            raise MisuseError(
                f"a text that takes {capacity} cache rows does not fit into TensorRT engines built with --max-context "
                f"{self.info.limits.context} --max-tree {self.info.limits.tree}; build larger ones"
            )
        self.cuda.enter()
        of_keys = next(tensor for tensor in self.info.inputs if tensor.name.startswith("key_"))
        return DeviceCache(self.cuda, (layers, kv_heads, head_dim), capacity, rows, of_keys.dtype)

    def close(self) -> None:
        """Let go of the engine; its weights go with the last binding."""
        self._loaded = None

    def most(self, dim: str) -> int:
        """The largest that a free dimension may be."""
        return max(profile.dims[dim][2] for profile in self._profiles)

    def plan(self, sizes: Mapping[str, int]) -> tuple[int, bool, dict[str, int]]:
        """How a pass runs: the profile, whether its shape is the fixed one, and the size of every free dimension."""
        tree = self.info.limits.tree
        filled = {dim: tree if 0 < size <= tree else size for dim, size in sizes.items()}
        for index, profile in reversed([*enumerate(self._profiles)]):
            if all(profile.dims[dim][0] <= size <= profile.dims[dim][2] for dim, size in filled.items()):
                return index, all(size in (0, tree) for size in filled.values()), filled
        rows = ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
        raise WavekitError(f"{self.info.part} has no profile for a pass of {rows}; build with a larger --max-tree")

    def passes(self, profile: int, lane: Lane, addresses: Mapping[str, int], fixed: bool) -> Passes:
        """Contexts of a profile on a lane."""
        if self._loaded is None:
            raise WavekitError(f"{self.info.part} was closed")
        return Passes(self._loaded, profile, lane, addresses, fixed)


class TensorRTBinding:
    """Arrays of one runner, and their counterparts on the GPU."""

    def __init__(self, engine: TensorRTEngine) -> None:
        self._engine, cuda = engine, engine.cuda
        cuda.enter()
        self._lane = Lane(cuda)
        self._inputs: dict[str, Rows] = {}
        self._outputs: dict[str, Rows] = {}
        self._masks: dict[str, Masks] = {}
        self._tables: dict[str, Table] = {}
        self._arrays: dict[str, Array] = {}
        self._written: dict[str, Array] = {}
        self._caches: dict[str, DeviceCache] = {}
        self._addresses: dict[str, int] = {}
        self._passes: dict[tuple[int, bool], Passes] = {}
        for tensor in engine.info.inputs:
            self._make_input(tensor)
        for tensor in engine.info.outputs:
            if _is_free(tensor):
                self._outputs[tensor.name] = self._rows(tensor)
        made: list[Mapping[str, Rows | Masks | Table]] = [self._inputs, self._outputs, self._masks, self._tables]
        for buffers in made:
            self._addresses |= {name: buffer.address for name, buffer in buffers.items()}
        self._lane.wait()

    def _make_input(self, tensor: TensorInfo) -> None:
        cuda, stream = self._engine.cuda, self._lane.stream
        if tensor.name.startswith("mask"):
            self._masks[tensor.name] = Masks(cuda, tensor, self._engine.most("S"), stream)
        elif _is_free(tensor):
            self._inputs[tensor.name] = self._rows(tensor)
        elif not tensor.name.startswith(("key_", "value_")):
            self._tables[tensor.name] = Table(cuda, tensor, stream)

    def _rows(self, tensor: TensorInfo) -> Rows:
        dim = next(dim for dim in tensor.shape if isinstance(dim, str))
        return Rows(self._engine.cuda, tensor, self._engine.most(dim))

    def bind_input(self, name: str, array: Array) -> None:
        """See `engine.Binding.bind_input`; rotary tables are taken over here and now."""
        if name in self._tables:
            self._engine.cuda.enter()
            self._tables[name].write(array, self._lane.stream)
            self._lane.wait()
        elif name not in _UNUSED:
            self._arrays[name] = array

    def bind_output(self, name: str, array: Array) -> None:
        """See `engine.Binding.bind_output`."""
        self._written[name] = array

    def bind_cache(self, name: str, cache: KVCache, index: int) -> None:
        """See `engine.Binding.bind_cache`."""
        assert isinstance(cache, DeviceCache)
        self._caches[name] = cache
        for part, address in zip(("key", "value"), cache.addresses(index), strict=True):
            self._addresses |= {f"{part}_{name}": address, f"{part}_{name}_out": address}
        self._passes.clear()  # what was recorded writes to another cache

    def run(self) -> None:
        """Run once. Raises WavekitError when TensorRT or CUDA fails (out of memory, a bad shape)."""
        self._engine.cuda.enter()
        try:
            self._enqueue()
        finally:  # whatever happens, the GPU does not go on with buffers that the next pass fills
            self._lane.wait()
        for name, array in self._written.items():
            self._outputs[name].read(array)

    def _enqueue(self) -> None:
        arrays, stream = self._arrays, self._lane.stream
        sizes = {rows.dim: rows.count(arrays[name]) for name, rows in self._inputs.items()}
        profile, fixed, filled = self._engine.plan(sizes)
        shapes = {}
        for cache in {id(cache): cache for cache in self._caches.values()}.values():
            cache.follow(stream)
        for name, rows in self._inputs.items():
            rows.send(arrays[name], filled[rows.dim], stream)
            shapes[name] = rows.shape(filled[rows.dim])
        if self._masks:
            first = int(arrays[_LAST_ROWS][0]) - sizes["S"] + 1
            self._tables[_FIRST_ROW].write(np.array([first]), stream)
        for name, mask in self._masks.items():
            mask.send(arrays[name], first, filled["S"], stream)
            shapes[name] = mask.shape(filled["S"])
        key = profile, fixed
        if key not in self._passes:
            self._passes[key] = self._engine.passes(profile, self._lane, dict(self._addresses), fixed)
        self._passes[key].enqueue(shapes)
        for name, array in self._written.items():
            self._outputs[name].fetch(array, stream)


def _is_free(tensor: TensorInfo) -> bool:
    return any(isinstance(dim, str) for dim in tensor.shape)
