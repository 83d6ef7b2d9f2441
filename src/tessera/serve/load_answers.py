"""Questions to an OpenAI-compatible endpoint as bytes, and its answers as figures.

The first token is the first event that carries text: a role, or text that is still held back, is none. A
stream counts as answered only if it came to `[DONE]` with a finish reason; everything else is an error with a
kind to count by.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tessera.errors import LoadError
from tessera.serve.load_reply import Reply

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Of a server's message, as much as a person wants to read.
SHOWN = 300


@dataclass(frozen=True, slots=True)
class Answer:
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


@dataclass(frozen=True, slots=True)
class Asking:
    """How to ask."""

    endpoint: Endpoint
    model: str
    ignores_end: bool = True

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """A greedy, streamed generation."""
        asked: dict[str, Any] = {"model": self.model, "temperature": 0.0, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if self.ignores_end:
            asked["ignore_eos"] = True
        if self.endpoint == "chat":
            asked |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens}
        else:
            asked |= {"prompt": prompt, "max_tokens": max_tokens}
        return json.dumps(asked).encode()


def read_answer(reply: Reply, start_s: float, end_s: float) -> Answer:
    """What a reply says; LoadError if it is not a whole answer."""
    if reply.status != 200:
        raise LoadError(f"http {reply.status}", said(reply))
    if not reply.events:
        raise LoadError("stream", "an answer without events, though a stream was asked for")
    stream = _Stream()
    for when_s, data in reply.events:
        stream.take(when_s, data)
    if not stream.is_over:
        raise LoadError("stream", "the stream ended without [DONE]")
    if stream.reason is None:
        raise LoadError("stream", "the stream ended without a finish reason")
    if stream.reason == "error":
        raise LoadError("answer", "the answer ended with the finish reason 'error'")
    first_s = end_s if reply.first_s is None else reply.first_s
    # An answer without any text has its first token when it is over.
    times_s = stream.times_s or [end_s]
    usage = stream.usage or {}
    return Answer(
        "".join(stream.texts),
        stream.reason,
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        first_s - start_s,
        times_s[0] - start_s,
        end_s - start_s,
        tuple(b - a for a, b in pairwise(times_s)),
    )


class _Stream:
    """The events of one answer, one after another."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.times_s: list[float] = []
        self.reason: str | None = None
        self.usage: dict[str, int] | None = None
        self.is_over = False

    def take(self, when_s: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_over = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise LoadError("stream", f"an event that is no JSON: {_short(data)}") from None
        if not isinstance(event, dict) or "error" in event:
            raise LoadError("answer", _message(event) or _short(data))
        try:
            for choice in event.get("choices") or ():
                self._take_choice(when_s, choice)
            self.usage = event.get("usage") or self.usage
        except (AttributeError, KeyError, TypeError):
            raise LoadError("stream", f"an event of another shape than OpenAI's: {_short(data)}") from None

    def _take_choice(self, when_s: float, choice: dict[str, Any]) -> None:
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        if text:
            self.texts.append(text)
            self.times_s.append(when_s)
        self.reason = choice.get("finish_reason") or self.reason


def said(reply: Reply) -> str:
    """The message of a reply that is no success, from OpenAI's shape if it has that."""
    try:
        found = _message(json.loads(bytes(reply.body)))
    except ValueError:
        found = ""
    return found or _short(bytes(reply.body)) or f"status {reply.status} without a word"


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:SHOWN] if message else ""


def _short(data: bytes) -> str:
    return " ".join(data[:SHOWN].decode("utf-8", "replace").split())
