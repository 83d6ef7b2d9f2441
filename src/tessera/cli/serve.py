"""tessera serve: an OpenAI-compatible endpoint for a model."""

import asyncio
import gc
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tessera.cli.output import HIDDEN, Record, progress, say
from tessera.cli.remote import gathered, interruptible, work
from tessera.cli.serve_options import ServeConfig, log_line, logging_by
from tessera.errors import TesseraError, extra_module
from tessera.profile import cap_memory, wire

if TYPE_CHECKING:
    from tessera.cli.start import RunningService
    from tessera.serve.server import HttpServer

# Python's default of 5 ms delays the engine after each step while HTTP writes: a fifth of the tokens per
# second at steps of 10 ms.
SWITCH_S = 5e-4
MODEL_HELP = "A built-in model, a folder with a checkpoint, or its name in the local Hugging Face cache."


class ServeReady(Record, frozen=True):
    """A service that answers requests."""

    notes: tuple[str, ...]
    headline: str
    url: Annotated[str, HIDDEN]
    model: Annotated[str, HIDDEN]
    devices: Annotated[tuple[str, ...], HIDDEN]
    # From the command to the first request it could answer.
    seconds: Annotated[float, HIDDEN]
    # Language models only.
    policies: Annotated[tuple[str, ...], HIDDEN] = ()
    policy: Annotated[str | None, HIDDEN] = None
    microbatches: Annotated[int | None, HIDDEN] = None
    seqs: Annotated[int | None, HIDDEN] = None
    max_model_len: Annotated[int | None, HIDDEN] = None
    step_tokens: Annotated[tuple[int, ...], HIDDEN] = ()
    pool_tokens: Annotated[int | None, HIDDEN] = None
    # Encoders only.
    max_len: Annotated[int | None, HIDDEN] = None
    dimensions: Annotated[int | None, HIDDEN] = None


def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)], options: ServeConfig
) -> Iterator[ServeReady]:
    """Serve a model over OpenAI's HTTP API.

    It is planned for its devices. Stops on SIGTERM or Ctrl-C: running requests finish, new ones are refused.
    A live page is at /.
    """
    started_s = time.perf_counter()
    meeting = options.meeting
    if meeting is not None and meeting.rank > 0:
        from tessera.serve.joining import LocalModel

        work(meeting, LocalModel(model, may_import=True))
        return
    sys.setswitchinterval(SWITCH_S)
    interruptible()
    with logging_by(options), listening(model, options) as listener:
        gc.collect()
        gc.freeze()  # a full collection would stop everything for 0.2 s
        for _ in listener.server.serving(listener.bound):
            yield listener.ready(time.perf_counter() - started_s)


@dataclass(frozen=True)
class Listening:
    running: "RunningService"
    server: "HttpServer"
    bound: socket.socket

    @property
    def url(self) -> str:
        from tessera.serve.server import url_of

        return url_of(self.bound, "https" if self.server.config.is_ssl else "http")

    def ready(self, seconds: float) -> ServeReady:
        headline = f"{self.running.title} at {self.url} after {seconds:.1f} s"
        facts = self.running.facts | {"notes": self.running.summary, "headline": headline}
        return msgspec.convert(facts | {"url": self.url, "seconds": round(seconds, 3)}, ServeReady)


@contextmanager
def listening(model: str, config: ServeConfig) -> Iterator[Listening]:
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        extra_module(module, "serve")
    from tessera.cli.start import started
    from tessera.execute.processes import warm_up
    from tessera.serve.server import HttpServer, allowed_connections, bind, is_loopback

    config.check()
    meeting = config.meeting
    if meeting is not None and meeting.rank > 0:
        raise TesseraError("only rank 0 answers requests", "Start this one by `tessera serve`.", "--rank")
    with bind(config.host, config.port) as bound, ExitStack() as stack:
        if not config.api_key and not is_loopback(config.host):
            say(
                f"warning: everyone who reaches {config.host} can use this server; "
                "set --api-key to require a key"
            )
        if meeting is None and config.ray is None:
            warm_up()  # the fork server imports torch while this process does
        devices, hub = stack.enter_context(gathered(config.device_names(model), meeting, config.ray, model))
        cluster = wire(cap_memory(devices, config.memory or []), config.link or [])
        allowed, remark = allowed_connections(config.limits.connections)
        if remark:
            say(f"note: {remark}")
        with progress(f"serving {model}") as advance:
            service = stack.enter_context(started(model, cluster, config, hub=hub, advance=advance))

        async def stop() -> None:
            await asyncio.to_thread(service.service.stop, 0.0)

        limits = replace(config.limits, connections=allowed)
        log = log_line if config.log_json else say
        proxies, tls = config.forwarded_allow_ips, config.tls
        yield Listening(service, HttpServer(service.app, limits, stop, log, proxies, tls), bound)


@contextmanager
def answering(model: str, config: ServeConfig) -> Iterator[tuple[str, threading.Thread]]:
    """The address of a service, and the thread in which it answers."""
    with listening(model, config) as listener:
        ready = threading.Event()

        def answer() -> None:
            try:
                for _ in listener.server.serving(listener.bound):
                    ready.set()
            finally:
                ready.set()

        thread = threading.Thread(target=answer, name="tessera-http", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield listener.url, thread
        finally:
            listener.server.end()
            thread.join()
