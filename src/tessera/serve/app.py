"""The HTTP application: OpenAI's routes, and what there is to see of the service.

    /v1/chat/completions, /v1/completions, /v1/models    as OpenAI's
    /v1/plan       the plans, which one is in force, and why
    /v1/state      what the service is doing now
    /              the live page, which reads these two
    /health        200 while requests are taken, 503 while the server closes; needs no key
    /metrics       for Prometheus
    /version, /openapi.json

The application only translates: the endpoint is handed in; `start` makes it and ends it, `server` listens.
"""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response

from tessera import __version__
from tessera.ir import Plan
from tessera.serve.auth import Keys
from tessera.serve.images import images_router
from tessera.serve.limits import Door, Limits
from tessera.serve.metrics import CONTENT_TYPE, Metrics
from tessera.serve.openai_errors import ApiError, JsonResponse, add_handlers
from tessera.serve.openai_ports import Endpoint
from tessera.serve.openai_routes import ERRORS, Desk, openai_router
from tessera.serve.page import live_page
from tessera.serve.page_state import plan_document, state_document
from tessera.serve.schemas import ChatRequest, CompletionRequest


def create_app(
    endpoint: Endpoint,
    metrics: Metrics,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    is_local: bool = False,
) -> FastAPI:
    """The application of one served model, for this machine only if it is local.

    `app.state.door` counts what is inside.
    """
    app = FastAPI(title="Tessera", version=__version__, docs_url=None, redoc_url=None)
    rules = limits or Limits()
    app.state.door = Door(rules.requests, rules.bodies_bytes)
    add_handlers(app)
    app.include_router(openai_router(Desk(endpoint, rules, app.state.door)))
    app.include_router(images_router(endpoint.model))
    _add_views(app, endpoint, metrics, app.state.door)
    app.add_middleware(Keys, keys=tuple(keys), is_local=is_local)
    app.openapi = cache(lambda: _openapi(app))  # type: ignore[method-assign]
    return app


def _add_views(app: FastAPI, endpoint: Endpoint, metrics: Metrics, door: Door) -> None:
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
        if door.is_closed:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        if endpoint.service.failure:
            raise ApiError(503, endpoint.service.failure, code="failed")
        return JsonResponse({"status": "ok"})

    @app.get("/version", tags=["live"], responses={401: ERRORS[401]})
    async def version() -> Response:
        """The version of Tessera."""
        return JsonResponse({"version": __version__})

    @app.get("/metrics", tags=["live"], responses={401: ERRORS[401]})
    async def prometheus() -> Response:
        """All series, in Prometheus's text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/v1/state", tags=["live"], responses={401: ERRORS[401]})
    async def state() -> Response:
        """Devices, links, queue, policy and the last decisions."""
        return JsonResponse(state_document(endpoint.service.snapshot()))

    @app.get("/v1/plan", tags=["live"], responses={401: ERRORS[401]})
    async def plan() -> Response:
        """The plan in force, every other policy's, and why; figures of plans are modelled."""
        plans = endpoint.plans()
        if [id(made) for made, _ in explained] != [id(made) for made in plans]:  # explaining takes a while
            explained[:] = [(made, await asyncio.to_thread(plan_document, made)) for made in plans]
        found = state_document(endpoint.service.snapshot())
        return JsonResponse(
            {
                "model": endpoint.model,
                "policy": found["policy"],
                "policies": found["policies"],
                "plans": [document for _, document in explained],
                "decisions": found["decisions"],
            }
        )


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's page with the bodies that `openai_routes` reads itself."""
    page = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = [(ChatRequest, "validation"), (CompletionRequest, "validation")]
    _, found = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    page["components"]["schemas"] |= found["$defs"]
    for path in page["paths"].values():  # FastAPI's own errors, which are never sent
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)
    return page
