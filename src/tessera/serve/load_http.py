"""A small HTTP/1.1 client: one question at a time on a kept connection, with the time of every event.

A load generator shares the machine with the server it measures, so what it costs itself counts: bytes are
read where they arrive, and one future is woken an answer, not an event.

Not handled: redirects, proxies, compression and HTTP/2.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from tessera.errors import LoadError
from tessera.serve.load_reply import Reply

# A connection that idled longer is not used again: the server may be closing it just now, and a request that
# is sent a second time would hide one that the server dropped.
MAX_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what every one of them says."""

    host: str
    port: int
    is_tls: bool
    # Before every path; empty for most.
    prefix: str
    headers: tuple[tuple[str, str], ...] = ()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """One request as it goes over the wire."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        head += [f"{name}: {value}" for name, value in self.headers]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join((*head, "", "")).encode("latin-1") + body


def parse_target(url: str, api_key: str | None = None) -> Target:
    """A target from what a user wrote: `http://host:port`, with or without a trailing `/v1`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise LoadError("url", f"'{url}' is no address of a server", "Write http://127.0.0.1:8000.", "--url")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise LoadError("url", "the key has characters that no header can carry", place="--api-key")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    return Target(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, headers)


class _Wire(asyncio.Protocol):
    """One connection; at most one answer is being read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reply = Reply()
        self.done: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.done is None or self.done.done():
            return
        try:
            self.reply.feed(data, time.perf_counter())
        except LoadError as error:
            self.done.set_exception(error)
            return
        if self.reply.is_done:
            self.done.set_result(self.reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.done is None or self.done.done():
            return
        try:
            self.reply.end()
        except LoadError as error:
            self.done.set_exception(LoadError("reset", str(exc)) if exc else error)
            return
        self.done.set_result(self.reply)


class Client:
    """Asks one target, one question at a time, over one connection that is made again when it must be."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target, self._timeout_s = target, timeout_s
        self._wire: _Wire | None = None
        self._used_s = 0.0
        # Used where the scheme says so; made once, for it reads the machine's certificates.
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def ask(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The whole answer; LoadError if there is none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(self._target.request(method, path, body))
        except TimeoutError:
            self.close()
            raise LoadError("timeout", f"no whole answer within {self._timeout_s:g} s") from None
        except BaseException:
            # Whatever is still under way must not be read as the next answer.
            self.close()
            raise

    async def _ask(self, request: bytes) -> Reply:
        if time.perf_counter() - self._used_s > MAX_IDLE_S:
            self.close()
        if self._wire is None or self._wire.transport is None:
            self._wire = await self._connect()
        wire, transport = self._wire, self._wire.transport
        assert transport is not None
        wire.reply = Reply()
        wire.done = asyncio.get_running_loop().create_future()
        transport.write(request)
        reply = await wire.done
        self._used_s = time.perf_counter()
        if not reply.can_follow:
            self.close()
        return reply

    async def _connect(self) -> _Wire:
        loop = asyncio.get_running_loop()
        host, port = self._target.host, self._target.port
        try:
            _, wire = await loop.create_connection(_Wire, host, port, ssl=self._tls)
        except OSError as error:
            remedy = "Is the server running?"
            raise LoadError("connect", f"cannot connect: {error}", remedy, f"{host}:{port}") from None
        return wire

    def close(self) -> None:
        """Drops the connection, if there is one."""
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.abort()
        self._wire = None
