"""What a client is told when a request fails: the status, and the JSON form that OpenAI's clients read."""

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from wavekit_engines.errors import ContextLengthError, MisuseError


class ApiError(HTTPException):
    """A request that is refused, or that failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body, self.status_code, self.headers)


def api_error(error: BaseException) -> ApiError:
    """What a client is told of any error; of one that is no fault of the request, nothing but that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, MisuseError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed at this request; its log says more", code="internal_error")


async def refused(request: Request, error: Exception) -> JSONResponse:
    """A handler of FastAPI for `ApiError`."""
    return api_error(error).response


async def not_valid(request: Request, error: Exception) -> JSONResponse:
    """A handler of FastAPI for a body that is not JSON, or not what the route takes: the first thing that is wrong."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}").response
    if "json" not in request.headers.get("content-type", ""):
        return ApiError(415, "the body must be JSON and say so: Content-Type: application/json").response
    path = [str(part) for part in first["loc"] if part != "body" and part not in _KINDS]
    param = ".".join(path) or None
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param).response


_KINDS = ("str", "list[int]", "list[str]", "list[list[int]]", "list[dict[str,any]]")
"""Steps of a path that are none: which of several kinds a value was tried as."""


async def no_route(request: Request, error: Exception) -> JSONResponse:
    """A handler of FastAPI for a path or method that is not there."""
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        message = f"there is no {request.method} {request.url.path} here"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response
    return ApiError(error.status_code, str(error.detail)).response
