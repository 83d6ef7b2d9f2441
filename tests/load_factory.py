"""A stand-in for a server: speaks OpenAI's streaming protocol, with faults where a test wants them."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Bytes to write one after another; None ends the connection there.
Wire = Sequence[bytes | None]
Handler = Callable[[str, dict[str, Any]], Wire]

MODELS = {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": 128}]}
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def plain(status: int, document: Any) -> list[bytes]:
    """A JSON response with a length."""
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


def refused(status: int, message: str) -> list[bytes]:
    """An error in OpenAI's shape."""
    return plain(status, {"error": {"message": message, "type": "x", "param": None, "code": None}})


def chunked(data: bytes) -> bytes:
    """One chunk of a body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def events(asked: dict[str, Any], words: Sequence[str], usage: bool = True) -> list[bytes]:
    """The events of an answer, in the shape of the endpoint that was asked."""
    is_chat = "messages" in asked
    shaped = [{"role": "assistant", "content": ""}] if is_chat else []
    parts: list[Any] = [*shaped, *words]
    choices = [{"index": 0, **_choice(is_chat, part), "finish_reason": None} for part in parts]
    choices[-1]["finish_reason"] = "length"
    documents: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    if usage:
        told = {"prompt_tokens": len(prompt_of(asked)) + 7, "completion_tokens": len(words)}
        documents.append({"choices": [], "usage": told})
    return [f"data: {json.dumps(d)}\n\n".encode() for d in documents] + [b"data: [DONE]\n\n"]


def _choice(is_chat: bool, part: Any) -> dict[str, Any]:
    if not is_chat:
        return {"text": part}
    return {"delta": part if isinstance(part, dict) else {"content": part}}


def prompt_of(asked: dict[str, Any]) -> str:
    """What was asked."""
    return str(asked["messages"][0]["content"] if "messages" in asked else asked["prompt"])


def words_of(asked: dict[str, Any]) -> list[str]:
    """The answer of a model that reads backwards: another one for every prompt."""
    many = int(asked.get("max_completion_tokens") or asked["max_tokens"])
    text = prompt_of(asked)[::-1] * many
    return list(text[:many])


def answer(asked: dict[str, Any]) -> Wire:
    """A whole answer."""
    return [HEAD, *(chunked(e) for e in events(asked, words_of(asked))), b"0\r\n\r\n"]


@dataclass
class Stub:
    """A running stand-in, and what it saw."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    headers: list[str] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    num_connections: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    end: Callable[[], object] = lambda: None


@contextmanager
def serving(handler: Handler = lambda path, asked: answer(asked), delay_s: float = 0.0) -> Iterator[Stub]:
    """A stand-in on a free port; `handler` answers posts, with a pause before every piece of an answer."""
    stub, is_up = Stub(), threading.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stub.num_connections += 1
        try:
            while await _one(stub, handler, delay_s, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        writer.close()

    async def begin() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=1024)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stub.stop, loop = asyncio.Event(), asyncio.get_running_loop()
        stub.end = lambda: loop.call_soon_threadsafe(stub.stop.set)
        is_up.set()
        await stub.stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(begin()))
    thread.start()
    is_up.wait()
    try:
        yield stub
    finally:
        stub.end()
        thread.join()


async def _one(
    stub: Stub, handler: Handler, delay_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """One request and its answer; False when the connection is over."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split("\r\n", 1)[0].split(" ")
    length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("Content-Length")), 0)
    asked = json.loads(await reader.readexactly(length)) if length else {}
    stub.paths[path] += 1
    stub.headers.append(head)
    if method == "POST":
        stub.asked.append(asked)
    stub.in_flight += 1
    stub.peak = max(stub.peak, stub.in_flight)
    wire = plain(200, MODELS) if path == "/v1/models" else handler(path, asked)
    try:
        for piece in wire:
            if piece is None:
                return False
            if delay_s:
                await asyncio.sleep(delay_s)
            writer.write(piece)
            await writer.drain()
    finally:
        stub.in_flight -= 1
    return True
