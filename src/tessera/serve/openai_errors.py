"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}, whatever went wrong.

Every refusal is an `ApiError`. What the engine refuses comes as a `TesseraError` and is turned into one by
its class; what HTTP itself refuses (no such path, another method) by its status. A bug gives a 500 in the
same shape, without a word of what is inside, and its traceback goes to the log.
"""

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tessera.errors import AskError, ServiceBusy, ServiceClosing, TesseraError

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
# Seconds after which a refused client may come back.
RETRY_AFTER_S = 1


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


class JsonResponse(Response):
    """JSON in ASCII, so that no text of a model or a client can fail to be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """A document in bytes."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def response_of(error: ApiError) -> JsonResponse:
    """An error as it is sent."""
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in {429, 503}:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status in {408, 413}:  # the rest of the body is not read
        headers["Connection"] = "close"
    return JsonResponse(error.shape, error.status, headers)


def api_error(error: TesseraError) -> ApiError:
    """What the engine or the tokenizer refused."""
    if isinstance(error, ServiceBusy):
        return ApiError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, ServiceClosing):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, AskError):
        return ApiError(400, str(error), error.place or None, "invalid_value")
    return ApiError(500, str(error))


async def _api(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response_of(error)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, TesseraError)
    return response_of(api_error(error))


async def _http(request: Request, error: Exception) -> Response:
    """A path that is not there, or one that takes another method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = f"{HTTPStatus(error.status_code).phrase}: {what}. GET /openapi.json lists what there is."
    found = response_of(ApiError(error.status_code, message, code="unknown_url"))
    found.headers.update(error.headers or {})
    return found


async def _bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response_of(ApiError(500, "an error inside the server; its log says more"))


def add_handlers(app: FastAPI) -> None:
    """Makes every error of the app one of ours."""
    app.add_exception_handler(ApiError, _api)
    app.add_exception_handler(TesseraError, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)
