"""Servers for tests: a scripted service, which needs no model, and any service behind a real socket."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tessera.ir import Decision, DecisionKind, Role, ServicePlan
from tessera.serve.answer import Answer, AnswerBuffer
from tessera.serve.app import create_app
from tessera.serve.limits import HttpLimits
from tessera.serve.metrics import Metrics
from tessera.serve.openai.read import Endpoint, ModelCard
from tessera.serve.records import (
    AnswerPiece,
    Ask,
    DeviceView,
    Event,
    Finish,
    GroupView,
    Latency,
    Snapshot,
    Token,
)
from tessera.serve.server import HttpServer, bind, url_of
from tessera.serve.text import ByteText

CAPACITY = 256
MODEL = "scripted"


def letters(ask: Ask) -> list[int]:
    """The scripted answer: letters that depend on the prompt and, when sampled, on the seed."""
    start = sum(ask.prompt) + (ask.sampling.seed or 0 if ask.sampling.temperature else 0)
    return [97 + (start + 7 * i) % 26 for i in range(ask.max_tokens)]


@dataclass
class Scripted:
    """A service that says letters. Used by one event loop."""

    token_s: float = 0.0
    # Each letter is said so often.
    times: int = 1
    # Said instead of letters; then the answer stops by itself.
    script: str = ""
    # Raised instead of an answer.
    refusal: Exception | None = None
    # After so many tokens the answer ends with an error.
    fails_after: int | None = None
    asks: list[Ask] = field(default_factory=list)
    running: int = 0
    closed_early: int = 0
    is_stopped: bool = False
    failure: str = ""

    def answer(self, ask: Ask, beside: Answer | None = None) -> Answer:
        if self.refusal is not None:
            raise self.refusal
        self.asks.append(ask)
        answer, buffer = beside or Answer(), AnswerBuffer()
        buffer.waiter = answer.waiter
        answer.add(buffer, asyncio.ensure_future(_give(_said(self, ask), buffer)).cancel)
        return answer

    def snapshot(self) -> Snapshot:
        devices = (
            DeviceView("emu:a100", 0.75, 80 * 2**30),
            DeviceView("emu:l40s", 0.25, 48 * 2**30, restarts=2),
        )
        decision = Decision(
            1.5, DecisionKind.SWITCH, "throughput", "3 requests wait; <b>latency</b> is too slow"
        )
        return Snapshot(
            model=MODEL,
            policy="throughput",
            policies=("throughput", "latency"),
            devices=devices,
            links=(("emu:a100", "emu:l40s", 0.1, 12345),),
            running=self.running,
            waiting=3,
            pages_used=self.running,
            pages=8,
            prefix_queries=200,
            prefix_hits=150,
            latency=Latency(0.2, 1.25, 0.021, 0.04),
            up_s=61.5,
            groups=(GroupView(Role.MIXED, ("emu:a100",), 4, 8, 2, max_sequences=8, places=2, waiting=1),),
            pages_moved=1234,
            prompt_tokens=sum(len(ask.prompt) for ask in self.asks),
            output_tokens=17,
            tokens_per_s=42.0,
            finished={"stop": 2, "cancelled": 1},
            decisions=(decision,),
            decided={"switch": 1},
        )


async def _give(events: AsyncGenerator[Event, None], buffer: AnswerBuffer) -> None:
    """To the reader, as an engine does, but only when it has taken the last."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finish):
                buffer.finish(event)
            else:
                buffer.put(event.text, event.tokens[0])
            buffer.waiter.wake()
            await asyncio.sleep(0)
            while buffer.has_news:
                await asyncio.sleep(0.002)


async def _said(service: Scripted, ask: Ask) -> AsyncGenerator[Event, None]:
    service.running += 1
    num, prompt, is_whole = 0, len(ask.prompt), False
    try:
        for number in service.script.encode() or letters(ask):
            await asyncio.sleep(service.token_s)
            if service.is_stopped:
                yield Finish("cancelled", prompt, num, "the service was stopped")
                return
            if num == service.fails_after:
                yield Finish("error", prompt, num, "emu:a100 was lost twice")
                return
            yield AnswerPiece(chr(number) * service.times, (_token(number, ask.sampling.logprobs),))
            num += 1
        is_whole = True
        yield Finish("stop" if service.script else "length", prompt, num)
    finally:
        service.running -= 1
        service.closed_early += not is_whole


def _token(number: int, num_top: int | None) -> Token:
    top = tuple((97 + (number - 97 + i) % 26, -0.5 - i) for i in range(num_top or 0))
    return Token(number, None if num_top is None else -0.5, top)


@dataclass
class Running:
    """A server on a socket, in a thread."""

    url: str
    port: int
    server: HttpServer
    thread: threading.Thread


@contextmanager
def running(
    service: Scripted,
    limits: HttpLimits | None = None,
    keys: Sequence[str] = (),
    plans: tuple[ServicePlan, ...] = (),
    is_local: bool = False,
) -> Iterator[Running]:
    """Serves a scripted service until the end of the block."""
    endpoint = Endpoint(ModelCard(MODEL, ByteText(), CAPACITY, 258), service, 1_700_000_000, lambda: plans)

    async def stop() -> None:
        service.is_stopped = True

    with serving(endpoint, Metrics(MODEL, service.snapshot), limits, keys, stop, is_local) as found:
        yield found


async def _leave_it() -> None:
    """The service is stopped by its owner."""


@contextmanager
def serving(
    endpoint: Endpoint,
    metrics: Metrics,
    limits: HttpLimits | None = None,
    keys: Sequence[str] = (),
    stop: Callable[[], Awaitable[None]] = _leave_it,
    is_local: bool = False,
) -> Iterator[Running]:
    """Serves anything until the end of the block."""
    rules = limits or HttpLimits(drain_s=2.0)
    with listening(create_app(endpoint, metrics, rules, keys, is_local), rules, stop) as found:
        yield found


@contextmanager
def listening(
    app: Any, limits: HttpLimits | None = None, stop: Callable[[], Awaitable[None]] = _leave_it
) -> Iterator[Running]:
    """Puts an application behind a socket until the end of the block."""
    server = HttpServer(app, limits or HttpLimits(drain_s=2.0), stop)
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield Running(url_of(bound), bound.getsockname()[1], server, thread)
    server.end()
    thread.join(10)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Fails if the condition does not come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
