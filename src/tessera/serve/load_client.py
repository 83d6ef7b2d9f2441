"""Asks a server of OpenAI's kind one question at a time over a kept connection, and times every event.

A load generator shares the machine with the server it measures, so what it costs itself counts: h11 reads
bytes where they arrive, and one future is woken an answer, not an event (httpx takes ten times as long).

The first token is the first event that carries text: a role, or text that is still held back, is none. A
stream counts as answered only if it came to `[DONE]` with a finish reason; everything else is a LoadError
with a kind to count by. Not handled: redirects, proxies, compression and HTTP/2.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

import h11

from tessera.errors import LoadError

# A connection that idled longer is not used again: the server may be closing it just now, and a request that
# is sent a second time would hide one that the server dropped.
MAX_IDLE_S = 1.0
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20
# Of a server's message, as much as a person wants to read.
SHOWN_CHARS = 300

Api = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where requests go, and what every one of them says."""

    host: str
    port: int
    is_tls: bool
    # Before every path; empty for most.
    prefix: str
    headers: tuple[tuple[str, str], ...] = ()

    def request(self, method: str, path: str, body: bytes, http: h11.Connection) -> bytes:
        """One request as it goes over the wire."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        headers = [("Host", f"{host}:{self.port}"), ("Accept", "*/*"), *self.headers]
        if body:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        head = h11.Request(method=method, target=self.prefix + path, headers=headers)
        events: tuple[h11.Event, ...] = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(http.send(event) or b"" for event in events)


def parse_address(url: str, api_key: str | None = None) -> ServerAddress:
    """An address from what a user wrote: `http://host:port`, with or without a trailing `/v1`."""
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
    return ServerAddress(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, headers)


class Reply:
    """One response, read as its bytes come."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        # (when, data) of each server-sent event; only of a body that is a stream of events.
        self.events: list[tuple[float, bytes]] = []
        # When the first byte of the body came.
        self.first_s: float | None = None
        self._is_events = False

    def begin(self, head: h11.Response) -> None:
        """The status and the headers."""
        self.status = head.status_code
        kinds = [value for name, value in head.headers if name == b"content-type"]
        self._is_events = bool(kinds) and kinds[0].startswith(b"text/event-stream")

    def take(self, data: bytes, now_s: float) -> None:
        """Bytes of the body. Whole events leave it; what is left is the beginning of the next."""
        if self.first_s is None:
            self.first_s = now_s
        self.body += data
        if self._is_events:
            if b"\r" in self.body:
                self.body = self.body.replace(b"\r\n", b"\n")
            *whole, self.body = self.body.split(b"\n\n")
            for event in whole:
                lines = (line for line in bytes(event).split(b"\n") if line.startswith(b"data:"))
                if found := b"\n".join(line[5:].removeprefix(b" ") for line in lines):
                    self.events.append((now_s, found))
        if len(self.body) > MAX_BODY_BYTES:
            raise LoadError("protocol", f"an answer of more than {MAX_BODY_BYTES} bytes")

    @property
    def message(self) -> str:
        """What a reply that is no success says, from OpenAI's shape if it has that."""
        try:
            found = _error_message(json.loads(bytes(self.body)))
        except ValueError:
            found = ""
        return found or _short(bytes(self.body)) or f"status {self.status} without a word"


