"""HttpServer: uvicorn with limited connections and an orderly shutdown.

A `Connection` is closed if its request head is late or its client does not read. The rest of a head that is
too large, or of a body that was answered early, is dropped: closing would reset what the client has yet to
read. At the limit of connections the oldest idle one is closed for a new one; it is refused only if all are
busy. Bytes are read in small pieces, so that no client holds the event loop for long.

SIGTERM or SIGINT begins the shutdown: new requests get 503, running ones some seconds and then an error. A
second signal ends the server at once.
"""

import asyncio
import errno
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tessera.errors import TesseraError
from tessera.execute.processes import raise_file_limit
from tessera.serve.limits import CONNECTION, HEAD_BYTES, HttpLimits

# File descriptors of workers, files and the loop.
OWN_FILES = 256
# Queued by the system, and accepted at once.
BACKLOG, ACCEPTED_AT_ONCE = 4096, 64
READ_BYTES = 2**14
# Offers of other protocols are ignored; the parser would take the body for one (Java's client offers HTTP/2).
UPGRADE = b"\nupgrade:"
UPGRADES = re.compile(UPGRADE, re.IGNORECASE)
# For cancelled streams to send their error.
LAST_WORDS_S = 2.0
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class ConnectionTable:
    def __init__(self, limits: HttpLimits) -> None:
        self.limits, self.num_open = limits, 0
        # Oldest first.
        self.idle: dict[Connection, None] = {}
        # Shared: a read is parsed before the next begins.
        self.buffer = memoryview(bytearray(READ_BYTES))


class Parser(HttpToolsProtocol):
    # Line feed, which is parsed, and bytes after it that may begin an offer.
    _line = b""

    def data_received(self, data: bytes) -> None:
        if not self.is_in_body:
            text, num_parsed = UPGRADES.sub(b"\nx-offer:", self._line + data), len(self._line[:1])
            line = text[text.rfind(b"\n") :]
            self._line = line if UPGRADE.startswith(line.lower()) else b""
            data = self._line[1:]
            super().data_received(text[num_parsed : len(text) - len(data)])
        if self.is_in_body:  # where no line is an offer
            self._line = b""
            super().data_received(data)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.cycle.more_body = False  # also of a request that is answered

    @property
    def is_in_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body


