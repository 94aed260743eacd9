"""What stands before every route: the API key, the size of bodies, and errors that nobody foresaw.

Plain ASGI, so that streams pass through untouched.
"""

import hmac
import logging
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wavekit.serving.errors import ApiError, api_error

OPEN = ("/", "/health")
"""Paths that need no key: what is there is no secret, and whoever watches over a server asks without."""

CLIENT_GONE = 499
"""The status that is counted where nobody waited for one, as proxies do."""

logger = logging.getLogger("wavekit.serve")


class Guard:
    """Middleware of the server."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int, answered: Callable[[str, int], None]) -> None:
        """Ask for ``api_key`` if there is one; refuse bodies of more than ``max_body`` bytes.

        ``answered`` is told the route and the status of every request.
        """
        self._app, self._max_body, self._answered = app, max_body, answered
        self._authorization = f"Bearer {api_key}".encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._bounded(receive), sending)
        except Exception as error:
            if status and isinstance(error, OSError):  # the client has gone
                return
            known = api_error(error)
            if known.status_code >= 500:
                logger.error("%s %s failed: %s: %s", scope["method"], scope["path"], type(error).__name__, error)
                logger.debug("where it failed", exc_info=True)
            if not status:
                await known.response(scope, receive, sending)
        finally:
            route = scope.get("route")
            self._answered(route.path if route is not None else "other", status or CLIENT_GONE)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if self._authorization is not None and scope["path"] not in OPEN:
            if not given:
                raise _unauthorized("an API key is needed: Authorization: Bearer KEY", "missing_api_key")
            if not hmac.compare_digest(given, self._authorization):
                raise _unauthorized("this API key is wrong", "invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """The same messages, until they hold too much."""
        received = 0

        async def receiving() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._too_large()
            return message

        return receiving

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="body_too_large")


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
