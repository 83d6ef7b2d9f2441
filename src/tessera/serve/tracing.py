"""OpenTelemetry: one span per request of OpenAI's routes, sent by OTLP over HTTP.

A span continues the client's trace (`traceparent`), with the attributes of OpenTelemetry's conventions. Steps
are not spans: they belong to many requests. A collector that is away costs spans, not requests.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera.errors import extra_module

if TYPE_CHECKING:
    from fastapi import FastAPI

SERVICE = "tessera"
TRACED = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/images/generations": "generate_content",
}


class TraceMiddleware:
    def __init__(self, app: ASGIApp, tracer: Any, model: str) -> None:
        self._app, self._tracer, self._model = app, tracer, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Behind a proxy the path may have a prefix.
        path = next((path for path in TRACED if scope.get("path", "").endswith(path)), None)
        if path is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry import propagate, trace

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {
            "http.request.method": scope["method"],
            "http.route": path,
            "gen_ai.system": SERVICE,
            "gen_ai.operation.name": TRACED[path],
            "gen_ai.request.model": self._model,
        }
        with self._tracer.start_as_current_span(
            f"{scope['method']} {path}",
            context=propagate.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            has_begun = False

            async def noted(message: Message) -> None:
                nonlocal has_begun
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                elif not has_begun:
                    has_begun = True
                    span.add_event("first byte")
                await send(message)

            await self._app(scope, receive, noted)


def add_traces(app: "FastAPI", model: str, endpoint: str, stack: ExitStack) -> None:
    """`endpoint`: as http://127.0.0.1:4318/v1/traces."""
    sdk = extra_module("opentelemetry.sdk.trace", "otel", "opentelemetry-sdk")
    export = extra_module("opentelemetry.sdk.trace.export", "otel", "opentelemetry-sdk")
    resources = extra_module("opentelemetry.sdk.resources", "otel", "opentelemetry-sdk")
    otlp = extra_module(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "otel",
        "opentelemetry-exporter-otlp-proto-http",
    )
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    stack.callback(provider.shutdown)
    app.add_middleware(TraceMiddleware, tracer=provider.get_tracer(SERVICE), model=model)