class Connection(asyncio.BufferedProtocol):
    _transport: asyncio.Transport

    def __init__(self, table: ConnectionTable, **options: Any) -> None:
        self._table, self._limits = table, table.limits
        self._http = Parser(**options | {"app_state": {CONNECTION: self}})
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        # The next request may begin before the last has returned.
        self._num_requests = 0
        # Bytes since the last request ended.
        self.received = 0
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by their methods only.
        self._transport = transport = cast(asyncio.Transport, transport)
        self._http.connection_made(transport)
        self._table.num_open += 1
        if self._table.num_open > self._limits.connections:
            if not self._table.idle:
                transport.write(TOO_MANY)
                transport.close()
                return
            next(iter(self._table.idle))._drop()
        self._rest()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._table.buffer

    def buffer_updated(self, nbytes: int) -> None:
        is_idle = self in self._table.idle
        if is_idle and not self.received:  # a request head has the idle time-out
            self._start_idle_timer()
        self.received += nbytes
        is_rest = is_idle and self._http.is_in_body
        if not self._is_refused:
            self._http.data_received(bytes(self._table.buffer[:nbytes]))
        if is_rest and not self._http.is_in_body:
            self.received = 0
        if is_idle and self.received > HEAD_BYTES and not (is_rest or self._is_refused):
            self._refuse()
        elif is_idle and self.received > self._limits.bodies_bytes:
            self._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.num_open -= 1
        self._wake()
        self._cancel_stall_timer()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()
        loop = asyncio.get_running_loop()
        self._stall_timer = loop.call_later(self._limits.stall_s, self._transport.abort)

    def resume_writing(self) -> None:
        self._http.resume_writing()
        self._cancel_stall_timer()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around a request."""
        self._num_requests += 1
        self._wake()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._rest()

    def _wake(self) -> None:
        self._table.idle.pop(self, None)
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _rest(self) -> None:
        self.received = 0
        if not self._transport.is_closing():
            self._table.idle[self] = None
            self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(self._limits.idle_s, self._drop)

    def _refuse(self) -> None:
        self._is_refused = True
        self._transport.write(HEAD_TOO_LARGE)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _drop(self) -> None:
        self._wake()
        if self._transport.get_write_buffer_size():  # closing would wait for a client that does not read
            self._transport.abort()
        else:
            self._transport.close()


class HttpServer(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        limits: HttpLimits,
        stop: Callable[[], Awaitable[None]],
        say: Callable[[str], None] = lambda text: None,
        proxies: str = "",
        tls: tuple[str, str] | None = None,
    ) -> None:
        """`proxies`: whose X-Forwarded headers are believed; `tls`: files of certificate and key."""
        config = uvicorn.Config(
            app,
            http=partial(Connection, ConnectionTable(limits)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=proxies,
            ssl_certfile=tls and tls[0],
            ssl_keyfile=tls and tls[1],
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=int(limits.idle_s) + 1,  # the timer of `Connection` comes first
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a client gets its own errors
        self._limiter, self._limits, self._stop, self._say = app.state.limiter, limits, stop, say
        self._ready = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)
        self._ready.set()

    def serving(self, bound: socket.socket) -> Iterator[None]:
        """Yields once, when the server answers; ends after its shutdown."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            loop = runner.get_loop()
            serving, ready = loop.create_task(self.serve([bound])), loop.create_task(self._ready.wait())
            loop.run_until_complete(asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED))
            if ready.done():
                yield
            loop.run_until_complete(serving)

    def end(self) -> None:
        """A second call ends at once. Thread-safe."""
        if self._loop is None:
            self.should_exit = True
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._ending is not None:
            self.force_exit = self.should_exit = True
            return
        self._limiter.is_closed = True
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        if self._limiter.inside:
            wait = f"finishing {self._limiter.inside} requests, {self._limits.drain_s:g} s at most"
            self._say(f"{wait}; interrupt again to stop at once")
        if not await self._limiter.emptied(self._limits.drain_s):
            self._say(f"{self._limiter.inside} requests did not finish in time and are stopped")
        with suppress(RuntimeError):  # no thread starts while the interpreter ends; the caller stops it then
            await self._stop()
        await self._limiter.emptied(LAST_WORDS_S)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.end()


def bind(host: str, port: int) -> socket.socket:
    place = f"{host}:{port}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError):
        raise TesseraError("there is no such address", "Use 127.0.0.1 or 0.0.0.0.", place) from None
    bound = socket.socket(family, kind, number)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        is_taken = error.errno == errno.EADDRINUSE
        what = "the port is in use" if is_taken else f"cannot listen: {error.strerror}"
        raise TesseraError(what, "Choose another: --port 0 or --host 0.0.0.0.", place) from None
    return bound


def check_tls(certificate: str, key: str) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        remedy = "Give a certificate and its key as PEM files: --tls-cert, --tls-key."
        raise TesseraError(f"cannot use the certificate: {error}", remedy, certificate) from None


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"


def allowed_connections(num: int) -> tuple[int, str]:
    """At most `num`, with a remark where the limit of open files allows fewer."""
    num_files, allowed = num + OWN_FILES, max(1, raise_file_limit() - OWN_FILES)
    if allowed >= num:
        return num, ""
    remark = f"this shell allows {allowed:,} connections, not {num:,}: raise it with `ulimit -n {num_files}`"
    return allowed, remark


def is_loopback(host: str) -> bool:
    try:
        addresses = {x[4][0] for x in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return all(x == "::1" or str(x).startswith("127.") for x in addresses)
