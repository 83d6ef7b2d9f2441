"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}, whatever went wrong.

Every refusal is an `ApiError`. What the engine refuses comes as a `TesseraError` and is turned into one by
its class; what HTTP itself refuses (no such path, another method) by its status. A bug gives a 500 in the
same shape, without a word of what is inside, and its traceback goes to the log.
"""

import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import AskError, ServiceBusy, ServiceClosing, TesseraError

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("tessera.serve")

# OpenAI's word for each kind of refusal; its Python client raises by the status.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# Code of a request that says in two ways where it ends: a proxy before the server may believe the other.
AMBIGUOUS = "ambiguous_length"
# What a refused client is told besides: when it may come back; and that the rest of a body is not read.
HEADERS: dict[int | str | None, dict[str, str]] = {
    AMBIGUOUS: {"Connection": "close"},
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class ApiError(Exception):
    """A refusal with its status; `param` names the field it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def shape(self) -> dict[str, dict[str, Any]]:
        """The document that clients read."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> "JsonResponse":
        return JsonResponse(self.shape, self.status, HEADERS.get(self.code, HEADERS.get(self.status)))


class JsonResponse(Response):
    """JSON in ASCII, so that no text of a model or a client can fail to be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def api_error(error: ApiError | TesseraError) -> ApiError:
    """What was refused, here or by the engine or the tokenizer."""
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
    what = f"{request.method} {request.url.path}"
    if isinstance(error, ApiError | TesseraError):
        return api_error(error).response
    if isinstance(error, HTTPException):  # a path that is not there, or one that takes another method
        message = f"{HTTPStatus(error.status_code).phrase}: {what}. GET /openapi.json lists what there is."
        found = ApiError(error.status_code, message, code="unknown_url").response
        found.headers.update(error.headers or {})
        return found
    log.error("%s failed", what, exc_info=error)
    return ApiError(500, "an error inside the server; its log says more").response


def add_handlers(app: "FastAPI") -> None:
    for kind in (ApiError, TesseraError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
