"""All that the runtime asks of CUDA, behind a narrow protocol, and NVIDIA's own bindings behind that.

Addresses are integers, of the device or of pinned memory of the host. What is enqueued on a stream runs in its order
and when the device comes to it; only `Cuda.wait` makes the host wait. Nothing here knows TensorRT or torch.
"""

import ctypes
import importlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from wavekit_engines.engine import Array
from wavekit_engines.errors import MisuseError, WavekitError

Made = TypeVar("Made", bound=object)

_NEEDED = (
    "running TensorRT engines needs cuda-bindings, not installed here; in a clone of wavekit: "
    "pip install -c constraints.txt -e '.[tensorrt]'"
)


class Cuda(Protocol):
    """One device. Every method may raise WavekitError with CUDA's reason; `enter` comes first on every thread."""

    def enter(self) -> None:
        """Let this thread work on the device."""
        ...

    def capability(self) -> str:
        """The compute capability, as in 8.9."""
        ...

    def alloc(self, size: int) -> int:
        """Memory of the device, which begins where TensorRT wants tensors to begin."""
        ...

    def free(self, address: int) -> None:
        """Free what `alloc` gave, once the device is done with it."""
        ...

    def alloc_pinned(self, size: int) -> int:
        """Memory of the host that the device copies from and to by itself."""
        ...

    def free_pinned(self, address: int) -> None:
        """Free what `alloc_pinned` gave."""
        ...

    def zero(self, address: int, size: int, stream: int) -> None:
        """Enqueue: set memory of the device to zero."""
        ...

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Enqueue: copy within the device, or between it and pinned memory."""
        ...

    def copy_rows(self, target: int, source: int, pitches: tuple[int, int], size: int, rows: int, stream: int) -> None:
        """Enqueue: copy ``size`` bytes of every row; rows begin ``pitches`` bytes apart, in target and in source."""
        ...

    def make_stream(self) -> int:
        """A stream, which does not wait for any other by itself."""
        ...

    def free_stream(self, stream: int) -> None:
        """Free a stream that has nothing left to do."""
        ...

    def make_event(self) -> int:
        """An event that nothing was recorded in."""
        ...

    def free_event(self, event: int) -> None:
        """Free an event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Let the event stand for all that is on the stream so far."""
        ...

    def follow(self, stream: int, event: int) -> None:
        """Enqueue: wait for an event, while the host goes on."""
        ...

    def wait(self, event: int) -> None:
        """Wait, here, for an event; what is copied to pinned memory before it can be read then."""
        ...

    def begin_capture(self, stream: int) -> None:
        """From now on what this thread enqueues on the stream is recorded instead."""
        ...

    def end_capture(self, stream: int) -> int:
        """A graph of what was recorded; it stays usable whatever `begin_capture` is followed by."""
        ...

    def launch(self, graph: int, stream: int) -> None:
        """Enqueue all of a graph."""
        ...

    def free_graph(self, graph: int) -> None:
        """Free a graph that is not running."""
        ...


class Owned:
    """What CUDA gave, given back once nobody holds this any more; ``address`` names it."""

    def __init__(self, address: int, give_back: Callable[[int], None]) -> None:
        self.address = address
        # Not at the end of the program, when the driver may be gone; all of it goes then anyway.
        weakref.finalize(self, give_back, address).atexit = False


def device_memory(cuda: Cuda, size: int) -> Owned:
    """Memory of the device."""
    return Owned(cuda.alloc(max(size, 1)), cuda.free)


class Pinned(Owned):
    """Memory of the host that the device can reach; ``array`` is all of it."""

    def __init__(self, cuda: Cuda, shape: tuple[int, ...], dtype: str) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        super().__init__(cuda.alloc_pinned(max(size, 1)), cuda.free_pinned)
        memory = memoryview((ctypes.c_uint8 * size).from_address(self.address)).cast("B")
        self.array: Array = np.frombuffer(memory, dtype).reshape(shape)


def open_cuda(device: str) -> Cuda:
    """CUDA on a device.

    Args:
        device: ``cuda``, or ``cuda:1`` for a second GPU.

    Raises:
        MisuseError: there is no such device here, or no cuda-bindings.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise MisuseError(f"TensorRT engines have no device {device!r}; take cuda or, for a second GPU, cuda:1")
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        raise MisuseError(_NEEDED) from None
    return _NvidiaCuda(runtime, int(number or "0"))


