"""How the passes of one binding are enqueued: its stream, its contexts, and CUDA graphs of passes of a fixed shape.

A pass of a fixed shape runs as it is the first time, in which the library makes what a recording must not, is recorded
the second time and replayed from then on. Where it cannot be recorded the library is asked to record by itself, if it
knows how, and otherwise passes run as they are.
"""

import logging
import threading
from collections.abc import Mapping

from wavekit_engines.errors import WavekitError
from wavekit_engines.tensorrt.cuda import Cuda, Owned
from wavekit_engines.tensorrt.runtime_library import Context, LoadedEngine

_logger = logging.getLogger(__name__)
_recording = threading.Lock()
"""Held while one thread records: memory that another frees meanwhile may spoil the recording."""

Shape = tuple[int, ...]


class Lane:
    """One stream, and an event for its end."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._owned = Owned(cuda.make_stream(), cuda.free_stream)
        self._done = Owned(cuda.make_event(), cuda.free_event)
        self.stream = self._owned.address

    def wait(self) -> None:
        """Return once everything so far is done."""
        self.cuda.record(self._done.address, self.stream)
        self.cuda.wait(self._done.address)


class Passes:
    """One profile of an engine on a lane; ``addresses`` by tensor stay what they are.

    ``fixed``: all passes have one shape.
    """

    def __init__(
        self, engine: LoadedEngine, profile: int, lane: Lane, addresses: Mapping[str, int], fixed: bool
    ) -> None:
        self._engine, self._profile, self._lane, self._addresses = engine, profile, lane, addresses
        self._fixed = self._records = fixed
        self._graph: Owned | None = None
        self._shapes: dict[str, Shape] = {}
        self._context = self._made(captures=False)

    def _made(self, captures: bool) -> Context:
        context = self._engine.context(self._profile, self._lane.stream, self._fixed, captures)
        for name, address in self._addresses.items():
            context.set_address(name, address)
        self._shapes = {}
        return context

    def enqueue(self, shapes: Mapping[str, Shape]) -> None:
        """Enqueue a pass with inputs of these shapes."""
        if self._graph is not None:
            self._lane.cuda.launch(self._graph.address, self._lane.stream)
        elif self._records and self._shapes:
            self._record(shapes)
        else:
            self._run(shapes)

    def _run(self, shapes: Mapping[str, Shape]) -> None:
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._context.set_shape(name, shape)
                self._shapes[name] = shape
        self._context.enqueue(self._lane.stream)

    def _record(self, shapes: Mapping[str, Shape]) -> None:
        """Record a pass and replay it, or run it where that cannot be."""
        if not self._context.capturable(self._lane.stream):
            _logger.info("the library does not let a pass be recorded; it may record by itself")
            self._records = False
            self._context = self._made(captures=True)
        else:
            try:
                self._graph = self._recorded(shapes)
            except WavekitError as error:
                _logger.warning("a pass cannot be recorded as a CUDA graph, and runs without: %s", error)
                self._records = False
        self.enqueue(shapes)

    def _recorded(self, shapes: Mapping[str, Shape]) -> Owned:
        cuda, stream = self._lane.cuda, self._lane.stream
        with _recording:
            cuda.begin_capture(stream)
            try:
                self._run(shapes)
            except WavekitError:
                self._end_in_vain()
                raise
            return Owned(cuda.end_capture(stream), cuda.free_graph)

    def _end_in_vain(self) -> None:
        """Leave recording; what failed says more than that nothing was recorded."""
        cuda = self._lane.cuda
        try:
            cuda.free_graph(cuda.end_capture(self._lane.stream))
        except WavekitError as error:
            _logger.debug("recording ended: %s", error)
