"""Requests become generations, and generations answers: admission, disconnection, measurement, an end to it all."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wavekit.llm import LLM, Prompt
from wavekit.options import Options
from wavekit.results import GenerationResult, Step
from wavekit.serving.admission import Admission
from wavekit.serving.answers import Answer
from wavekit.serving.errors import api_error
from wavekit.serving.guard import logger
from wavekit.serving.metrics import Metrics
from wavekit.streams import AsyncGenerationStream, GenerationStream


class Service:
    """Serves one loaded bundle."""

    def __init__(self, llm: LLM, running: int, waiting: int) -> None:
        """Let ``running`` texts be written at a time, for which ``llm`` must be open, and ``waiting`` requests wait."""
        self.llm = llm
        self.admission = Admission(running, waiting)
        self.metrics = Metrics(lambda: llm.statistics, lambda: self.admission.inside)
        self._streams: set[AsyncGenerationStream] = set()

    async def answer(self, asked: Sequence[tuple[Prompt, Options]], answer: Answer, streamed: bool) -> Response:
        """The response to a request for one or more texts: it must be sent, since its end lets the next request in.

        Raises:
            ApiError: the server is full or stopping.
            MisuseError: the request asks for what cannot be done.
        """
        entry, began = ExitStack(), perf_counter()
        entry.enter_context(self.admission.entry(len(asked)))
        try:
            # Encoding a long prompt or reading a schema takes a while, and the event loop has others to serve.
            streams = await asyncio.to_thread(lambda: [self.llm.stream(prompt, **options) for prompt, options in asked])
        except BaseException:
            entry.close()
            raise
        return _Written(self, streams, answer, streamed, began, entry)

    def start(self, stream: GenerationStream, began: float) -> AsyncGenerationStream:
        """Have the text written, when its turn comes."""

        def start() -> GenerationStream:
            self.metrics.began(perf_counter() - began)
            return stream

        written = self.llm.read_async(start)
        self._streams.add(written)
        return written

    def end(self, stream: AsyncGenerationStream) -> None:
        """A stream's reader has what it wanted."""
        self._streams.discard(stream)

    def drain(self) -> None:
        """Let nobody in any more."""
        self.admission.draining = True

    def cancel(self) -> None:
        """End all texts where they are; their readers get an orderly end."""
        for stream in self._streams:
            stream.cancel()


class _Written(Response):
    """Texts as a response, while they are written or as a whole; ends the texts when the client goes."""

    def __init__(
        self,
        service: Service,
        sources: Sequence[GenerationStream],
        answer: Answer,
        streamed: bool,
        began: float,
        entry: ExitStack,
    ) -> None:
        super().__init__()
        self._service, self._sources, self._answer, self._streamed = service, sources, answer, streamed
        self._began, self._entry = began, entry
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._entry:
            streams = [self._service.start(source, self._began) for source in self._sources]
            watcher = asyncio.create_task(self._watch(receive, streams))
            try:
                if self._streamed:
                    await self._send_events(streams, scope, send)
                else:
                    await self._send_whole(streams, scope, receive, send)
            finally:
                watcher.cancel()
                for stream in streams:
                    stream.cancel()
                for stream in streams:
                    await stream.aclose()
                    self._service.end(stream)

    async def _watch(self, receive: Receive, streams: Sequence[AsyncGenerationStream]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        for stream in streams:
            stream.cancel()

    async def _send_whole(
        self, streams: Sequence[AsyncGenerationStream], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async def read(stream: AsyncGenerationStream) -> GenerationResult:
            async for _ in self._steps(stream, scope):
                pass
            return stream.result

        results = await _all(read(stream) for stream in streams)
        if not self._gone:
            await JSONResponse(self._answer.whole(results))(scope, receive, send)

    async def _send_events(self, streams: Sequence[AsyncGenerationStream], scope: Scope, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += [(b"x-accel-buffering", b"no")]  # proxies such as nginx hold a stream back otherwise
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def tell(*chunks: Any) -> None:
            body = b"".join(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks)
            if body and not self._gone:
                await send({"type": "http.response.body", "body": body, "more_body": True})

        async def read(choice: int, stream: AsyncGenerationStream) -> GenerationResult:
            await tell(*self._answer.first(choice))
            async for step in self._steps(stream, scope):
                await tell(*self._answer.chunk(choice, step))
            await tell(*self._answer.last(choice, stream.result))
            return stream.result

        try:
            await tell(*self._answer.end(await _all(read(*each) for each in enumerate(streams))))
        except OSError:
            raise
        except Exception as error:  # the status is sent: all that is left is to say so in the stream
            logger.error("%s failed in mid-stream: %s: %s", scope["path"], type(error).__name__, error)
            logger.debug("where it failed", exc_info=True)
            await tell(api_error(error).body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _steps(self, stream: AsyncGenerationStream, scope: Scope) -> AsyncIterator[Step]:
        """A text's steps; when it is finished, it is counted and logged."""
        first: float | None = None
        async for step in stream.steps():
            if first is None and step.token_ids:
                first = perf_counter() - self._began
                self._service.metrics.first_token(first)
            yield step
        result, seconds = stream.result, perf_counter() - self._began
        self._service.metrics.finished(result, seconds, first)
        logger.info(
            "%s: %d + %d tokens, %s, %.2f s, tau %.2f",
            scope["path"],
            result.prompt_tokens,
            len(result.token_ids),
            result.finish_reason,
            seconds,
            result.speculation.tau,
        )


async def _all(texts: Iterable[Coroutine[Any, Any, GenerationResult]]) -> list[GenerationResult]:
    """What coroutines return that run at once; an error of one ends the others."""
    tasks = [asyncio.create_task(text) for text in texts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