def capability_here() -> str | None:
    """The compute capability of the first GPU, None where that cannot be asked."""
    try:
        return open_cuda("cuda").capability()
    except WavekitError:
        return None


class _NvidiaCuda:
    """`Cuda` by cuda-bindings, whose functions return an error code before what they return."""

    def __init__(self, runtime: Any, device: int) -> None:
        self._cuda, self._device = runtime, device
        error, count = runtime.cudaGetDeviceCount()
        if error != runtime.cudaError_t.cudaSuccess or device >= count:
            there = "none" if not count else f"{count}, counted from 0"
            reason = "" if error == runtime.cudaError_t.cudaSuccess else f": {self._said(error)}"
            raise MisuseError(
                f"TensorRT engines run on an NVIDIA GPU, and cuda:{device} is not here (there is {there}{reason}); "
                "take --engine onnxruntime"
            )

    def _said(self, error: Any) -> str:
        return str(self._cuda.cudaGetErrorString(error)[1].decode())

    def _done(self, result: tuple[Any, ...]) -> Any:
        """What a call returned, without its error code."""
        error, *values = result
        if error == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            raise WavekitError(
                "the GPU is out of memory: close other programs, generate fewer texts at once, or build engines with a "
                "smaller --max-context"
            )
        if error != self._cuda.cudaError_t.cudaSuccess:
            raise WavekitError(f"CUDA failed: {self._said(error)}")
        return values[0] if values else None

    def enter(self) -> None:
        self._done(self._cuda.cudaSetDevice(self._device))

    def capability(self) -> str:
        names = self._cuda.cudaDeviceAttr
        wanted = names.cudaDevAttrComputeCapabilityMajor, names.cudaDevAttrComputeCapabilityMinor
        return ".".join(str(self._done(self._cuda.cudaDeviceGetAttribute(name, self._device))) for name in wanted)

    def alloc(self, size: int) -> int:
        return int(self._done(self._cuda.cudaMalloc(size)))

    def free(self, address: int) -> None:
        self._cuda.cudaFree(address)

    def alloc_pinned(self, size: int) -> int:
        return int(self._done(self._cuda.cudaHostAlloc(size, self._cuda.cudaHostAllocDefault)))

    def free_pinned(self, address: int) -> None:
        self._cuda.cudaFreeHost(address)

    def zero(self, address: int, size: int, stream: int) -> None:
        self._done(self._cuda.cudaMemsetAsync(address, 0, size, stream))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        self._done(self._cuda.cudaMemcpyAsync(target, source, size, kind, stream))

    def copy_rows(self, target: int, source: int, pitches: tuple[int, int], size: int, rows: int, stream: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        self._done(self._cuda.cudaMemcpy2DAsync(target, pitches[0], source, pitches[1], size, rows, kind, stream))

    def make_stream(self) -> int:
        return int(self._done(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking)))

    def free_stream(self, stream: int) -> None:
        self._cuda.cudaStreamDestroy(stream)

    def make_event(self) -> int:
        return int(self._done(self._cuda.cudaEventCreateWithFlags(self._cuda.cudaEventDisableTiming)))

    def free_event(self, event: int) -> None:
        self._cuda.cudaEventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        self._done(self._cuda.cudaEventRecord(event, stream))

    def follow(self, stream: int, event: int) -> None:
        self._done(self._cuda.cudaStreamWaitEvent(stream, event, 0))

    def wait(self, event: int) -> None:
        self._done(self._cuda.cudaEventSynchronize(event))

    def begin_capture(self, stream: int) -> None:
        # Other threads go on allocating and copying meanwhile.
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._done(self._cuda.cudaStreamBeginCapture(stream, mode))

    def end_capture(self, stream: int) -> int:
        graph = self._done(self._cuda.cudaStreamEndCapture(stream))
        try:
            return int(self._done(self._cuda.cudaGraphInstantiate(graph, 0)))
        finally:
            self._cuda.cudaGraphDestroy(graph)

    def launch(self, graph: int, stream: int) -> None:
        self._done(self._cuda.cudaGraphLaunch(graph, stream))

    def free_graph(self, graph: int) -> None:
        self._cuda.cudaGraphExecDestroy(graph)
