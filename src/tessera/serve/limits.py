"""Limits: who may use the server, and how much one client, and all of them, may take of it.

    a body       at most so many bytes, which must come within a time; large ones share a budget until
                 they are read (what is in it, `openai.bodies` counts)
    requests     at most so many at once; while the server closes, none
    a client     that goes has its generation cancelled

Connections, and clients that do not read, have limits in `server`.

With at least one key, every path needs `Authorization: Bearer KEY` except those of `OPEN`: /health, for load
balancers, and the live page itself, which holds no figures and asks for the key. All keys are compared, in
constant time, so that how long an answer takes says nothing about them.

Without a key, a server that listens on loopback answers to this machine's names only. Otherwise a page from
elsewhere, whose name its owner lets point to 127.0.0.1 for a moment, could use it through the browser.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.errors import TesseraError
from tessera.serve.openai.errors import AMBIGUOUS, ApiError

# So much of every body is not counted: large bodies never keep out small ones.
FREE_BYTES = 64 * 2**10
OPEN = frozenset({"/", "/health"})
# Where the name of the client is kept for the queue, in which clients take turns.
CLIENT = "tessera.client"
MIN_KEY_CHARS = 8

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


class Keys:
    """An ASGI layer that refuses strangers and names clients."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], is_local: bool) -> None:
        self._app, self._is_local = app, is_local
        self._hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through under a client's name, or answers 400, 401 or 403."""
        if scope["type"] == "http":
            number = self._number(scope) if self._hashes else None
            error = self._refusal(scope, number)
            if error is not None:
                await error.response(scope, receive, send)
                return
            host = (scope.get("client") or ("", 0))[0]
            scope[CLIENT] = f"key {number}" if number is not None else host
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, number: int | None) -> ApiError | None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "both Content-Length and Transfer-Encoding say where the body ends; send one of them"
            return ApiError(400, message, code=AMBIGUOUS)
        if self._hashes:
            is_welcome = number is not None or scope["path"] in OPEN
            return None if is_welcome else ApiError(401, _complaint(scope), code="invalid_api_key")
        if self._is_local and not is_local_name(headers.get("host", "")):
            message = "This server answers to localhost only; start it with --api-key to be called otherwise."
            return ApiError(403, message, code="unknown_host")
        return None

    def _number(self, scope: Scope) -> int | None:
        given = _hash(_bearer(scope))
        # No early end: every key is compared.
        same = [hmac.compare_digest(given, known) for known in self._hashes]
        return same.index(True) if any(same) else None


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes:
    word, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if word.lower() == "bearer" else b""


def is_local_name(host: str) -> bool:
    """True if a Host header names this machine; an empty one, of HTTP/1.0, is no browser's."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    return name in {"", "localhost", "::1"} or name.endswith(".localhost") or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _complaint(scope: Scope) -> str:
    if not _bearer(scope):
        return "This server needs a key: send the header 'Authorization: Bearer KEY'."
    return "The key is not one of this server's."


def read_keys(given: Iterable[str]) -> tuple[str, ...]:
    """Keys from the command line: each is a key, or @FILE with one key a line."""
    keys: list[str] = []
    for word in given:
        keys += _from_file(Path(word[1:])) if word.startswith("@") else [word]
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            message = f"a key needs {MIN_KEY_CHARS} or more printable ASCII characters without blanks"
            raise TesseraError(message, "Make one: openssl rand -hex 24.", "--api-key")
    return tuple(dict.fromkeys(keys))


def _from_file(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(f"cannot read the keys: {error}", place=str(path)) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise TesseraError("a file without a key", "Write one key a line.", str(path))
    return keys
