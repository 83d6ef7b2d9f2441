"""Limits: how much one client, and all of them, may take of the server.

    a body       at most so many bytes, which must come within a time; large ones share a budget until
                 they are read (what is in it, `openai.bodies` counts)
    requests     at most so many at once; while the server closes, none
    a client     that goes has its generation cancelled

Connections, and clients that do not read, have limits in `server`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tessera.serve.openai.errors import ApiError

# So much of every body is not counted: large bodies never keep out small ones.
FREE_BYTES = 64 * 2**10

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What is allowed; every figure is an option of `tessera serve` or its documented constant."""

    body_bytes: int = 4 * 2**20
    # Of all bodies being read together, not counting the first part of each.
    bodies_bytes: int = 256 * 2**20
    # A body that has not come whole by then is given up.
    body_s: float = 30.0
    # Requests being answered or waiting in the queue.
    requests: int = 2048
    # A client that does not read what is sent for so long is cut off.
    stall_s: float = 60.0
    # Open connections; of those without a request the oldest makes room for a new one.
    connections: int = 16384
    # A connection without a whole request is closed after so long.
    idle_s: float = 75.0
    # What runs has so long to finish when the server is told to stop.
    drain_s: float = 30.0


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


class RequestLimiter:
    """Counts the requests that are inside, and lets no more in than allowed."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits, self.inside, self.is_closed = limits, 0, False
        # Bytes of large bodies that are being read.
        self.held_bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While one request is answered; refuses by 429 and, when closed, by 503."""
        self.check_open()
        if self.inside >= self._limits.requests:
            message = f"{self.inside} requests are being served, the most at once. Try again later."
            raise ApiError(429, message, code="rate_limit_exceeded")
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._empty.set()

    def check_open(self) -> None:
        if self.is_closed:
            raise ApiError(503, "The server is shutting down and takes no new request.", code="shutting_down")

    def hold(self, num_bytes: int) -> None:
        """Counts bytes of a large body; refuses by 429 if all of them are too many."""
        if num_bytes > 0 and self.held_bytes + num_bytes > self._limits.bodies_bytes:
            message = "too many large requests at once. Try again later."
            raise ApiError(429, message, code="rate_limit_exceeded")
        self.held_bytes += num_bytes

    async def emptied(self, timeout_s: float) -> bool:
        """Waits until nobody is inside; False if some still are after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


class HeldBody:
    """The body of one request, which counts as long as it is there."""

    def __init__(self, limits: HttpLimits, limiter: RequestLimiter) -> None:
        self._limits, self._limiter = limits, limiter
        self._held = 0
        self.raw = b""

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def drop(self) -> None:
        """It has been read, and is needed no more."""
        self.raw = b""
        self._limiter.hold(-self._held)
        self._held = 0

    async def receive(self, headers: dict[bytes, bytes], receive: Receive) -> None:
        """Waits for a whole body of JSON, or 415, 413, 408, 429; one that is announced as too large never."""
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            message = "the body must be application/json: send the header 'Content-Type: application/json'"
            raise ApiError(415, message, code="unsupported_media_type")
        limits = self._limits
        message = f"a body of more than {limits.body_bytes:,} bytes"
        too_large = ApiError(413, message, code="request_too_large")
        said = headers.get(b"content-length", b"")
        if said.isdigit() and int(said) > limits.body_bytes:
            raise too_large
        size, parts, is_whole = 0, [], False
        try:
            async with asyncio.timeout(limits.body_s):
                while not is_whole:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(event.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body_bytes:
                        raise too_large
                    more = max(0, size - FREE_BYTES) - self._held
                    self._limiter.hold(more)
                    self._held += more
                    is_whole = not event.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {limits.body_s:g} s", code="timeout") from None
        self.raw = b"".join(parts)


async def while_there(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs work while the client is there; cancels it and raises ClientGone when it goes."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            # An error on the way out has nobody to be told to; asking for it keeps asyncio quiet.
            _ = task.cancelled() or task.exception()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
