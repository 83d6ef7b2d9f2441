"""Answers in OpenAI's documents: whole ones, and the chunks of a stream.

A chunk is written once per token and client, so that the parts which never change are encoded once per
request. JSON is ASCII: text is escaped, never cut inside a character.
"""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera import __version__
from tessera.serve.openai_ports import Words
from tessera.serve.records import Finish, Token

FINGERPRINT = f"tessera-{__version__}"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Whole:
    """One answer from its first token to its end."""

    text: str
    tokens: tuple[Token, ...]
    finish: Finish


def event(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """What an answer counts as."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


@dataclass(slots=True)
class _Writer:
    """What chats and completions have in common: the envelope."""

    model: str
    words: Words
    # True if the client asked for logprobs, or for the usage at the end of a stream.
    has_logprobs: bool
    includes_usage: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _open: str = ""
    _shut: str = ""

    def _envelope(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _prepare(self, envelope: dict[str, Any]) -> None:
        self._open = "data: " + json.dumps(envelope, separators=(",", ":"))[:-1] + ',"choices":['
        self._shut = "]" + (',"usage":null' if self.includes_usage else "") + "}\n\n"

    def _chunk(self, choice: str) -> bytes:
        return (self._open + choice + self._shut).encode()

    def usage_chunk(self, counts: dict[str, int]) -> bytes:
        """The last chunk of a stream with its usage: no choices."""
        return f'{self._open}],"usage":{json.dumps(counts, separators=(",", ":"))}}}\n\n'.encode()


@dataclass(slots=True)
class ChatWriter(_Writer):
    """/v1/chat/completions."""

    def __post_init__(self) -> None:
        self._prepare(self._envelope("chatcmpl", "chat.completion.chunk"))

    def begin(self, index: int) -> bytes:
        """The chunk that says who speaks."""
        delta = '{"role":"assistant","content":""}'
        return self._chunk(f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}')

    def piece(self, index: int, text: str, tokens: Sequence[Token]) -> bytes:
        """A chunk of text; nothing if there is nothing to tell."""
        if not text and not self.has_logprobs:
            return b""
        shown = json.dumps(self._logprobs(tokens), separators=(",", ":")) if self.has_logprobs else "null"
        delta = f'{{"content":{json.dumps(text)}}}'
        return self._chunk(f'{{"index":{index},"delta":{delta},"logprobs":{shown},"finish_reason":null}}')

    def end(self, index: int, reason: str) -> bytes:
        """The chunk that says why it ended."""
        return self._chunk(f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}')

    def whole(self, answers: Iterable[Whole], counts: dict[str, int]) -> dict[str, Any]:
        """All choices at once."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": x.text, "refusal": None},
                "logprobs": self._logprobs(x.tokens) if self.has_logprobs else None,
                "finish_reason": x.finish.reason,
            }
            for index, x in enumerate(answers)
        ]
        return self._envelope("chatcmpl", "chat.completion") | {"choices": choices, "usage": counts}

    def _logprobs(self, tokens: Iterable[Token]) -> dict[str, Any]:
        content = [
            self._one(token.number, token.logprob)
            | {"top_logprobs": [self._one(number, logprob) for number, logprob in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _one(self, number: int, logprob: float | None) -> dict[str, Any]:
        raw = self.words.token_bytes(number)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


@dataclass(slots=True)
class CompletionWriter(_Writer):
    """/v1/completions."""

    # Of each ask: the prompt's text, to be given back before the answer.
    echoes: tuple[str, ...] = ()
    # Of each choice: characters of the tokens told so far.
    _offsets: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._prepare(self._envelope("cmpl", "text_completion"))

    def begin(self, index: int) -> bytes:
        """The prompt, where it is to be given back."""
        return self.piece(index, self.echoes[index], ()) if self.echoes else b""

    def piece(self, index: int, text: str, tokens: Sequence[Token]) -> bytes:
        """A chunk of text; nothing if there is nothing to tell."""
        if not text and not self.has_logprobs:
            return b""
        shown = "null"
        if self.has_logprobs:
            found = self._logprobs(tokens, self._offsets.get(index, 0))
            shown = json.dumps(found, separators=(",", ":"))
            self._offsets[index] = self._offsets.get(index, 0) + sum(len(x) for x in found["tokens"])
        return self._chunk(
            f'{{"index":{index},"text":{json.dumps(text)},"logprobs":{shown},"finish_reason":null}}'
        )

    def end(self, index: int, reason: str) -> bytes:
        """The chunk that says why it ended."""
        return self._chunk(f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{reason}"}}')

    def whole(self, answers: Iterable[Whole], counts: dict[str, int]) -> dict[str, Any]:
        """All choices at once."""
        choices = [
            {
                "index": index,
                "text": (self.echoes[index] if self.echoes else "") + x.text,
                "logprobs": self._logprobs(x.tokens, 0) if self.has_logprobs else None,
                "finish_reason": x.finish.reason,
            }
            for index, x in enumerate(answers)
        ]
        return self._envelope("cmpl", "text_completion") | {"choices": choices, "usage": counts}

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        texts = [self._text(token.number) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = [{self._text(n): finite(p) for n, p in (*x.top, (x.number, x.logprob))} for x in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, number: int) -> str:
        return self.words.token_bytes(number).decode(errors="replace")


Writer = ChatWriter | CompletionWriter


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: OpenAI writes -9999 for a token that cannot be."""
    return logprob if logprob is None else max(logprob, -9999.0)
