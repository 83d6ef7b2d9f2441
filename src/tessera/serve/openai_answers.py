"""From asks to bytes: one request answered whole or as a stream of server-sent events.

The head of a stream is sent with its first event, so that what is refused has its own status. An error
after that is an event of its own, as OpenAI's clients expect. When the client goes, the answers are closed,
which cancels them.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tessera.errors import TesseraError
from tessera.serve.openai_errors import ApiError, api_error
from tessera.serve.openai_ports import Answers, Events
from tessera.serve.openai_read import Wanted
from tessera.serve.openai_write import DONE, Whole, Writer, event, usage
from tessera.serve.records import Ask, Event, Finish, Token

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def ended(finish: Finish) -> Finish:
    """A finish that is an answer's end, or what went wrong."""
    if finish.reason == "error":
        raise ApiError(500, finish.message or "the generation failed", code="generation_failed")
    if finish.reason == "cancelled":
        raise ApiError(503, finish.message or "the server stopped the generation", code="shutting_down")
    return finish


async def answer_whole(service: Answers, wanted: Wanted, writer: Writer) -> dict[str, Any]:
    """The document of all choices."""
    if wanted.echoes and not wanted.asks[0].max_tokens:
        answers = [Whole("", (), Finish("length", len(ask.prompt), 0)) for ask in wanted.asks]
    elif len(wanted.asks) == 1:
        answers = [await _collect(service, wanted.asks[0])]
    else:
        answers = await _collect_all(service, wanted.asks)
    return writer.whole(answers, usage(wanted.prompt_tokens, sum(x.finish.output_tokens for x in answers)))


async def _collect(service: Answers, ask: Ask) -> Whole:
    texts: list[str] = []
    tokens: list[Token] = []
    async with aclosing(service.answer(ask)) as events:
        async for found in events:
            if isinstance(found, Finish):
                return Whole("".join(texts), tuple(tokens), ended(found))
            texts.append(found.text)
            tokens += found.tokens
    raise ApiError(500, "an answer without an end")


async def _collect_all(service: Answers, asks: Sequence[Ask]) -> list[Whole]:
    tasks = [asyncio.create_task(_collect(service, ask)) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _stop(tasks)


async def _stop(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def stream(service: Answers, wanted: Wanted, writer: Writer, send: Any) -> None:
    """Sends a stream, head and all; raises ApiError only before the head."""
    async with aclosing(_numbered(service, wanted.asks)) as events:
        first = await anext(events, None)
        if first is not None and isinstance(first[1], Finish):
            ended(first[1])
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        out = b"".join(writer.begin(i) for i in range(len(wanted.asks)))
        output_tokens = 0
        try:
            while first is not None:
                index, found = first
                if isinstance(found, Finish):  # goes with what comes next, which mostly is the end
                    out += writer.end(index, ended(found).reason)
                    output_tokens += found.output_tokens
                elif out := out + writer.piece(index, found.text, found.tokens):
                    await _send(send, out)
                    out = b""
                first = await anext(events, None)
        except (ApiError, TesseraError) as error:
            told = error if isinstance(error, ApiError) else api_error(error)
            await _send(send, out + event(told.shape) + DONE, is_last=True)
            return
    if wanted.includes_usage:
        out += writer.usage_chunk(usage(wanted.prompt_tokens, output_tokens))
    await _send(send, out + DONE, is_last=True)


async def _send(send: Any, body: bytes, is_last: bool = False) -> None:
    """Waits while the client's connection is full; a client that stays so is cut off by `server`."""
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _numbered(service: Answers, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all asks as they come, each with its ask's number; ends after the last finish."""
    if not asks[0].max_tokens:  # only the prompt is wanted back
        for index, ask in enumerate(asks):
            yield index, Finish("length", len(ask.prompt), 0)
        return
    if len(asks) == 1:
        async with aclosing(service.answer(asks[0])) as events:
            async for found in events:
                yield 0, found
        return
    async with aclosing(_merged(service, asks)) as merged:
        async for pair in merged:
            yield pair


async def _merged(service: Answers, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several answers as they come; each is asked for one at a time, so nothing piles up here."""
    answers: list[Events] = []
    waiting: dict[asyncio.Future[Event], int] = {}
    try:
        answers += (service.answer(ask) for ask in asks)
        waiting = {asyncio.ensure_future(anext(x)): index for index, x in enumerate(answers)}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                found, index = task.result(), waiting.pop(task)
                if not isinstance(found, Finish):
                    waiting[asyncio.ensure_future(anext(answers[index]))] = index
                yield index, found
    finally:
        await _stop(list(waiting))
        for answer in answers:
            await answer.aclose()
