"""The routes of OpenAI: /v1/chat/completions, /v1/completions and /v1/models.

Bodies are read and parsed here, not by FastAPI: within limits, strictly, and only as application/json, which
a page of another site cannot send to a server on this machine unasked.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tessera.serve.auth import CLIENT
from tessera.serve.limits import ClientGone, Door, Limits, check_length, read_body, while_there
from tessera.serve.openai_answers import answer_whole, stream
from tessera.serve.openai_errors import ApiError, JsonResponse
from tessera.serve.openai_ports import Endpoint
from tessera.serve.openai_read import Wanted, chat_wanted, completion_wanted, parse
from tessera.serve.openai_write import ChatWriter, CompletionWriter, Writer
from tessera.serve.schemas import ChatRequest, CompletionRequest, ErrorDocument

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorDocument, "description": text}
    for status, text in {
        400: "The request is malformed, too long, or asks for what is not supported.",
        401: "The key is missing or wrong.",
        403: "A server of this machine only was called by another name.",
        404: "Another model is served.",
        405: "The path takes another method.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        415: "The body is not application/json.",
        429: "Too many requests wait.",
        500: "A device was lost twice, or the server has a bug.",
        503: "The server is shutting down.",
    }.items()
}


@dataclass(frozen=True)
class Desk:
    """What every generation needs."""

    endpoint: Endpoint
    limits: Limits
    door: Door


class Generation(Response):
    """An answer that is worked out while it is sent."""

    def __init__(self, desk: Desk, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        super().__init__()
        self._desk, self._kind = desk, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, asks, and sends; a client that has gone is sent nothing."""
        desk = self._desk
        try:
            desk.door.check_open()
            raw = await _json_body(scope, receive, desk)
            # Entered with a whole body only: who sends slowly takes no place.
            with desk.door.entered():
                await while_there(receive, self._respond(raw, scope, receive, send))
        except ClientGone:
            return

    async def _respond(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, client = self._desk.endpoint, str(scope.get(CLIENT, ""))
        wanted, writer = await self._read(raw, endpoint, client)
        if wanted.is_stream:
            await stream(endpoint.service, wanted, writer, send)
        else:
            document = await answer_whole(endpoint.service, wanted, writer)
            await JsonResponse(document)(scope, receive, send)

    async def _read(self, raw: bytes, endpoint: Endpoint, client: str) -> tuple[Wanted, Writer]:
        request = parse(self._kind, raw)
        if isinstance(request, ChatRequest):
            wanted = await chat_wanted(request, endpoint, client)
            has_logprobs = bool(request.logprobs)
            return wanted, ChatWriter(endpoint.model, endpoint.words, has_logprobs, wanted.includes_usage)
        wanted = await completion_wanted(request, endpoint, client)
        has_logprobs = request.logprobs is not None
        writer = CompletionWriter(endpoint.model, endpoint.words, has_logprobs, wanted.includes_usage)
        writer.echoes = wanted.echoes
        return wanted, writer


async def _json_body(scope: Scope, receive: Receive, desk: Desk) -> bytes:
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        message = "the body must be application/json: send the header 'Content-Type: application/json'"
        raise ApiError(415, message, code="unsupported_media_type")
    check_length(headers, desk.limits)
    return await read_body(receive, desk.limits, desk.door)


def _body_of(kind: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    """The body for the OpenAPI page, which FastAPI cannot see."""
    ref = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref}}}}


def openai_router(desk: Desk) -> APIRouter:
    """The routes of one served model."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    streams: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer."}
    }

    @router.post("/chat/completions", responses=streams | ERRORS, openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, whole or as a stream of server-sent events."""
        return Generation(desk, ChatRequest)

    @router.post("/completions", responses=streams | ERRORS, openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Goes on with one or more prompts, whole or as a stream of server-sent events."""
        return Generation(desk, CompletionRequest)

    @router.get("/models", responses={401: ERRORS[401]})
    async def models() -> Response:
        """Lists the one model that is served."""
        return JsonResponse({"object": "list", "data": [_model(desk.endpoint)]})

    @router.get("/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(name: str) -> Response:
        """Says what is known of a model."""
        if name != desk.endpoint.model:
            message = f"The model '{name}' is not served here; this is '{desk.endpoint.model}'."
            raise ApiError(404, message, "model", "model_not_found")
        return JsonResponse(_model(desk.endpoint))

    return router


def _model(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.model,
        "object": "model",
        "created": endpoint.created,
        "owned_by": "tessera",
        "max_model_len": endpoint.capacity,
    }
