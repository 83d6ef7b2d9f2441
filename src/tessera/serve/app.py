"""The HTTP application: OpenAI's routes, and views of the service.

Bodies must be application/json, which another site's page cannot send unasked. The live page is one HTML
file; its script and style are in the Content-Security-Policy by hash.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tessera import __version__
from tessera.ir import Lane, Plan, ServicePlan
from tessera.serve.limits import (
    CLIENT,
    AccessMiddleware,
    ClientGone,
    HeldBody,
    HttpLimits,
    RequestLimiter,
    while_connected,
)
from tessera.serve.metrics import CONTENT_TYPE, Metrics
from tessera.serve.openai import read
from tessera.serve.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ImageRequest,
    TokenizeRequest,
    no_such_model,
)
from tessera.serve.openai.errors import STATUSES, ApiError, ErrorDocument, JsonResponse, add_handlers
from tessera.serve.openai.read import EmbeddingDraft, Endpoint, make_asks
from tessera.serve.openai.write import (
    Writer,
    answer_embedding,
    answer_image,
    answer_whole,
    send_document,
    stream,
)
from tessera.serve.reading import Read, Reading
from tessera.serve.records import ImageDraft, Snapshot, step_name

# Kind of model -> error for other requests.
DOES = {
    "text": "generates text only",
    "vectors": "makes embeddings only; use /v1/embeddings",
    "pictures": "makes pictures only; use /v1/images/generations",
}
NUM_DECISIONS = 20
SCHEMAS = "#/components/schemas/{name}"
ERROR_CONTENT = {"application/json": {"schema": {"$ref": SCHEMAS.format(name="ErrorDocument")}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"content": ERROR_CONTENT, "description": text} for status, (_, text) in STATUSES.items()
}
NEEDS_KEY: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}


class BodyRoute(NamedTuple):
    path: str
    read: Read
    body: type[msgspec.Struct]
    makes: tuple[str, ...]
    about: str


ROUTES = (
    BodyRoute(
        "/v1/chat/completions", read.read_chat, ChatRequest, ("text",),
        "Answers a conversation, as one document or a stream.",
    ),
    BodyRoute(
        "/v1/completions", read.read_completion, CompletionRequest, ("text",),
        "Continues one or more prompts, as one document or a stream.",
    ),
    BodyRoute(
        "/v1/embeddings", read.read_embedding, EmbeddingRequest, ("vectors",),
        "Embeddings of texts, if the model is an encoder.",
    ),
    BodyRoute(
        "/v1/images/generations", read.read_image, ImageRequest, ("pictures",),
        "Pictures from a text, if the model is a picture pipeline.",
    ),
    BodyRoute(
        "/tokenize", read.tokenize, TokenizeRequest, ("text", "vectors"),
        "The tokens of a prompt or a conversation.",
    ),
    BodyRoute("/detokenize", read.detokenize, DetokenizeRequest, ("text", "vectors"), "The text of tokens."),
)  # fmt: skip


def create_app(
    endpoint: Endpoint,
    metrics: Metrics,
    limits: HttpLimits | None = None,
    keys: Sequence[str] = (),
    is_local: bool = False,
    root_path: str = "",
) -> FastAPI:
    """The caller closes `app.state.reading`."""
    app = FastAPI(title="Tessera", version=__version__, docs_url=None, redoc_url=None)
    limits = limits or HttpLimits()
    app.state.limiter, app.state.reading = RequestLimiter(limits), Reading(endpoint.card)
    add_handlers(app)
    for route in ROUTES:  # without FastAPI's own handling, which takes the time of many tokens
        app.router.routes.append(
            Route(route.path, BodyEndpoint(app, route, endpoint, limits), methods=["POST"])
        )
    _add_models(app, endpoint)
    _add_views(app, endpoint, metrics)
    app.add_middleware(AccessMiddleware, keys=tuple(keys), is_local=is_local, root_path=root_path)
    app.openapi = cache(lambda: _openapi(app))  # type: ignore[method-assign]
    return app


class BodyEndpoint:
    def __init__(self, app: FastAPI, route: BodyRoute, endpoint: Endpoint, limits: HttpLimits) -> None:
        self._state, self._route, self._endpoint, self._limits = app.state, route, endpoint, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limiter = self._state.limiter
        try:
            limiter.check_open()
            with HeldBody(self._limits, limiter) as body:
                await body.receive(scope, receive)
                # Only after a complete body: a slow sender takes no place.
                with limiter.entered():
                    await while_connected(receive, self._respond(body, scope, send))
        except ClientGone:
            return

    async def _respond(self, body: HeldBody, scope: Scope, send: Send) -> None:
        endpoint = self._endpoint
        if endpoint.card.makes not in self._route.makes:
            message = f"'{endpoint.card.model}' {DOES[endpoint.card.makes]}"
            raise ApiError(400, message, "model", "unsupported_model")
        client = str(scope.get(CLIENT, ""))
        draft = await self._state.reading.read(self._route.read, body.raw, client)
        body.drop()
        if isinstance(draft, bytes):
            document = draft
        elif isinstance(draft, EmbeddingDraft):
            document = await answer_embedding(endpoint, draft)
        elif isinstance(draft, ImageDraft):
            document = await answer_image(endpoint, draft)
        else:
            writer = Writer(endpoint.card, draft, await make_asks(draft, endpoint, client))
            if draft.request.stream:
                await stream(endpoint.service, writer, send)
                return
            document = await answer_whole(endpoint.service, writer)
        await send_document(document, send)


def _operation(route: BodyRoute) -> dict[str, Any]:
    """Entry of the OpenAPI page."""
    ref = {"$ref": SCHEMAS.format(name=route.body.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": ref}}}
    kinds = ("application/json", "text/event-stream") if route.makes == ("text",) else ("application/json",)
    answer = {200: {"content": {kind: {} for kind in kinds}, "description": "The answer."}}
    name, tag = route.path.rpartition("/")[2], "OpenAI" if route.path.startswith("/v1/") else "tokens"
    responses = {str(status): response for status, response in (answer | ERRORS).items()}
    operation = {"tags": [tag], "summary": name.capitalize(), "operationId": f"{name}_post"}
    return operation | {"description": route.about, "requestBody": body, "responses": responses}


def _add_models(app: FastAPI, endpoint: Endpoint) -> None:
    base = endpoint.card.model
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": endpoint.created,
            "owned_by": "tessera",
            "max_model_len": endpoint.card.capacity,
            **({} if name == base else {"parent": base}),
        }
        for name in endpoint.card.names
    }

    @app.get("/v1/models", tags=["OpenAI"], responses=NEEDS_KEY)
    async def models() -> Response:
        """Lists the served model and its adapters."""
        return JsonResponse({"object": "list", "data": list(cards.values())})

    @app.get("/v1/models/{name:path}", tags=["OpenAI"], responses=NEEDS_KEY | {404: ERRORS[404]})
    async def model(name: str) -> Response:
        """Describes the served model or an adapter."""
        if name not in cards:
            raise no_such_model(name, base)
        return JsonResponse(cards[name])


def _add_views(app: FastAPI, endpoint: Endpoint, metrics: Metrics) -> None:
    html, policy = live_page()
    explained: list[tuple[ServicePlan, dict[str, Any]]] = []

    @app.get("/", tags=["live"])
    async def live() -> Response:
        """The live page."""
        return HTMLResponse(html, headers={"Content-Security-Policy": policy})

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["live"], responses={503: ERRORS[503]})
    async def health() -> Response:
        """Whether requests are taken."""
        app.state.limiter.check_open()
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
        """The plans of all policies, and why; their figures are modelled."""
        plans = endpoint.plans()
        if [id(plan) for plan, _ in explained] != [id(plan) for plan in plans]:  # explaining takes a while
            explained[:] = [(plan, await asyncio.to_thread(plan_document, plan)) for plan in plans]
        state = state_document(endpoint.service.snapshot())
        shown = {key: state[key] for key in ("model", "policy", "policies", "decisions")}
        return JsonResponse(shown | {"plans": [document for _, document in explained]})


def _openapi(app: FastAPI) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, routes=app.routes)
    forms = [ErrorDocument, *(route.body for route in ROUTES)]
    page["components"] = {"schemas": msgspec.json.schema_components(forms, ref_template=SCHEMAS)[1]}
    page["paths"] |= {route.path: {"post": _operation(route)} for route in ROUTES}
    for path in page["paths"].values():  # FastAPI's own errors, which are never sent
        for operation in path.values():
            operation["responses"].pop("422", None)
    return page


def live_page() -> tuple[str, str]:
    html = files("tessera.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes(html, 'script')}; style-src {_hashes(html, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _hashes(html: str, tag: str) -> str:
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def state_document(snapshot: Snapshot) -> dict[str, Any]:
    document = asdict(snapshot)
    del document["decided"]
    names = ("source", "destination", "utilisation", "bytes")
    document["links"] = [dict(zip(names, link, strict=True)) for link in snapshot.links]
    document["decisions"] = document["decisions"][-NUM_DECISIONS:]
    return document


def plan_document(service: ServicePlan) -> dict[str, Any]:
    from tessera.plan import explain

    main = max(service.groups, key=lambda group: len(group.plan.used)).plan
    explained, names = explain(main), service.cluster.names
    busy = service.expected.busy if service.expected is not None else ()
    return {
        "policy": service.policy,
        "modelled": True,
        "devices": list(names),
        "load": asdict(service.load),
        "groups": [
            asdict(group.size) | {"steps": _steps(group.plan, group.plan.lanes[0], names)}
            for group in service.groups
        ],
        "expected": service.expected and asdict(service.expected),
        "rivals": {rival.policy: rival.expected.tokens_per_s for rival in service.rivals},
        "utilisation": dict(zip(names, busy, strict=False)),
        "layer": _layer(main),
        "why": [explained.verdict, *explained.notes],
    }


def _layer(plan: Plan) -> dict[str, Any]:
    from tessera.report import layer_picture, main_lane

    step = max(range(len(plan.unit.counts)), key=plan.unit.counts.__getitem__)
    return asdict(layer_picture(plan, main_lane(plan), step))


def _steps(plan: Plan, lane: Lane, names: Sequence[str]) -> list[dict[str, Any]]:
    steps = []
    for graph, runs, placed in zip(plan.unit.graphs, plan.unit.counts, lane.placement.devices, strict=True):
        launches = {name: placed.count(i) for i, name in enumerate(names)}
        steps.append({"step": step_name(graph.trace.step), "runs": runs, "launches": launches})
    return steps
