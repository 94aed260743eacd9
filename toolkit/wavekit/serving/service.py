"""Requests become generations, and generations answers: admission, disconnection, measurement, an end to it all."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wavekit.llm import LLM, Prompt
from wavekit.options import Options
from wavekit.results import Step
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

    async def answer(self, prompt: Prompt, options: Options, answer: Answer, streamed: bool) -> Response:
        """The response to a request: it must be sent, since its end lets the next request in.

        Raises:
            ApiError: the server is full or stopping.
            MisuseError: the request asks for what cannot be done.
        """
        entry, began = ExitStack(), perf_counter()
        entry.enter_context(self.admission.entry())
        try:
            # Encoding a long prompt or reading a schema takes a while, and the event loop has others to serve.
            stream = await asyncio.to_thread(lambda: self.llm.stream(prompt, **options))
        except BaseException:
            entry.close()
            raise
        return _Written(self, stream, answer, streamed, began, entry)

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
    """A text as a response, while it is written or as a whole; ends the text when the client goes."""

    def __init__(
        self,
        service: Service,
        stream: GenerationStream,
        answer: Answer,
        streamed: bool,
        began: float,
        entry: ExitStack,
    ) -> None:
        super().__init__()
        self._service, self._source, self._answer, self._streamed = service, stream, answer, streamed
        self._began, self._entry = began, entry
        self._first: float | None = None
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._entry:
            stream = self._service.start(self._source, self._began)
            watcher = asyncio.create_task(self._watch(receive, stream))
            try:
                if self._streamed:
                    await self._send_events(stream, scope, send)
                else:
                    await self._send_whole(stream, scope, receive, send)
            finally:
                watcher.cancel()
                await stream.aclose()
                self._service.end(stream)

    async def _watch(self, receive: Receive, stream: AsyncGenerationStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        stream.cancel()

    async def _send_whole(self, stream: AsyncGenerationStream, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._steps(stream):
            pass
        self._report(stream, scope)
        if not self._gone:
            await JSONResponse(self._answer.whole(stream.result))(scope, receive, send)

    async def _send_events(self, stream: AsyncGenerationStream, scope: Scope, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += [(b"x-accel-buffering", b"no")]  # proxies such as nginx hold a stream back otherwise
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def tell(*chunks: Any) -> None:
            body = b"".join(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks)
            if body and not self._gone:
                await send({"type": "http.response.body", "body": body, "more_body": True})

        await tell(*self._answer.first())
        try:
            async for step in self._steps(stream):
                await tell(*self._answer.chunk(step))
            await tell(*self._answer.last(stream.result))
            self._report(stream, scope)
        except OSError:
            raise
        except Exception as error:  # the status is sent: all that is left is to say so in the stream
            logger.error("%s failed in mid-stream: %s: %s", scope["path"], type(error).__name__, error)
            logger.debug("where it failed", exc_info=True)
            await tell(api_error(error).body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _steps(self, stream: AsyncGenerationStream) -> AsyncIterator[Step]:
        async for step in stream.steps():
            if self._first is None and step.token_ids:
                self._first = perf_counter() - self._began
                self._service.metrics.first_token(self._first)
            yield step

    def _report(self, stream: AsyncGenerationStream, scope: Scope) -> None:
        """Count and log a finished text."""
        result, seconds = stream.result, perf_counter() - self._began
        self._service.metrics.finished(result, seconds, self._first)
        logger.info(
            "%s: %d + %d tokens, %s, %.2f s, tau %.2f",
            scope["path"],
            result.prompt_tokens,
            len(result.token_ids),
            result.finish_reason,
            seconds,
            result.speculation.tau,
        )
