"""Limits: access to the server, and how much of it one client may use.

`server` limits connections and slow readers, `openai.bodies` what a body contains.

With keys, every path except `OPEN` needs `Authorization: Bearer KEY`: /health is for load balancers, and the
live page holds no figures. The key is checked before the body is read, in constant time. Without keys, a
server on loopback accepts only local host names (DNS rebinding).
"""

import asyncio
import hashlib
import hmac
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.serve.openai.errors import TINY_CHUNKS, ApiError

# Outside the shared budget: large bodies never keep out small ones.
FREE_BYTES = 64 * 2**10
# Maximum of a request head, and of chunk headers beyond the body's size.
HEAD_BYTES = 64 * 2**10
OPEN = frozenset({"/", "/health"})
# Keys of the ASGI scope; the client's name is for fair turns.
CLIENT, CONNECTION = "tessera.client", "tessera.connection"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body_bytes: int = 4 * 2**20
    # Bodies being read, without the first FREE_BYTES of each.
    bodies_bytes: int = 256 * 2**20
    body_s: float = 30.0
    # Running or waiting.
    requests: int = 2048
    # For a client that does not read.
    stall_s: float = 60.0
    connections: int = 16384
    # For a complete request head.
    idle_s: float = 75.0
    # For running requests at shutdown.
    drain_s: float = 30.0


class ClientGone(Exception): ...


class RequestLimiter:
    def __init__(self, limits: HttpLimits) -> None:
        self._limits, self.is_closed = limits, False
        self.inside = self.held_bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """429 above the limit, 503 during shutdown."""
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
        if num_bytes > 0 and self.held_bytes + num_bytes > self._limits.bodies_bytes:
            message = "too many large requests at once. Try again later."
            raise ApiError(429, message, code="rate_limit_exceeded")
        self.held_bytes += num_bytes

    async def emptied(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return self._empty.is_set()


class HeldBody:
    def __init__(self, limits: HttpLimits, limiter: RequestLimiter) -> None:
        self._limits, self._limiter = limits, limiter
        self._held = 0
        self.raw = b""

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def drop(self) -> None:
        self.raw = b""
        self._limiter.hold(-self._held)
        self._held = 0

    async def receive(self, scope: Scope, receive: Receive) -> None:
        headers, most = Headers(scope=scope), self._limits.body_bytes
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            message = "the body must be application/json: send the header 'Content-Type: application/json'"
            raise ApiError(415, message, code="unsupported_media_type")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            message = f"the body must not be compressed ({coding[:64]}): send it without 'Content-Encoding'"
            raise ApiError(415, message, code="unsupported_media_type")
        too_large = ApiError(413, f"a body of more than {most:,} bytes", code="request_too_large")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise too_large
        connection = scope.get("state", {}).get(CONNECTION)
        body, is_complete = bytearray(), False
        try:
            async with asyncio.timeout(self._limits.body_s):
                while not is_complete:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ClientGone
                    body += event.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if connection is not None and connection.received > HEAD_BYTES + 2 * len(body):
                        raise ApiError(400, "the chunks of the body are too small", code=TINY_CHUNKS)
                    more = max(0, len(body) - FREE_BYTES) - self._held
                    self._limiter.hold(more)
                    self._held += more
                    is_complete = not event.get("more_body", False)
        except TimeoutError:
            message = f"the body did not arrive within {self._limits.body_s:g} s"
            raise ApiError(408, message, code="timeout") from None
        self.raw = bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Cancels the work and raises `ClientGone` when the client disconnects."""
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
            _ = task.cancelled() or task.exception()  # or asyncio would log it


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class AccessMiddleware:
    def __init__(self, app: ASGIApp, keys: Iterable[str], is_local: bool, root_path: str = "") -> None:
        self._app, self._is_local, self._root_path = app, is_local, root_path
        self._hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = scope.get("state", {}).get(CONNECTION)
        with nullcontext() if connection is None else connection.busy():
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        number = self._number(headers) if self._hashes else None
        scope["root_path"] = self._root_path
        path = scope["path"].removeprefix(self._root_path)
        error = self._refusal(path or "/", headers, number)
        if error is None:
            host = (scope.get("client") or ("", 0))[0]
            scope[CLIENT] = f"key {number}" if number is not None else host
            await self._app(scope, receive, send)
            return
        response = error.response
        if "transfer-encoding" in headers:
            response.headers["connection"] = "close"  # tiny chunks cost much time
        await response(scope, receive, send)

    def _refusal(self, path: str, headers: Headers, number: int | None) -> ApiError | None:
        if self._hashes and number is None and path not in OPEN:
            message = "The key is not one of this server's."
            if not _bearer(headers):
                message = "This server needs a key: send the header 'Authorization: Bearer KEY'."
            return ApiError(401, message, code="invalid_api_key")
        if not self._hashes and self._is_local and not is_local_name(headers.get("host", "")):
            message = "This server answers to localhost only; start it with --api-key to be called otherwise."
            return ApiError(403, message, code="unknown_host")
        return None

    def _number(self, headers: Headers) -> int | None:
        digest = _hash(_bearer(headers))
        matches = [hmac.compare_digest(digest, key) for key in self._hashes]  # no early end
        return matches.index(True) if any(matches) else None


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(headers: Headers) -> bytes:
    word, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if word.lower() == "bearer" else b""


def is_local_name(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if name in {"", "localhost"} or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
