"""Texts handed over while they are written, to a thread that reads them or to a coroutine that awaits them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Executor

from wavekit.results import GenerationResult, Step


class GenerationStream(Iterator[str]):
    """Pieces of a text as they become certain; ``result`` is there once they have run out.

    Any thread may close it, which ends the generation and frees its buffers; ``result`` then holds what was written so
    far. Pieces are read by one thread at a time.
    """

    def __init__(self, steps: Generator[Step, None, GenerationResult], cancelled: threading.Event) -> None:
        """``steps`` end before their next tick once ``cancelled`` is set."""
        self._steps, self._cancelled = steps, cancelled
        self._lock = threading.Lock()
        self._result: GenerationResult | None = None

    def __next__(self) -> str:
        while True:
            text = self.next_step().text
            if text:
                return text

    def next_step(self) -> Step:
        """What the next tick adds. Raises StopIteration when the text is finished."""
        with self._lock:
            try:
                return next(self._steps)
            except StopIteration as end:
                self._result = self._result or end.value
                raise StopIteration from None

    def steps(self) -> Iterator[Step]:
        """The same text tick by tick, with token ids and what was accepted of a draft, instead of pieces."""
        while True:
            try:
                step = self.next_step()
            except StopIteration:
                return
            yield step

    @property
    def result(self) -> GenerationResult:
        """The finished text. Raises RuntimeError while pieces are still to come."""
        if self._result is None:
            raise RuntimeError("the text is not finished: read the stream to its end first")
        return self._result

    def cancel(self) -> None:
        """End the generation before its next tick, without waiting for that; the reader finds the stream at its end."""
        self._cancelled.set()

    def close(self) -> None:
        """End the generation now: after this its buffers are free. Waits for a tick that is under way."""
        self.cancel()
        for _ in self.steps():
            pass


class AsyncGenerationStream(AsyncIterator[str]):
    """The same for coroutines: a thread writes, the event loop reads.

    Cancelling the task that reads ends the generation, and so does `aclose`, or letting go of the stream.
    """

    def __init__(self, start: Callable[[], GenerationStream], executor: Executor) -> None:
        """Have ``executor`` call ``start`` and write; errors of either are raised where the stream is read.

        Must be made where an event loop runs.
        """
        self._ended = True
        self._writer = _Writer(start, asyncio.get_running_loop())
        self._begun = executor.submit(self._writer.write)
        self._ended = False

    def __aiter__(self) -> "AsyncGenerationStream":
        return self

    async def __anext__(self) -> str:
        while True:
            text = (await self.next_step()).text
            if text:
                return text

    async def next_step(self) -> Step:
        """What the next tick adds. Raises StopAsyncIteration when the text is finished."""
        if self._ended:
            raise StopAsyncIteration
        try:
            step = await self._writer.queue.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(step, Step):
            return step
        self._ended = True
        if step is not None:
            raise step
        raise StopAsyncIteration

    async def steps(self) -> AsyncIterator[Step]:
        """The same text tick by tick."""
        while True:
            try:
                step = await self.next_step()
            except StopAsyncIteration:
                return
            yield step

    @property
    def result(self) -> GenerationResult:
        """The finished text. Raises RuntimeError while pieces are still to come."""
        if not self._ended or self._writer.stream is None:
            raise RuntimeError("the text is not finished: read the stream to its end first")
        return self._writer.stream.result

    def cancel(self) -> None:
        """End the generation before its next tick, without waiting for that; one that still waits ends here and now."""
        self._writer.cancel()
        if self._begun.cancel():
            self._writer.write()

    async def aclose(self) -> None:
        """End the generation; after this its buffers are free."""
        self.cancel()
        async for _ in self.steps():
            pass

    def __del__(self) -> None:
        if not self._ended:
            self._writer.cancel()
            self._begun.cancel()


class _Writer:
    """What the writing thread holds: not the stream that is read, so that letting go of that is noticed."""

    def __init__(self, start: Callable[[], GenerationStream], loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        self.stream: GenerationStream | None = None
        self._start, self._loop = start, loop
        self._cancelled = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self.stream is not None:
                self.stream.cancel()

    def write(self) -> None:
        """Write the text and put its steps into the queue, then None or the error that ended it."""
        end: BaseException | None = None
        try:
            stream = self._start()
            with self._lock:
                self.stream = stream
                if self._cancelled:
                    stream.cancel()
            for step in stream.steps():
                self._put(step)
        except BaseException as error:  # it belongs to the coroutine that reads
            end = error
        self._put(end)

    def _put(self, step: Step | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, step)
        except RuntimeError:  # the event loop is closed: nobody reads any more
            self.cancel()
