"""Answers in OpenAI's forms: one document, or a stream of server-sent events.

The head of a stream is sent with its first event, so that a refusal keeps its status. A later error is an
event, as OpenAI's clients expect. A disconnect cancels the answers. Documents with many logprobs are encoded
in a thread, in parts.
"""

import asyncio
import secrets
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from tessera import __version__
from tessera.errors import TesseraError
from tessera.serve.answer import AnswerService
from tessera.serve.openai.errors import ApiError, api_error
from tessera.serve.openai.read import Draft, EmbeddingDraft, Endpoint, ModelCard
from tessera.serve.openai.tools import FoundCalls, OutputPart
from tessera.serve.records import AnswerPiece, Ask, Event, Finish, ImageDraft, Token
from tessera.serve.single_device import SingleDeviceService, cut

if TYPE_CHECKING:
    import torch

FINGERPRINT = f"tessera-{__version__}"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PART_BYTES = 2**18
# At most so many are encoded on the event loop.
FEW_LOGPROBS = 512

Document = dict[str, Any]
_encode = msgspec.json.encode


def _encoded(part: Any) -> msgspec.Raw:
    """The interpreter lock is free between two parts."""
    return msgspec.Raw(_encode(part))


class Writer:
    def __init__(self, card: ModelCard, draft: Draft, asks: Sequence[Ask]) -> None:
        self.draft, self.asks = draft, asks
        self._text, self._prompts = card.text, [ask.prompt for ask in asks[:: draft.n]]
        self._num_top = asks[0].sampling.logprobs
        numbers = (self._num_top, asks[0].prompt_logprobs)
        self._num_listed = max(0 if number is None else 1 + number for number in numbers)
        is_chat = self.draft.is_chat
        prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._head: Document = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if is_chat and self.draft.request.stream else kind,
            "created": int(time.time()),
            "model": self.draft.request.model or card.model,
            "system_fingerprint": FINGERPRINT,
        }
        # By choice: around the text of a chunk that has nothing else to say.
        self._frames: dict[int, tuple[bytes, bytes, bytes]] = {}
        # By choice, in characters.
        self._offsets: Counter[int] = Counter()
        self._readers = [FoundCalls(self.draft.tools) for _ in asks] if self.draft.tools else []

    async def encoded(self, num_tokens: int, make: Callable[..., bytes], *arguments: Any) -> bytes:
        is_few = num_tokens * self._num_listed < FEW_LOGPROBS
        return make(*arguments) if is_few else await asyncio.to_thread(make, *arguments)

    def whole(self, answers: Sequence[Sequence[Event]]) -> bytes:
        finishes = [event for events in answers for event in events if isinstance(event, Finish)]
        firsts = zip(self._prompts, finishes[:: self.draft.n], strict=True)
        # A prompt's first token has no logprob.
        noted = [[Token(prompt[0]), *finish.prompt] for prompt, finish in firsts]
        choices = [
            self._whole_choice(index, events, finishes[index], noted[index // self.draft.n])
            for index, events in enumerate(answers)
        ]
        num = 0 if self._says_nothing else sum(finish.output_tokens for finish in finishes)
        shared = self._prompt_notes(noted[0]) if self.draft.is_chat else {}
        return _encode({**self._head, "choices": choices, "usage": self._usage(num), **shared})

    def _whole_choice(
        self, index: int, events: Sequence[Event], finish: Finish, prompt: Sequence[Token]
    ) -> Document:
        pieces = [] if self._says_nothing else [x for x in events if isinstance(x, AnswerPiece)]
        text, tokens = "".join(x.text for x in pieces), [token for x in pieces for token in x.tokens]
        if self.draft.is_chat:
            shown = {"message": self._message(index, text)}
            return self._choice(index, shown, tokens, self._reason(index, finish.reason))
        echo = self.draft.echoes[index] if self.draft.echoes else ""
        listed = [*prompt, *tokens] if self.draft.echoes_logprobs else tokens
        reason = "length" if self._says_nothing else finish.reason
        return self._choice(index, {"text": echo + text}, listed, reason) | self._prompt_notes(prompt)

    @property
    def _says_nothing(self) -> bool:
        """True if the answer is the prompt alone; the engine still generates one token."""
        return self.draft.request.max_tokens == 0

    def _prompt_notes(self, prompt: Sequence[Token]) -> Document:
        most = self.draft.request.prompt_logprobs
        if most is None:
            return {}
        noted: list[msgspec.Raw | None] = [None]
        for token in prompt[1:]:
            ranks = {number: rank for rank, (number, _) in enumerate(token.top, 1)}
            listed = dict(token.top[:most]) | {token.number: token.logprob}
            entries = {
                str(number): {
                    "logprob": _finite(logprob),
                    "rank": ranks.get(number),
                    "decoded_token": self._shown(number, None)["token"],
                }
                for number, logprob in listed.items()
            }
            noted.append(_encoded(entries))
        return {"prompt_logprobs": noted}

    def _message(self, index: int, text: str) -> Document:
        parts = [OutputPart(text)]
        if self._readers:
            parts = self._readers[index].feed(text) + self._readers[index].finish()
        content = "".join(x.text for x in parts if x.call is None)
        message: Document = {"role": "assistant", "content": content, "refusal": None}
        calls = [
            _call(x.name, "".join(y.text for y in parts if y.call == x.call and not y.name))
            for x in parts
            if x.name
        ]
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    def _reason(self, index: int, reason: str) -> str:
        has_calls = bool(self._readers) and self._readers[index].num_calls > 0
        return "tool_calls" if has_calls and reason == "stop" else reason

    def begin(self, index: int) -> bytes:
        if self.draft.is_chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        return self._chunk(index, {"text": self.draft.echoes[index]}) if self.draft.echoes else b""

    def piece(self, index: int, piece: AnswerPiece) -> bytes:
        if self._num_top is not None or self._readers:
            parts = self._readers[index].feed(piece.text) if self._readers else [OutputPart(piece.text)]
            return self._chunks(index, parts, piece.tokens)
        if index not in self._frames:
            self._frames[index] = self._chunk(index, self._delta(OutputPart("|"))).rpartition(b'"|"')
        begin, _, end = self._frames[index]
        return begin + _encode(piece.text) + end if piece.text else b""

    def _chunks(self, index: int, parts: Sequence[OutputPart], tokens: Sequence[Token]) -> bytes:
        shown = [self._delta(x) for x in parts if x.text or x.name]
        if not shown and self._num_top is not None and tokens:
            shown = [self._delta(OutputPart())]
        # Logprobs go with the first chunk.
        return b"".join(self._chunk(index, x, () if i else tokens) for i, x in enumerate(shown))

    def _delta(self, part: OutputPart) -> Document:
        if not self.draft.is_chat:
            return {"text": part.text}
        if part.call is None:
            return {"delta": {"content": part.text}}
        call = _call(part.name, "") if part.name else {"function": {"arguments": part.text}}
        return {"delta": {"tool_calls": [{"index": part.call, **call}]}}

    def end(self, index: int, reason: str) -> bytes:
        rest = self._chunks(index, self._readers[index].finish(), ()) if self._readers else b""
        shown: Document = {"delta": {}} if self.draft.is_chat else {"text": ""}
        return rest + self._chunk(index, shown, None, self._reason(index, reason))

    def usage_chunk(self, output_tokens: int) -> bytes:
        return _event({**self._head, "choices": [], "usage": self._usage(output_tokens)})

    def _chunk(
        self, index: int, shown: Document, tokens: Sequence[Token] | None = None, reason: str | None = None
    ) -> bytes:
        chunk = {**self._head, "choices": [self._choice(index, shown, tokens, reason)]}
        return _event(chunk | {"usage": None} if self.draft.request.includes_usage else chunk)

    def _choice(
        self, index: int, shown: Document, tokens: Sequence[Token] | None, reason: str | None
    ) -> Document:
        logprobs = None
        if self._num_top is not None and tokens is not None:
            logprobs = self._chat_logprobs(tokens) if self.draft.is_chat else self._logprobs(index, tokens)
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self, output_tokens: int) -> dict[str, int]:
        prompt = sum(map(len, self._prompts))
        total = prompt + output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": total}

    def _chat_logprobs(self, tokens: Sequence[Token]) -> Document:
        shown = [
            self._shown(token.number, token.logprob)
            | {"top_logprobs": [self._shown(number, logprob) for number, logprob in token.top]}
            for token in tokens
        ]
        return {"content": [_encoded(token) for token in shown], "refusal": None}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Document:
        texts, tops, offsets = [], [], []
        for token in tokens:
            texts.append(self._shown(token.number, None)["token"])
            listed = (*token.top[: self._num_top], (token.number, token.logprob))
            shown = {self._shown(n, None)["token"]: _finite(p) for n, p in listed}
            tops.append(None if token.logprob is None else _encoded(shown))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(texts[-1])
        logprobs = [_finite(token.logprob) for token in tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _shown(self, number: int, logprob: float | None) -> Document:
        raw = self._text.token_bytes(number)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _event(document: Any) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"


def _finite(logprob: float | None) -> float | None:
    """OpenAI writes -9999 for minus infinity, which JSON lacks."""
    return logprob if logprob is None else max(logprob, -9999.0)


def _call(name: str, arguments: str) -> Document:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


async def answer_whole(service: AnswerService, writer: Writer) -> bytes:
    answers: list[list[Event]] = [[] for _ in writer.asks]
    async with aclosing(_events(service, writer.asks)) as events:
        async for index, event in events:
            answers[index].append(event)
    finishes = [event for events in answers for event in events if isinstance(event, Finish)]
    num = sum(finish.output_tokens + len(finish.prompt) for finish in finishes)
    return await writer.encoded(num, writer.whole, answers)


async def answer_embedding(endpoint: Endpoint, draft: EmbeddingDraft) -> bytes:
    assert isinstance(endpoint.service, SingleDeviceService), "the route requires an encoder"
    vectors = await endpoint.service.compute(draft.inputs)
    return await asyncio.to_thread(_vectors, endpoint.card.model, draft, vectors)


def _vectors(model: str, draft: EmbeddingDraft, vectors: "Sequence[torch.Tensor]") -> bytes:
    shown = []
    for index, vector in enumerate(vectors):
        numbers = cut(vector, draft.size)
        value = b64encode(numbers.numpy().tobytes()).decode() if draft.is_base64 else numbers.tolist()
        shown.append(_encoded({"object": "embedding", "index": index, "embedding": value}))
    num = sum(map(len, draft.inputs))
    usage = {"prompt_tokens": num, "total_tokens": num}
    return _encode({"object": "list", "data": shown, "model": model, "usage": usage})


async def answer_image(endpoint: Endpoint, draft: ImageDraft) -> bytes:
    assert isinstance(endpoint.service, SingleDeviceService), "the route requires a pipeline"
    (pictures,) = await endpoint.service.compute([draft])
    shown = [{"b64_json": b64encode(picture).decode()} for picture in pictures]
    return _encode({"created": int(time.time()), "output_format": draft.form, "data": shown})


async def send_document(document: bytes, send: Any) -> None:
    size = str(len(document)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(document), PART_BYTES):
        part, is_more = document[start : start + PART_BYTES], start + PART_BYTES < len(document)
        await send({"type": "http.response.body", "body": part, "more_body": is_more})
        await asyncio.sleep(0)


async def stream(service: AnswerService, writer: Writer, send: Any) -> None:
    """`ApiError` only before the head."""

    async def body(data: bytes, is_last: bool = False) -> None:
        """`server` disconnects slow readers."""
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async with aclosing(_events(service, writer.asks)) as events:
        first = await anext(events, None)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        out = b"".join(writer.begin(index) for index in range(len(writer.asks)))
        output_tokens = 0
        try:
            while first is not None:
                index, event = first
                if isinstance(event, Finish):  # sent with the next event, usually the end
                    out += writer.end(index, event.reason)
                    output_tokens += event.output_tokens
                else:
                    out += await writer.encoded(len(event.tokens), writer.piece, index, event)
                    if out:
                        await body(out)
                        out = b""
                first = await anext(events, None)
        except (ApiError, TesseraError) as error:
            out += _event(api_error(error).document)
        else:
            out += writer.usage_chunk(output_tokens) if writer.draft.request.includes_usage else b""
    await body(out + DONE, is_last=True)


async def _events(service: AnswerService, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Event], None]:
    if not asks[0].max_tokens:  # the answer is the prompt alone
        for index, ask in enumerate(asks):
            yield index, Finish("length", len(ask.prompt), 0)
        return
    answer = service.answer(asks[0])
    async with aclosing(answer):
        for ask in asks[1:]:
            await asyncio.sleep(0)  # others run between many long prompts
            service.answer(ask, answer)
        async for event in answer:
            yield answer.number, _checked(event)


def _checked(event: Event) -> Event:
    if not isinstance(event, Finish):
        return event
    if event.is_refused:
        raise ApiError(400, event.message, "response_format", "invalid_value")
    if event.reason == "error":
        raise ApiError(500, event.message or "the generation failed", code="generation_failed")
    if event.reason == "cancelled":
        raise ApiError(503, event.message or "the server stopped the generation", code="shutting_down")
    return event
