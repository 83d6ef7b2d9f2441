"""Asks a server of OpenAI's kind over kept connections, and times every event.

The first token is the first event that carries text: a role, or text that is still held back, is none. A
stream counts as answered only if it came to `[DONE]` with a finish reason; everything else is a LoadError
with a kind to count by. Not handled: redirects, proxies and HTTP/2.
"""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from tessera.errors import LoadError

# A connection that idled longer is not used again: the server may be closing it just now, and a request that
# is sent a second time would hide one that the server dropped.
MAX_IDLE_S = 1.0
MAX_BODY_BYTES = 64 << 20
# Of a server's message, as much as a person wants to read.
SHOWN_CHARS = 300

Api = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where requests go, and what every one of them says."""

    # Before every path.
    base: str
    headers: tuple[tuple[str, str], ...] = ()


def parse_address(url: str, api_key: str | None = None) -> ServerAddress:
    """An address from what a user wrote: `http://host:port`, with or without a trailing `/v1`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_wrong = parts.port == 0
    except ValueError:
        is_wrong = True
    if parts.scheme not in ("http", "https") or not parts.hostname or is_wrong:
        raise LoadError("url", f"'{url}' is no address of a server", "Write http://127.0.0.1:8000.", "--url")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise LoadError("url", "the key has characters that no header can carry", place="--api-key")
    path = parts.path.rstrip("/").removesuffix("/v1")
    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    return ServerAddress(f"{parts.scheme}://{parts.netloc}{path}", headers)


class Reply:
    """One response, read as its bytes come."""

    def __init__(self, status: int = 200, is_events: bool = False) -> None:
        self.status, self._is_events = status, is_events
        self.body = bytearray()
        # (when, data) of each server-sent event; only of a body that is a stream of events.
        self.events: list[tuple[float, bytes]] = []
        # When the first byte of the body came.
        self.first_s: float | None = None

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


class Client:
    """Asks one server, over as many connections as there are questions at once; see `connected`."""

    def __init__(self, session: aiohttp.ClientSession, address: ServerAddress) -> None:
        self._session, self._address = session, address

    async def ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """The whole answer; LoadError if there is none."""
        kind = {} if body is None else {"Content-Type": "application/json"}
        reply: Reply | None = None
        try:
            async with self._session.request(
                method, self._address.base + path, data=body, headers=kind, allow_redirects=False
            ) as response:
                reply = Reply(response.status, response.content_type == "text/event-stream")
                async for data in response.content.iter_any():
                    reply.take(data, time.perf_counter())
                return reply
        except TimeoutError:
            limit_s = self._session.timeout.total
            raise LoadError("timeout", f"no whole answer within {limit_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            place = self._address.base.partition("://")[2]
            said = getattr(error, "os_error", error)
            raise LoadError("connect", f"cannot connect: {said}", "Is the server running?", place) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError) as error:
            if isinstance(error, aiohttp.ClientPayloadError) and "Not enough data" not in str(error):
                raise _no_http(error) from None
            where = "before it answered" if reply is None else "in the middle of an answer"
            raise LoadError("closed", f"the server closed the connection {where}") from None
        except (aiohttp.ClientResponseError, aiohttp.http.HttpProcessingError) as error:
            raise _no_http(error) from None
        except OSError as error:
            raise LoadError("reset", str(error)) from None


@asynccontextmanager
async def connected(address: ServerAddress, timeout_s: float) -> AsyncIterator[Client]:
    """A client whose connections are closed in the end."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=MAX_IDLE_S),
        headers=dict(address.headers),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield Client(session, address)


def _no_http(error: Exception) -> LoadError:
    return LoadError("protocol", f"what answers there is no HTTP/1.1: {_short(str(error).encode())}")


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
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    first_s = end_s if reply.first_s is None else reply.first_s
    ends_s = (first_s - start_s, times_s[0] - start_s, end_s - start_s)
    return Generation("".join(texts), reason, *counts, *ends_s, tuple(b - a for a, b in pairwise(times_s)))


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
