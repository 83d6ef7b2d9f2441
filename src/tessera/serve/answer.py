"""ActiveRequest and Answer: one ask on its way, and how its pieces get to readers on any event loop.

A buffer holds what its reader has not taken yet; the reader takes all of it at once, as one piece. So a slow
reader costs the memory of its own answer at most and stops nobody. Readers that wait are woken together, once
a loop and step: a wake-up costs a system call.

No locks: the engine adds and then looks for a waiter, the reader sets its waiter and then looks for news; one
of them sees the other. Only the reader writes the waiter, so that the engine cannot take away the next one.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from tessera.kernels import PAGE
from tessera.serve.meters import Times
from tessera.serve.pages import page_key
from tessera.serve.records import AnswerPiece, Ask, Event, Finish, Token
from tessera.serve.sampling import Pick
from tessera.serve.text import Reader, StopWatch


class AnswerBuffer:
    """One answer on its way. `put` and `finish` by the engine's thread, the rest by the reader's."""

    __slots__ = ("_finish", "_news", "waiter")

    def __init__(self) -> None:
        self._news: deque[tuple[str, Token | None]] = deque()
        self._finish: Finish | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, text: str, token: Token | None) -> None:
        """Text that can no longer change, and the token that brought it, if one did."""
        self._news.append((text, token))

    def finish(self, finish: Finish) -> None:
        self._finish = finish

    def take(self) -> Event | None:
        """All that came since the last call, as one piece; then the finish; None: nothing yet."""
        last = self._finish  # looked at first: it is set after all news
        news = [self._news.popleft() for _ in range(len(self._news))]
        if news:
            tokens = tuple(token for _, token in news if token is not None)
            return AnswerPiece("".join(text for text, _ in news), tokens)
        return last

    async def next(self) -> Event:
        while (event := self.take()) is None:
            self.waiter = waiter = asyncio.get_running_loop().create_future()
            if not self._news and self._finish is None:
                await waiter
        return event


class WakeUps:
    """Wakes readers, all of one event loop with one call. Used by the engine's thread."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, buffer: AnswerBuffer) -> None:
        """Its reader is woken by the next `flush`, if it waits."""
        waiter = buffer.waiter
        if waiter is not None and not waiter.done():
            self._by_loop.setdefault(waiter.get_loop(), []).append(waiter)

    def flush(self) -> None:
        waiting, self._by_loop = self._by_loop, {}
        for loop, waiters in waiting.items():
            try:
                loop.call_soon_threadsafe(_wake, waiters)
            except RuntimeError:  # the loop is closed: nobody reads there any more
                continue


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


class Answer(AsyncGenerator[Event, None]):
    """Pieces and then one finish, for `async for`. Closing it, or forgetting it, cancels the request."""

    def __init__(self, buffer: AnswerBuffer, cancel: Callable[[], None]) -> None:
        self._buffer, self._cancel = buffer, cancel
        self._is_over = False

    async def asend(self, value: None) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await self._buffer.next()
        except BaseException:  # the reader's own task is cancelled: nobody will read the rest
            self._close()
            raise
        self._is_over = isinstance(event, Finish)
        return event

    async def athrow(self, kind: Any, value: Any = None, tb: TracebackType | None = None) -> Event:
        """Gives the request up, as `aclose` does; its row is free after the step that runs."""
        self._close()
        raise value or kind

    def _close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._cancel()

    def __del__(self) -> None:
        self._close()


class Holder(Protocol):
    """The microbatch that a request is in."""

    def leave(self, request: "ActiveRequest") -> None:
        """It goes, wherever it stands."""


class ActiveRequest:
    """One ask on its way. Changed by the engine's thread, but for `is_cancelled`."""

    def __init__(self, ask: Ask, reader: Reader, end: Sequence[int]) -> None:
        self.ask, self.reader = ask, reader
        self.sequence = list(ask.prompt)
        # Tokens chosen.
        self.num_out = 0
        self.watch = StopWatch(ask.stop)
        self.buffer = AnswerBuffer()
        # How the next token is chosen.
        self.pick = Pick.of(ask, end)
        self._keys: list[bytes] = []
        # Logprobs of the prompt's tokens after its first, where they are wanted.
        self.prompt_notes: list[Token] = []
        # The microbatch that it is in.
        self.batch: Holder | None = None
        self.is_cancelled = self.is_over = False
        self.arrived_s = time.monotonic()
        self.seated_s: float | None = None
        self.first_s: float | None = None
        self.last_s = 0.0

    @property
    def wants_prompt(self) -> bool:
        """True if logprobs of its prompt are missing: it is read token by token until they are there."""
        return self.ask.prompt_logprobs is not None and len(self.prompt_notes) + 1 < len(self.ask.prompt)

    def add(self, number: int) -> None:
        self.sequence.append(number)
        self.num_out += 1
        self.pick.add(number)

    def keys(self, num_pages: int) -> Sequence[bytes]:
        """Of its first pages, which are full."""
        known = self._keys
        while len(known) < num_pages:
            start = len(known) * PAGE
            seen = b"".join(p.digest for p in self.ask.pictures if p.start < start + PAGE)
            tokens = self.sequence[start : start + PAGE]
            known.append(page_key(known[-1] if known else b"", tokens, seen))
        return known[:num_pages]

    def text_of(self, number: int) -> str:
        """What a token adds to the answer for certain."""
        text = self.reader.feed(number)
        if not self.ask.stop:
            return text
        return self.watch.skip(text) if self.num_out < self.ask.min_tokens else self.watch.feed(text)

    def rest_of_text(self) -> str:
        """What is certain at the end of the answer."""
        if self.watch.is_stopped:
            return ""
        return self.watch.feed(self.reader.flush()) + self.watch.flush()

    def times(self) -> Times:
        start = self.arrived_s
        queued = None if self.seated_s is None else self.seated_s - start
        first = None if self.first_s is None else self.first_s - start
        return Times(queued, first, time.monotonic() - start)
