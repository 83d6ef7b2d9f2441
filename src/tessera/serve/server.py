"""The server: a socket, connections with limits, and an end in good order.

A connection that brings no whole request for a while is closed. When there are too many, the oldest that
brings none makes room; only if all of them are busy is the new one refused. So idle and half-open sockets,
however many, never keep a client with a request out. A client that does not read is cut off; at most
the transport's buffer (64 KiB) and the text of its own answer wait for it.

SIGTERM or SIGINT closes the server: what comes is refused with 503, what runs has some seconds to finish,
then it is stopped with an error of its own. A second signal ends at once.
"""

import asyncio
import errno
import json
import logging
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tessera.errors import TesseraError
from tessera.serve.limits import HttpLimits
from tessera.serve.openai.errors import ApiError

# Descriptors that are not connections: workers, files, the loop itself.
OWN_FILES = 256
# Connections that the system keeps until they are taken, and those that are taken before streams go on.
BACKLOG = 4096
TAKEN_AT_ONCE = 64
# After the drain: seconds in which cancelled streams may still be told so.
LAST_WORDS_S = 2.0


class Guarded(H11Protocol):
    """uvicorn's connection, closed when it brings nothing, and refused in OpenAI's shape."""

    limits = HttpLimits()
    # All connections without a request of one server, the oldest first.
    idle: dict["Guarded", None]
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _has_begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            if not self.idle:
                self._refuse(ApiError(503, "too many connections; all of them are busy", code="overloaded"))
                return
            next(iter(self.idle))._drop()
        self._rest()

    def data_received(self, data: bytes) -> None:
        """A request is whole when uvicorn has made a cycle of it; until then the clock runs."""
        super().data_received(data)
        if self._is_busy():
            self._wake()
        elif not self._has_begun and self in self.idle:
            self._has_begun = True  # the first bytes of a request: its head has as long as an idle connection
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection; what was being answered is told that its client has gone."""
        self._wake()
        self._forget_stall()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The connection is idle again, unless another request was already there."""
        super().on_response_complete()
        if not self._is_busy() and not self.transport.is_closing():
            self._rest()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to: it has a while to catch up."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the shape of all errors."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _rest(self) -> None:
        self._has_begun = False
        self.idle[self] = None
        self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.limits.idle_s, self._drop)

    def _wake(self) -> None:
        self.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self._wake()
        if self.transport.get_write_buffer_size():  # closing would wait for a client that does not read
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _refuse(self, error: ApiError) -> None:
        self._wake()
        body = json.dumps(error.shape).encode()
        head = (
            f"HTTP/1.1 {error.status} {'Bad Request' if error.status == 400 else 'Service Unavailable'}\r\n"
        )
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((head + fields).encode() + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn's server with an end in good order."""

    def __init__(
        self,
        app: FastAPI,
        limits: HttpLimits,
        stop: Callable[[], Awaitable[None]],
        say: Callable[[str], None] = lambda text: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        guarded = type("GuardedHere", (Guarded,), {"limits": limits, "idle": {}})
        config = uvicorn.Config(
            app,
            http=guarded,
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=TAKEN_AT_ONCE,
            timeout_keep_alive=int(limits.idle_s) + 1,  # ours is first
            timeout_graceful_shutdown=int(LAST_WORDS_S),
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients do wrong, they are told
        self._limiter, self._limits, self._stop, self._say = app.state.limiter, limits, stop, say
        self._on_ready = on_ready
        self._ending: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remembers the loop, which `end` may be told about from other threads."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)
        self._on_ready()

    def end(self) -> None:
        """Begins the end in good order; the second time, ends at once. From any thread."""
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
        await self._stop()
        await self._limiter.emptied(LAST_WORDS_S)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals begin the end; afterwards they mean what they meant before, and are not raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.end()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    place = f"{host}:{port}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError):
        raise TesseraError("there is no such address", "Use 127.0.0.1 or 0.0.0.0.", place) from None
    found = socket.socket(family, kind, number)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise TesseraError(
                "the port is in use", "Choose another: --port 0 finds a free one.", place
            ) from None
        raise TesseraError(f"cannot listen: {error.strerror}", "Choose another port.", place) from None
    return found


def url_of(bound: socket.socket) -> str:
    """Where clients on this machine find the server."""
    host, port = bound.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def raise_file_limit(wanted: int) -> tuple[int, str]:
    """Connections that the process may have, at most those wanted, and a remark if it has to be fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + OWN_FILES
    if soft < need:
        most = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft >= need:
        return wanted, ""
    allowed = max(1, soft - OWN_FILES)
    return (
        allowed,
        f"this shell allows {allowed:,} connections, not {wanted:,}: raise it with `ulimit -n {need}`",
    )


def is_loopback(host: str) -> bool:
    """True if only this machine can connect."""
    try:
        found = {x[4][0] for x in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return all(x == "::1" or str(x).startswith("127.") for x in found)
