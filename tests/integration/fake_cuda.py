"""An imitation of CUDA in the host's memory, for running the TensorRT runtime where there is no GPU.

A stream does nothing until somebody waits for it, so whatever is read too early, or written into before the copy that
was to read it, holds the wrong numbers. Fresh memory holds numbers that are none. An address that is not allocated, a
copy beyond an allocation and anything that CUDA refuses during a capture are errors.
"""

import ctypes
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wavekit_engines.errors import WavekitError

Work = Callable[[], None]
ALIGNMENT = 256


class FakeCudaError(AssertionError):
    """The runtime did what CUDA has no answer for."""


@dataclass
class _Stream:
    waiting: deque[Work] = field(default_factory=deque)
    captured: list[Work] | None = None


@dataclass
class _Event:
    stream: _Stream | None = None
    position: Work | None = None


class FakeCuda:
    """One device; ``room`` bytes of memory, a capability, and switches for what fails."""

    def __init__(self, capability: str = "8.9", room: int = 1 << 40) -> None:
        self._capability, self.room = capability, room
        self._memory: dict[int, tuple[object, int]] = {}
        self._objects: dict[int, object] = {}
        self._next, self._lock = 1, threading.RLock()
        self._entered = threading.local()
        self.launched = 0
        self.capture_fails = False

    # Memory

    def enter(self) -> None:
        self._entered.here = True

    def capability(self) -> str:
        return self._capability

    def alloc(self, size: int) -> int:
        self._not_capturing()
        if size > self.room:
            raise WavekitError("the GPU is out of memory: close other programs")
        self.room -= size
        return self._allocated(size)

    def _allocated(self, size: int) -> int:
        with self._lock:
            buffer = ctypes.create_string_buffer(size + ALIGNMENT)
            ctypes.memset(buffer, 0xFF, size + ALIGNMENT)  # not a number in any floating-point format
            address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
            self._memory[address] = buffer, size
            return address

    def free(self, address: int) -> None:
        with self._lock:
            self._drain_all()
            self.room += self._memory.pop(address)[1]

    def alloc_pinned(self, size: int) -> int:
        self._not_capturing()
        return self._allocated(size)

    def free_pinned(self, address: int) -> None:
        with self._lock:
            self._drain_all()
            del self._memory[address]

    def check(self, address: int, size: int) -> None:
        """Raises FakeCudaError unless all of this memory is allocated."""
        with self._lock:
            known = sorted(self._memory)
            at = bisect_right(known, address) - 1
            if at < 0 or address + size > known[at] + self._memory[known[at]][1]:
                raise FakeCudaError(f"{size} bytes at {address} are not allocated")

    # Work

    def zero(self, address: int, size: int, stream: int) -> None:
        self.check(address, size)
        self.enqueue(stream, lambda: ctypes.memset(address, 0, size))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.check(target, size)
        self.check(source, size)
        self.enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def copy_rows(self, target: int, source: int, pitches: tuple[int, int], size: int, rows: int, stream: int) -> None:
        if size > min(pitches):
            raise FakeCudaError(f"rows of {size} bytes are {pitches} bytes apart")
        for start, pitch in ((target, pitches[0]), (source, pitches[1])):
            self.check(start, (rows - 1) * pitch + size)

        def work() -> None:
            for row in range(rows):
                ctypes.memmove(target + row * pitches[0], source + row * pitches[1], size)

        self.enqueue(stream, work)

    def enqueue(self, stream: int, work: Work) -> None:
        """Let the stream do this in its turn, or record it."""
        if not getattr(self._entered, "here", False):
            raise FakeCudaError("this thread did not enter the device")
        with self._lock:
            found = self._stream(stream)
            (found.waiting if found.captured is None else found.captured).append(work)

    # Streams and events

    def make_stream(self) -> int:
        return self._made(_Stream())

    def free_stream(self, stream: int) -> None:
        with self._lock:
            self._drain(self._stream(stream))
            del self._objects[stream]

    def make_event(self) -> int:
        return self._made(_Event())

    def free_event(self, event: int) -> None:
        del self._objects[event]

    def record(self, event: int, stream: int) -> None:
        found = self._event(event)
        self.enqueue(stream, marker := lambda: None)
        found.stream, found.position = self._stream(stream), marker

    def follow(self, stream: int, event: int) -> None:
        found = self._event(event)
        source, position = found.stream, found.position
        self.enqueue(stream, lambda: self._drain(source, position))

    def wait(self, event: int) -> None:
        self._not_capturing()
        with self._lock:
            found = self._event(event)
            self._drain(found.stream, found.position)

    def _drain(self, stream: _Stream | None, until: Work | None = None) -> None:
        """Do what waits on a stream, up to a marker if that is still waiting."""
        if stream is None or (until is not None and until not in stream.waiting):
            return
        while stream.waiting:
            work = stream.waiting.popleft()
            work()
            if work is until:
                return

    def _drain_all(self) -> None:
        for found in list(self._objects.values()):
            if isinstance(found, _Stream):
                self._drain(found)

    # Graphs

    def begin_capture(self, stream: int) -> None:
        self._stream(stream).captured = []
        self._entered.capturing = True

    def end_capture(self, stream: int) -> int:
        found, self._entered.capturing = self._stream(stream), False
        recorded, found.captured = found.captured, None
        if self.capture_fails:
            raise WavekitError("CUDA failed: operation not permitted when stream is capturing")
        return self._made(recorded)

    def launch(self, graph: int, stream: int) -> None:
        recorded = self._objects[graph]
        assert isinstance(recorded, list)
        self.launched += 1
        for work in recorded:
            self.enqueue(stream, work)

    def free_graph(self, graph: int) -> None:
        del self._objects[graph]

    def _not_capturing(self) -> None:
        if getattr(self._entered, "capturing", False):
            raise FakeCudaError("not permitted while this thread captures")

    def _made(self, made: object) -> int:
        with self._lock:
            self._next += 1
            self._objects[self._next] = made
            return self._next

    def _stream(self, stream: int) -> _Stream:
        found = self._objects.get(stream)
        if not isinstance(found, _Stream):
            raise FakeCudaError(f"{stream} is no stream")
        return found

    def _event(self, event: int) -> _Event:
        found = self._objects.get(event)
        if not isinstance(found, _Event):
            raise FakeCudaError(f"{event} is no event")
        return found
