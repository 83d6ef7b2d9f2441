"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

A `TesseraError` gets its status by its class; HTTP errors keep theirs. A bug gives a 500 without details; its
traceback goes to the log.
"""

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import AskError, ServiceBusy, ServiceClosing, TesseraError
from tessera.ir.files import packaged

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("tessera.serve")

# Status -> OpenAI's type, and when it comes. OpenAI's client raises by the status.
STATUSES = packaged("serve.openai", "errors.json", dict[int, tuple[str, str]])
TINY_CHUNKS = "tiny_chunks"
CLOSE = {"Connection": "close"}
HEADERS: dict[int | str | None, dict[str, str]] = {
    TINY_CHUNKS: CLOSE,
    401: {"WWW-Authenticate": "Bearer"},
    408: CLOSE,
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(msgspec.Struct, frozen=True):
    """Every answer that is not a 200."""

    error: ErrorBody


class ApiError(Exception):
    """`param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def document(self) -> ErrorDocument:
        kind = STATUSES.get(self.status, STATUSES[400])[0]
        return ErrorDocument(ErrorBody(self.message, kind, self.param, self.code))

    @property
    def response(self) -> "JsonResponse":
        return JsonResponse(self.document, self.status, HEADERS.get(self.code, HEADERS.get(self.status)))


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def api_error(error: ApiError | TesseraError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServiceBusy):
        return ApiError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, ServiceClosing):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, AskError):
        return ApiError(400, str(error), error.place or None, "invalid_value")
    return ApiError(500, str(error))


async def _answer_error(request: Request, error: Exception) -> Response:
    called = f"{request.method} {request.url.path[:200]}"
    if isinstance(error, ApiError | TesseraError):
        return api_error(error).response
    if isinstance(error, HTTPException):
        message = f"{HTTPStatus(error.status_code).phrase}: {called}. GET /openapi.json lists all paths."
        response = ApiError(error.status_code, message, code="unknown_url").response
        response.headers.update(error.headers or {})
        return response
    log.error("%s failed", called, exc_info=error)
    return ApiError(500, "an error inside the server; its log says more").response


def add_handlers(app: "FastAPI") -> None:
    for kind in (ApiError, TesseraError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
