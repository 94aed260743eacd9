"""Stands in for TensorRT, building and running: an engine is the graph itself, which ONNX Runtime runs on the CPU.

It runs on the addresses that were set, in `fake_cuda`'s memory and when the stream comes to it, and refuses what
TensorRT refuses: shapes outside the profile, tensors without an address, one that begins at an odd place or is too
small. Keys and values must go in and out at the same address. No engine of the real library is imitated bit by bit.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from fake_cuda import ALIGNMENT, FakeCuda
from fake_tensorrt import (
    Builder as _PretendingBuilder,
)
from fake_tensorrt import (
    IKVCacheUpdateLayer,
    ILogger,
    IProgressMonitor,
    NetworkDefinitionCreationFlag,
    OnnxParser,
    ProfilingVerbosity,
    _Config,
    _Network,
    _Profile,
)

__all__ = ["IKVCacheUpdateLayer", "ILogger", "IProgressMonitor", "NetworkDefinitionCreationFlag", "ProfilingVerbosity"]
__version__ = "1.0"

cuda: FakeCuda | None = None
"""The device that engines run on."""

_SPLIT = b"\n--\n"


class Failures:
    """What goes wrong: ``enqueue`` is asked before every pass."""

    enqueue: Callable[[], bool] = staticmethod(lambda: True)
    capturable = True


class LayerType:
    ATTENTION_INPUT = "attention input"


class _GraphParser(OnnxParser):
    def __init__(self, network: Any, logger: Any) -> None:
        self._network = network

    def parse_from_file(self, path: str) -> bool:
        self._network.model = onnx.load(path)
        return True


globals()["OnnxParser"] = _GraphParser


class _Ranges(_Profile):
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: Any) -> None:
        self.shapes[name] = shapes


class _GraphConfig(_Config):
    def __init__(self) -> None:
        self.profiles: list[Any] = []

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1


class Builder(_PretendingBuilder):
    def create_builder_config(self) -> _GraphConfig:
        return _GraphConfig()

    def create_optimization_profile(self) -> _Ranges:
        return _Ranges()

    def build_serialized_network(self, network: _Network, config: Any) -> bytes | None:
        model: Any = network.model  # type: ignore[attr-defined]
        return json.dumps(config.profiles).encode() + _SPLIT + model.SerializeToString()


class SeekPosition:
    SET, CUR, END = "set", "current", "end"


class IStreamReaderV2:
    pass


class ExecutionContextAllocationStrategy:
    ON_PROFILE_CHANGE = "on profile change"


class CudaGraphStrategy:
    WHOLE_GRAPH_CAPTURE = "whole graph capture"


class DynamicShapesKernelSpecializationStrategy:
    EAGER = "eager"


class _Settings:
    cuda_graph_strategy = "disabled"
    dynamic_shapes_kernel_specialization_strategy = "lazy"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        assert strategy == "on profile change"


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, reader: Any) -> "_Engine | None":
        """Piece by piece, going back once as the real one does."""
        start = reader.read(4, 0)
        assert reader.seek(0, SeekPosition.SET)
        pieces = []
        while piece := reader.read(1 << 16, 0):
            pieces.append(piece)
        data = b"".join(pieces)
        profiles, split, model = data.partition(_SPLIT)
        if not split or not data.startswith(start):
            self._logger.log(ILogger.ERROR, "magic tag does not match")  # type: ignore[attr-defined]
            return None
        return _Engine(json.loads(profiles), model, self._logger)


class _Engine:
    def __init__(self, profiles: list[Any], model: bytes, logger: Any) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.profiles, self.logger = profiles, logger
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.contexts: list[_Context] = []

    def create_runtime_config(self) -> _Settings:
        return _Settings()

    def create_execution_context(self, settings: _Settings) -> "_Context":
        self.contexts.append(_Context(self, settings))
        return self.contexts[-1]


_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class _Context:
    def __init__(self, engine: _Engine, settings: _Settings) -> None:
        self._engine, self.settings = engine, settings
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return profile < len(self._engine.profiles)

    def set_tensor_address(self, name: str, address: int) -> bool:
        session = self._engine.session
        names = {value.name for value in (*session.get_inputs(), *session.get_outputs())}
        if name not in names or address % ALIGNMENT:
            return self._refused(f"no address {address} for {name}")
        self._addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        least, _, most = self._engine.profiles[self._profile][name]
        if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            return self._refused(f"{name}: {shape} is not between {least} and {most}")
        self._shapes[name] = shape
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return Failures.capturable

    def execute_async_v3(self, stream: int) -> bool:
        if not Failures.enqueue():
            return self._refused("an illegal memory access\nwas encountered")
        assert cuda is not None
        session, dims = self._engine.session, dict[str, int]()
        tensors = []
        for value in session.get_inputs():
            shape = self._shapes.get(value.name, tuple(value.shape))
            if any(isinstance(dim, str) for dim in shape):
                return self._refused(f"{value.name} has no shape")
            dims.update({dim: size for dim, size in zip(value.shape, shape, strict=True) if isinstance(dim, str)})
            tensors.append((True, value, shape))
        for value in session.get_outputs():
            tensors.append((False, value, tuple(dims.get(dim, dim) for dim in value.shape)))
        bound = []
        for is_input, value, shape in tensors:
            address, dtype = self._addresses.get(value.name), _DTYPES[value.type]
            if address is None:
                return self._refused(f"{value.name} has no address")
            cuda.check(address, int(np.prod(shape)) * np.dtype(dtype).itemsize)
            bound.append((is_input, value.name, dtype, shape, address))
        for name, address in self._addresses.items():
            if name.endswith("_out") and self._addresses[name.removesuffix("_out")] != address:
                return self._refused(f"{name} does not lie where it goes in")
        cuda.enqueue(stream, lambda: _run(session, bound))
        return True

    def _refused(self, why: str) -> bool:
        self._engine.logger.log(ILogger.ERROR, why)
        return False


def _run(session: ort.InferenceSession, bound: list[Any]) -> None:
    binding = session.io_binding()
    for is_input, name, dtype, shape, address in bound:
        bind = binding.bind_input if is_input else binding.bind_output
        bind(name, "cpu", 0, dtype, list(shape), address)
    session.run_with_iobinding(binding)
