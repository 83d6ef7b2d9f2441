"""The HTTP application: OpenAI's routes, and what there is to see of the service.

    /v1/chat/completions, /v1/completions, /v1/models    as OpenAI's
    /v1/embeddings, /v1/images/generations               likewise, of an encoder or a pipeline for pictures
    /tokenize, /detokenize                               as vLLM's
    /v1/plan       the plans, which one is in force, and why
    /v1/state      what the service is doing now
    /              the live page, which reads these two
    /health        200 while requests are taken, 503 while the server closes; needs no key
    /metrics       for Prometheus
    /version, /openapi.json

The application only translates: the endpoint is handed in; `start` makes it and ends it, `server` listens.
Bodies are taken here, not by FastAPI, and read by `reading`: within limits, strictly, and only as
application/json, which a page of another site cannot send to a server on this machine unasked.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from tessera import __version__
from tessera.ir import Plan
from tessera.serve.auth import CLIENT, Keys
from tessera.serve.endpoint import Endpoint
from tessera.serve.limits import ClientGone, HeldBody, HttpLimits, RequestLimiter, while_there
from tessera.serve.metrics import CONTENT_TYPE, Metrics
from tessera.serve.openai.asking import make_asks
from tessera.serve.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ImageRequest,
    TokenizeRequest,
    no_such_model,
)
from tessera.serve.openai.errors import ApiError, JsonResponse, add_handlers
from tessera.serve.openai.read import EmbeddingDraft, ModelCard
from tessera.serve.openai.write import (
    Writer,
    answer_embedding,
    answer_image,
    answer_whole,
    send_document,
    stream,
)
from tessera.serve.page import live_page, plan_document, state_document
from tessera.serve.reading import Reading
from tessera.serve.records import ImageDraft


class ErrorBody(BaseModel):
    """What is wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """Every answer that is not a 200."""

    error: ErrorBody


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
NEEDS_KEY: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "The answer."}
}


def create_app(
    endpoint: Endpoint,
    metrics: Metrics,
    limits: HttpLimits | None = None,
    keys: Sequence[str] = (),
    is_local: bool = False,
) -> FastAPI:
    """The application of one served model, for this machine only if it is local.

    `app.state.limiter` counts the requests inside, `app.state.reading` reads their bodies: it may be started
    beforehand, and is closed in the end.
    """
    app = FastAPI(title="Tessera", version=__version__, docs_url=None, redoc_url=None)
    limits = limits or HttpLimits()
    limiter = app.state.limiter = RequestLimiter(limits)
    reading = app.state.reading = Reading(_card(endpoint))
    add_handlers(app)
    _add_openai(app, endpoint, Intake(limits, limiter, reading))
    _add_views(app, endpoint, metrics, limiter)
    app.add_middleware(Keys, keys=tuple(keys), is_local=is_local)
    app.openapi = cache(lambda: _openapi(app))  # type: ignore[method-assign]
    return app


def _card(endpoint: Endpoint) -> ModelCard:
    mark = endpoint.eyes.mark if endpoint.eyes is not None else ""
    sizes = (endpoint.capacity, endpoint.vocab_size)
    if endpoint.embeddings is None:
        return ModelCard(endpoint.model, endpoint.text, *sizes, mark)
    pooling = endpoint.embeddings.encoder.pooling
    return ModelCard(endpoint.model, endpoint.text, *sizes, mark, pooling.prompt, pooling.sizes)


@dataclass(frozen=True)
class Intake:
    limits: HttpLimits
    limiter: RequestLimiter
    reading: Reading


# Kind of body -> the kinds of model that it is for.
FOR = {
    "chat": ("text",),
    "completion": ("text",),
    "embedding": ("vectors",),
    "image": ("pictures",),
    "tokenize": ("text", "vectors"),
    "detokenize": ("text", "vectors"),
}
# Kind of model -> what it does.
DOES = {
    "text": "generates text only",
    "vectors": "makes embeddings only; use /v1/embeddings",
    "pictures": "makes pictures only; use /v1/images/generations",
}


def check_kind(kind: str, endpoint: Endpoint) -> None:
    """Refuses what another kind of model is for."""
    own = "text" if endpoint.embeddings is None else "vectors"
    own = own if endpoint.images is None else "pictures"
    if own not in FOR[kind]:
        raise ApiError(400, f"'{endpoint.model}' {DOES[own]}", "model", "unsupported_model")