class _Connection(asyncio.Protocol):
    """At most one reply is being read."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.reply = Reply()
        self.done: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._read(data, "protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if exc is None:
            self._read(b"", "closed")
        elif self.done is not None and not self.done.done():
            self.done.set_exception(LoadError("reset", str(exc)))

    def _read(self, data: bytes, kind: str) -> None:
        """The next bytes, or none if the connection is over; what is wrong with them is of this kind."""
        done, now_s = self.done, time.perf_counter()
        if done is None or done.done():
            return
        try:
            self.http.receive_data(data)
            while (event := self.http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    self.reply.take(event.data, now_s)
                elif isinstance(event, h11.Response):
                    self.reply.begin(event)
                elif isinstance(event, h11.EndOfMessage):
                    done.set_result(self.reply)
                    return
        except h11.RemoteProtocolError as error:
            text = f"'{_short(data)}' is no HTTP/1.1: {error}"
            if kind == "closed":
                where = "in the middle of an answer" if self.reply.status else "before it answered"
                text = f"the server closed the connection {where}"
            done.set_exception(LoadError(kind, text))
        except LoadError as error:
            done.set_exception(error)


class Client:
    """Asks one server, one question at a time, over one connection that is made again when it must be."""

    def __init__(self, address: ServerAddress, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._connection: _Connection | None = None
        self._used_s = 0.0
        # Made once, for it reads the machine's certificates.
        self._tls = ssl.create_default_context() if address.is_tls else None

    async def ask(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The whole answer; LoadError if there is none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(method, path, body)
        except TimeoutError:
            self.close()
            raise LoadError("timeout", f"no whole answer within {self._timeout_s:g} s") from None
        except BaseException:
            # Whatever is still under way must not be read as the next answer.
            self.close()
            raise

    async def _ask(self, method: str, path: str, body: bytes) -> Reply:
        if time.perf_counter() - self._used_s > MAX_IDLE_S:
            self.close()
        if self._connection is None or self._connection.transport is None:
            self._connection = await self._connect()
        connection = self._connection
        assert connection.transport is not None
        connection.reply = Reply()
        connection.done = asyncio.get_running_loop().create_future()
        connection.transport.write(self._address.request(method, path, body, connection.http))
        reply = await connection.done
        self._used_s = time.perf_counter()
        if connection.http.our_state is connection.http.their_state is h11.DONE:
            connection.http.start_next_cycle()
        else:
            self.close()
        return reply

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = self._address.host, self._address.port
        try:
            _, connection = await loop.create_connection(_Connection, host, port, ssl=self._tls)
        except OSError as error:
            remedy = "Is the server running?"
            raise LoadError("connect", f"cannot connect: {error}", remedy, f"{host}:{port}") from None
        return connection

    def close(self) -> None:
        """Drops the connection, if there is one."""
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()
        self._connection = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. Times count from the sending of the request."""

    text: str
    finish_reason: str
    # As the server reports them; None if it does not.
    prompt_tokens: int | None
    output_tokens: int | None
    # Until the first byte of the body, the first text, and the end.
    ttfb_s: float
    ttft_s: float
    e2e_s: float
    # Between events with text.
    gaps_s: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer; events with text where the server does not count."""
        return len(self.gaps_s) + 1 if self.output_tokens is None else self.output_tokens


async def generate(
    client: Client, api: Api, model: str, prompt: str, max_tokens: int, ignores_end: bool
) -> Generation:
    """Asks for one greedy, streamed answer."""
    asked: dict[str, Any] = {"model": model, "temperature": 0.0, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    if ignores_end:
        asked["ignore_eos"] = True
    if api == "chat":
        path = "/v1/chat/completions"
        asked |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens}
    else:
        path = "/v1/completions"
        asked |= {"prompt": prompt, "max_tokens": max_tokens}
    start_s = time.perf_counter()
    reply = await client.ask("POST", path, json.dumps(asked).encode())
    return read_stream(reply, start_s, time.perf_counter())


def read_stream(reply: Reply, start_s: float, end_s: float) -> Generation:
    """What a reply says; LoadError if it is not a whole answer."""
    if reply.status != 200:
        raise LoadError(f"http {reply.status}", reply.message)
    if not reply.events:
        raise LoadError("stream", "an answer without events, though a stream was asked for")
    texts: list[str] = []
    times_s: list[float] = []
    usage: dict[str, int] = {}
    reason, is_over = None, False
    for when_s, data in reply.events:
        if data == b"[DONE]":
            is_over = True
            continue
        event = _event(data)
        try:
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                if text:
                    texts.append(text)
                    times_s.append(when_s)
                reason = choice.get("finish_reason") or reason
        except (AttributeError, KeyError, TypeError):
            raise LoadError("stream", f"an event of another shape than OpenAI's: {_short(data)}") from None
    if not is_over or reason is None:
        missing = "a finish reason" if is_over else "[DONE]"
        raise LoadError("stream", f"the stream ended without {missing}")
    if reason == "error":
        raise LoadError("answer", "the answer ended with the finish reason 'error'")
    # An answer without any text has its first token when it is over.
    times_s = times_s or [end_s]
    return Generation(
        "".join(texts),
        reason,
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        (end_s if reply.first_s is None else reply.first_s) - start_s,
        times_s[0] - start_s,
        end_s - start_s,
        tuple(b - a for a, b in pairwise(times_s)),
    )


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise LoadError("stream", f"an event that is no JSON: {_short(data)}") from None
    if not isinstance(event, dict) or "error" in event:
        raise LoadError("answer", _error_message(event) or _short(data))
    return event


def _error_message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:SHOWN_CHARS] if message else ""


def _short(data: bytes) -> str:
    return " ".join(data[:SHOWN_CHARS].decode("utf-8", "replace").split())
