"""The routes of the server."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from wavekit import __version__
from wavekit.decoding.speculation import Mode, Speculation
from wavekit.llm import LLM
from wavekit.serving.answers import ChatAnswer, CompletionAnswer
from wavekit.serving.bodies import Body, ChatBody, CompletionBody
from wavekit.serving.errors import ApiError, no_route, not_valid, refused
from wavekit.serving.guard import Guard
from wavekit.serving.service import Service
from wavekit.tokenizer import Tokenizer
from wavekit_engines.errors import MisuseError, WavekitError


@dataclass(frozen=True)
class Limits:
    """What a server lets through.

    ``running`` texts are written at a time, ``waiting`` more requests may be there; ``max_body`` in bytes; a text takes
    at most ``seconds``, the time that its request waits included, if that is set.
    """

    running: int = 4
    waiting: int = 64
    max_body: int = 1 << 20
    seconds: float | None = None


def create_app(
    llm: LLM, model: str, limits: Limits | None = None, api_key: str | None = None, origins: Sequence[str] = ()
) -> FastAPI:
    """The server of a loaded bundle under the name ``model``; an ASGI application, to be mounted or run.

    Web pages from ``origins`` may use it (``*``: from anywhere), others only where they come from the server itself.
    ``llm`` must have been opened with a concurrency of ``limits.running``. The application's ``state.service`` ends
    texts when the program does.

    Raises:
        MisuseError: the bundle has no tokenizer.
    """
    limits = limits or Limits()
    if llm.tokenizer is None:
        raise MisuseError("this bundle has no tokenizer, and a server answers in text: export it with one")
    service = Service(llm, limits.running, limits.waiting)
    # The pages about the API that FastAPI makes would load scripts from elsewhere.
    app = FastAPI(title="wavekit", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for kind, handler in (
        (ApiError, refused),
        (WavekitError, refused),
        (RequestValidationError, not_valid),
        (HTTPException, no_route),
    ):
        app.add_exception_handler(kind, handler)
    app.add_middleware(Guard, api_key=api_key, max_body=limits.max_body, answered=service.metrics.answered)
    if origins:  # before the guard: a browser asks whether it may send a key, and has none yet
        told = ("Retry-After",)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers="*", expose_headers=told
        )
    _add_writing(app, llm, llm.tokenizer, model, limits.seconds)
    _add_models(app, model, llm.decoder.spec.max_positions)
    _add_state_and_page(app, llm, model)
    return app


def _add_writing(app: FastAPI, llm: LLM, tokenizer: Tokenizer, model: str, seconds: float | None) -> None:
    """Chat and text completions."""
    service: Service = app.state.service
    context = llm.decoder.spec.max_positions
    ends = frozenset(llm.manifest.generation.stop_token_ids)

    def form(body: Body, kind: type[ChatAnswer] | type[CompletionAnswer]) -> Any:
        return kind(model, tokenizer, ends, body.wavekit.steps, body.include_usage, body.each)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        body.check(model)
        asked = body.asked(context, ends, seconds)
        return await service.answer(asked, form(body, ChatAnswer), body.stream)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody) -> Response:
        body.check(model)
        asked = body.asked(context, ends, seconds)
        return await service.answer(asked, form(body, CompletionAnswer), body.stream)


def _add_models(app: FastAPI, model: str, context: int) -> None:
    """The list of one model."""
    started = int(time.time())
    card = {"id": model, "object": "model", "created": started, "owned_by": "wavekit", "context_length": context}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != model:
            raise ApiError(404, f"the model {name!r} is not here; {model!r} is", code="model_not_found")
        return card


def _add_state_and_page(app: FastAPI, llm: LLM, model: str) -> None:
    """Health, metrics, and the built-in page."""
    service: Service = app.state.service
    automatic, modes = _modes(llm)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        draining = service.admission.draining
        told = {"status": "stopping" if draining else "ok", "model": model, "auto": automatic, "speculate": modes}
        return JSONResponse(told, 503 if draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    @app.api_route("/", methods=["GET", "HEAD"], response_class=HTMLResponse)
    async def built_in_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


def _modes(llm: LLM) -> tuple[Mode, list[Mode]]:
    """Who proposes where a request leaves that to the server, and whom it may name."""

    def resolved(speculation: Speculation) -> Mode:
        return speculation.resolved(llm.manifest.draft is not None, llm.decoder.exit_boundaries)

    there = list[Mode]()
    for mode in get_args(Mode):
        with suppress(MisuseError):
            there += [mode] if resolved(Speculation(mode)) == mode != "off" else []
    return resolved(llm.auto), there


_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""The page may talk to this server and to nobody else, and no other page may show it as its own."""
