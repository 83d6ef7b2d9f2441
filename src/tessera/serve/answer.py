"""Answer: how pieces get from the engine's thread to readers on any event loop.

A buffer holds what its reader has not taken yet; the reader takes all of it at once, as one piece. So a slow
reader costs the memory of its own answer at most and stops nobody. Readers that wait are woken together, once
a loop and step: a wake-up costs a system call.

No locks: the engine adds and then looks for a waiter, the reader sets its waiter and then looks for news; one
of them sees the other. Only the reader writes the waiter, so that the engine cannot take away the next one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from tessera.serve.records import AnswerPiece, Event, Finish, Token


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