class BodyResponse(Response):
    """An answer to a body, worked out while it is sent. `kind` says how the body is read."""

    def __init__(self, kind: str, endpoint: Endpoint, intake: Intake) -> None:
        super().__init__()
        self._kind, self._endpoint, self._intake = kind, endpoint, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes the body, asks, and sends; a client that has gone is sent nothing."""
        limits, limiter = self._intake.limits, self._intake.limiter
        try:
            limiter.check_open()
            with HeldBody(limits, limiter) as body:
                await body.receive(dict(scope["headers"]), receive)
                # Entered with a whole body only: who sends slowly takes no place.
                with limiter.entered():
                    await while_there(receive, self._respond(body, scope, send))
        except ClientGone:
            return

    async def _respond(self, body: HeldBody, scope: Scope, send: Send) -> None:
        check_kind(self._kind, self._endpoint)
        draft = await self._intake.reading.read(self._kind, body.raw)
        body.drop()
        if isinstance(draft, bytes):
            await send_document(draft, send)
            return
        if isinstance(draft, EmbeddingDraft):
            await send_document(await answer_embedding(self._endpoint, draft), send)
            return
        if isinstance(draft, ImageDraft):
            await send_document(await answer_image(self._endpoint, draft), send)
            return
        service = self._endpoint.service
        batch = await make_asks(draft, self._endpoint, str(scope.get(CLIENT, "")))
        writer = Writer(self._endpoint, batch)
        if draft.is_stream:
            await stream(service, batch, writer, send)
        else:
            await send_document(await answer_whole(service, batch, writer), send)


def _add_openai(app: FastAPI, endpoint: Endpoint, intake: Intake) -> None:
    def shown_as(kind: type[BaseModel], *tags: str) -> dict[str, Any]:
        """For the OpenAPI page: the body, which FastAPI cannot see, and the answers."""
        ref = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": ref}}}
        answers = (STREAMS if kind in (ChatRequest, CompletionRequest) else {}) | ERRORS
        shown = {"tags": list(tags) or ["OpenAI"], "responses": answers}
        return {**shown, "openapi_extra": {"requestBody": body}}

    @app.post("/v1/chat/completions", **shown_as(ChatRequest))
    async def chat_completions() -> Response:
        """Answers a conversation, whole or as a stream of server-sent events."""
        return BodyResponse("chat", endpoint, intake)

    @app.post("/v1/completions", **shown_as(CompletionRequest))
    async def completions() -> Response:
        """Goes on with one or more prompts, whole or as a stream of server-sent events."""
        return BodyResponse("completion", endpoint, intake)

    @app.post("/v1/embeddings", **shown_as(EmbeddingRequest))
    async def embeddings() -> Response:
        """Vectors of texts, where the model is an encoder."""
        return BodyResponse("embedding", endpoint, intake)

    @app.post("/v1/images/generations", **shown_as(ImageRequest))
    async def images() -> Response:
        """Pictures from words, where the model is a pipeline for them."""
        return BodyResponse("image", endpoint, intake)

    @app.post("/tokenize", **shown_as(TokenizeRequest, "tokens"))
    async def tokenize() -> Response:
        """The tokens of a prompt or a conversation."""
        return BodyResponse("tokenize", endpoint, intake)

    @app.post("/detokenize", **shown_as(DetokenizeRequest, "tokens"))
    async def detokenize() -> Response:
        """The text of tokens."""
        return BodyResponse("detokenize", endpoint, intake)

    card = {
        "id": endpoint.model,
        "object": "model",
        "created": endpoint.created,
        "owned_by": "tessera",
        "max_model_len": endpoint.capacity,
    }

    @app.get("/v1/models", tags=["OpenAI"], responses=NEEDS_KEY)
    async def models() -> Response:
        """Lists the one model that is served."""
        return JsonResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"], responses=NEEDS_KEY | {404: ERRORS[404]})
    async def model(name: str) -> Response:
        """Says what is known of a model."""
        if name != endpoint.model:
            raise no_such_model(name, endpoint.model)
        return JsonResponse(card)


def _add_views(app: FastAPI, endpoint: Endpoint, metrics: Metrics, limiter: RequestLimiter) -> None:
    page = live_page()
    explained: list[tuple[Plan, dict[str, Any]]] = []

    @app.get("/", tags=["live"])
    async def live() -> Response:
        """The live page."""
        return HTMLResponse(page.html, headers={"Content-Security-Policy": page.policy})

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["live"], responses={503: ERRORS[503]})
    async def health() -> Response:
        """Whether requests are taken."""
        limiter.check_open()
        if endpoint.service.failure:
            raise ApiError(503, endpoint.service.failure, code="failed")
        return JsonResponse({"status": "ok"})

    @app.get("/version", tags=["live"], responses=NEEDS_KEY)
    async def version() -> Response:
        """The version of Tessera."""
        return JsonResponse({"version": __version__})

    @app.get("/metrics", tags=["live"], responses=NEEDS_KEY)
    async def prometheus() -> Response:
        """All series, in Prometheus's text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/v1/state", tags=["live"], responses=NEEDS_KEY)
    async def state() -> Response:
        """Devices, links, queue, policy and the last decisions."""
        return JsonResponse(state_document(endpoint.service.snapshot()))

    @app.get("/v1/plan", tags=["live"], responses=NEEDS_KEY)
    async def plan() -> Response:
        """The plan in force, every other policy's, and why; figures of plans are modelled."""
        plans = endpoint.plans()
        if [id(made) for made, _ in explained] != [id(made) for made in plans]:  # explaining takes a while
            explained[:] = [(made, await asyncio.to_thread(plan_document, made)) for made in plans]
        found = state_document(endpoint.service.snapshot())
        shown = {key: found[key] for key in ("model", "policy", "policies", "decisions")}
        return JsonResponse(shown | {"plans": [document for _, document in explained]})


def _openapi(app: FastAPI) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, routes=app.routes)
    texts = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    kinds: tuple[type[BaseModel], ...] = (*texts, EmbeddingRequest, ImageRequest)
    bodies = [(kind, "validation") for kind in kinds]
    _, found = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    page["components"]["schemas"] |= found["$defs"]
    for path in page["paths"].values():  # FastAPI's own errors, which are never sent
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)
    return page
