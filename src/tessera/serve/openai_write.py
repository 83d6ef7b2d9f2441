"""Answers in OpenAI's documents: one request answered whole, or as a stream of server-sent events.

The head of a stream is sent with its first event, so that what is refused has its own status. An error
after that is an event of its own, as OpenAI's clients expect. When the client goes, the answers are closed,
which cancels them. What is the same in all chunks of a stream is encoded once. JSON is ASCII: text is
escaped, never cut inside a character.
"""

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tessera import __version__
from tessera.errors import TesseraError
from tessera.serve.openai_errors import ApiError, api_error
from tessera.serve.openai_read import AskBatch
from tessera.serve.records import AnswerPiece, AnswerService, Ask, Endpoint, Event, Events, Finish, Token

FINGERPRINT = f"tessera-{__version__}"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Writer:
    """The documents of one request."""

    def __init__(self, endpoint: Endpoint, batch: AskBatch) -> None:
        self._text, self._batch = endpoint.text, batch
        self._has_logprobs = batch.asks[0].sampling.logprobs is not None
        prefix, kind = ("chatcmpl", "chat.completion") if batch.is_chat else ("cmpl", "text_completion")
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if batch.is_chat and batch.is_stream else kind,
            "created": int(time.time()),
            "model": endpoint.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._open = "data: " + _encode(self._head)[:-1] + ',"choices":['
        self._shut = "]" + (',"usage":null' if batch.includes_usage else "") + "}\n\n"
        # Of each choice of a completion: characters of the tokens told so far.
        self._offsets: Counter[int] = Counter()

    def whole(self, answers: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """All choices at once, each with the events of its answer."""
        choices, output_tokens = [], 0
        for index, events in enumerate(answers):
            text = "".join(x.text for x in events if isinstance(x, AnswerPiece))
            tokens = [token for x in events if isinstance(x, AnswerPiece) for token in x.tokens]
            finish = events[-1]
            assert isinstance(finish, Finish)
            output_tokens += finish.output_tokens
            echo = self._batch.echoes[index] if self._batch.echoes else ""
            message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            shown = message if self._batch.is_chat else {"text": echo + text}
            choices.append(self._choice(index, shown, tokens, finish.reason))
        return self._head | {"choices": choices, "usage": self._usage(output_tokens)}

    def begin(self, index: int) -> bytes:
        """The chunk that says who speaks, or the prompt where it is to be given back."""
        if self._batch.is_chat:
            return self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}))
        return (
            self._chunk(self._choice(index, {"text": self._batch.echoes[index]}))
            if self._batch.echoes
            else b""
        )

    def piece(self, index: int, piece: AnswerPiece) -> bytes:
        """A chunk of text; nothing if there is nothing to tell."""
        if not piece.text and not self._has_logprobs:
            return b""
        shown = {"delta": {"content": piece.text}} if self._batch.is_chat else {"text": piece.text}
        return self._chunk(self._choice(index, shown, piece.tokens))

    def end(self, index: int, reason: str) -> bytes:
        """The chunk that says why it ended."""
        shown: dict[str, Any] = {"delta": {}} if self._batch.is_chat else {"text": ""}
        return self._chunk(self._choice(index, shown, None, reason))

    def usage_chunk(self, output_tokens: int) -> bytes:
        """The last chunk of a stream with its usage: no choices."""
        return f'{self._open}],"usage":{_encode(self._usage(output_tokens))}}}\n\n'.encode()

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return (self._open + _encode(choice) + self._shut).encode()

    def _choice(
        self,
        index: int,
        shown: dict[str, Any],
        tokens: Sequence[Token] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if self._has_logprobs and tokens is not None else None
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt = self._batch.prompt_tokens
        total = prompt + output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": total}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        if self._batch.is_chat:
            content = [
                self._shown(token.number, token.logprob)
                | {"top_logprobs": [self._shown(number, logprob) for number, logprob in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        texts, offsets = [], []
        for token in tokens:
            texts.append(self._shown(token.number, None)["token"])
            offsets.append(self._offsets[index])
            self._offsets[index] += len(texts[-1])
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._shown(n, None)["token"]: _finite(p) for n, p in (*x.top, (x.number, x.logprob))}
                for x in tokens
            ],
            "text_offset": offsets,
        }

    def _shown(self, number: int, logprob: float | None) -> dict[str, Any]:
        raw = self._text.token_bytes(number)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity: OpenAI writes -9999 for a token that cannot be."""
    return logprob if logprob is None else max(logprob, -9999.0)


async def answer_whole(service: AnswerService, batch: AskBatch, writer: Writer) -> dict[str, Any]:
    """The document of all choices."""
    answers: list[list[Event]] = [[] for _ in batch.asks]
    async with aclosing(_events(service, batch.asks)) as events:
        async for index, event in events:
            answers[index].append(event)
    return writer.whole(answers)


async def stream(service: AnswerService, batch: AskBatch, writer: Writer, send: Any) -> None:
    """Sends a stream, head and all; raises ApiError only before the head."""

    async def body(data: bytes, is_last: bool = False) -> None:
        """Waits while the client's connection is full; a client that stays so is cut off by `server`."""
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async with aclosing(_events(service, batch.asks)) as events:
        first = await anext(events, None)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        out = b"".join(writer.begin(index) for index in range(len(batch.asks)))
        output_tokens = 0
        try:
            while first is not None:
                index, event = first
                if isinstance(event, Finish):  # goes with what comes next, which mostly is the end
                    out += writer.end(index, event.reason)
                    output_tokens += event.output_tokens
                elif out := out + writer.piece(index, event):
                    await body(out)
                    out = b""
                first = await anext(events, None)
        except (ApiError, TesseraError) as error:
            told = error if isinstance(error, ApiError) else api_error(error)
            out += b"data: " + _encode(told.shape).encode() + b"\n\n"
        else:
            out += writer.usage_chunk(output_tokens) if batch.includes_usage else b""
    await body(out + DONE, is_last=True)


async def _events(service: AnswerService, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all asks as they come, each with its ask's number; ends after the last finish.

    Each answer is asked for one event at a time, so that nothing piles up here.
    """
    if not asks[0].max_tokens:  # only the prompt is wanted back
        for index, ask in enumerate(asks):
            yield index, Finish("length", len(ask.prompt), 0)
        return
    if len(asks) == 1:
        async with aclosing(service.answer(asks[0])) as events:
            async for event in events:
                yield 0, _checked(event)
        return
    answers: list[Events] = []
    waiting: dict[asyncio.Future[Event], int] = {}
    try:
        answers += (service.answer(ask) for ask in asks)
        waiting = {asyncio.ensure_future(anext(x)): index for index, x in enumerate(answers)}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                event, index = _checked(task.result()), waiting.pop(task)
                if not isinstance(event, Finish):
                    waiting[asyncio.ensure_future(anext(answers[index]))] = index
                yield index, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for answer in answers:
            await answer.aclose()


def _checked(event: Event) -> Event:
    """An event, unless it is an end that is none: then ApiError says what went wrong."""
    if isinstance(event, Finish) and event.reason == "error":
        raise ApiError(500, event.message or "the generation failed", code="generation_failed")
    if isinstance(event, Finish) and event.reason == "cancelled":
        raise ApiError(503, event.message or "the server stopped the generation", code="shutting_down")
    return event
