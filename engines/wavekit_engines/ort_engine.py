"""ONNX Runtime as a backend.

One `OrtEngine` is one inference session with its own thread pool. Its bindings hand numpy buffers over by address: the
cache that goes in as past comes out as present in the same memory. Thread counts are always explicit.
"""

from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from wavekit_engines.bundle import GraphInfo
from wavekit_engines.engine import Array
from wavekit_engines.errors import BundleError, WavekitError
from wavekit_engines.kv_cache import KVCache

_CONFIGURATION = {
    # Idle threads let go of the core at the end of a run: the head's session, another stage or the host needs it next.
    "session.force_spinning_stop": "1",
    # Work is handed out in small blocks, so that a core that was interrupted does not hold up the other.
    "session.dynamic_block_base": "4",
}

CPU: tuple[str, ...] = ("CPUExecutionProvider",)


class OrtEngine:
    """An ONNX Runtime session for one graph of a bundle."""

    def __init__(
        self,
        folder: Path,
        info: GraphInfo,
        threads: int,
        *,
        profile: Path | None = None,
        providers: Sequence[str] = CPU,
    ) -> None:
        """Open a graph.

        Args:
            folder: the bundle.
            info: the graph's entry in the manifest, which must match the file.
            threads: threads a run may use, the caller's included.
            profile: write ONNX Runtime's own profile of every node there when the engine closes.
            providers: ONNX Runtime execution providers, in order of preference.

        Raises:
            BundleError: the graph cannot be opened or has other inputs and outputs than the manifest says.
        """
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        for key, value in _CONFIGURATION.items():
            options.add_session_config_entry(key, value)
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        try:
            self.session = ort.InferenceSession(str(folder / info.file), options, providers=list(providers))
        except Exception as error:  # ONNX Runtime raises a dozen unrelated types here
            raise BundleError(f"{folder / info.file} cannot be opened by ONNX Runtime: {_first_line(error)}") from None
        self.info = info
        self._check_names()

    def _check_names(self) -> None:
        for kind, found, said in (
            ("inputs", self.session.get_inputs(), self.info.inputs),
            ("outputs", self.session.get_outputs(), self.info.outputs),
        ):
            names, expected = [value.name for value in found], [tensor.name for tensor in said]
            if names != expected:
                raise BundleError(f"{self.info.file} has {kind} {names}, the manifest says {expected}; export it again")

    def bind(self) -> "OrtBinding":
        """A new set of buffers for this session."""
        return OrtBinding(self.session, self.info.file)

    def cache(self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: str) -> KVCache:
        """See `engine.Engine.cache`."""
        return KVCache(layers, kv_heads, head_dim, capacity, dtype)

    def close(self) -> None:
        """End profiling, if it is on; the session goes with its last binding."""
        self.session.end_profiling()


class OrtBinding:
    """Buffers of one runner, by address; the arrays are kept alive here."""

    def __init__(self, session: ort.InferenceSession, name: str) -> None:
        self._session = session
        self._name = name
        self._io = session.io_binding()
        self._arrays: dict[str, Array] = {}

    def bind_input(self, name: str, array: Array) -> None:
        """See `engine.Binding.bind_input`."""
        self._io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._arrays[name] = array

    def bind_output(self, name: str, array: Array) -> None:
        """See `engine.Binding.bind_output`."""
        self._io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._arrays[name] = array

    def bind_cache(self, name: str, cache: KVCache, index: int) -> None:
        """See `engine.Binding.bind_cache`: past and present are the same memory."""
        for part, rows in ((f"key_{name}", cache.keys(index)), (f"value_{name}", cache.values(index))):
            self.bind_input(part, rows)
            self.bind_output(f"{part}_out", rows)

    def run(self) -> None:
        """Run once. Raises WavekitError when ONNX Runtime fails (out of memory, a bad shape)."""
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:
            raise WavekitError(f"{self._name} failed in ONNX Runtime: {_first_line(error)}") from error


def available_providers() -> list[str]:
    """The execution providers of the ONNX Runtime installed here."""
    providers: list[str] = ort.get_available_providers()
    return providers


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
