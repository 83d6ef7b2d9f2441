"""ActiveRequest and Answer: one ask in progress, and the delivery of its pieces to readers on any event loop.

A reader takes everything buffered as one piece, so a slow one costs at most the memory of its answer. It
makes the text then, or the engine does where stop strings are searched. Readers are woken by one call per
loop, because a wake-up is a system call.

No locks: the engine adds and then wakes; a reader sets its waiter and then looks for news, on its own loop.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

from tessera.kernels import PAGE
from tessera.serve.meters import Times
from tessera.serve.pages import PagePool, Tables, page_key
from tessera.serve.records import AnswerPiece, Ask, Event, Finish, Snapshot, Token
from tessera.serve.sampling import Pick
from tessera.serve.text import Reader, StopWatch

# Readers' maximum share of the time, since the engine needs the interpreter too; their longest pause.
SHARE, LONGEST_S = 0.5, 0.05


class Waiter:
    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class AnswerBuffer:
    """The engine's thread calls `put` and `finish`, the reader's thread the rest."""

    __slots__ = ("_finish", "_news", "_reader", "waiter")

    def __init__(self, reader: Reader | None = None) -> None:
        """`reader` makes the text of tokens that come without."""
        self._reader = reader
        self._news: deque[tuple[str | None, Token | None]] = deque()
        self._finish: Finish | None = None
        self.waiter = Waiter()

    def put(self, text: str | None, token: Token | None) -> None:
        """Text None: the token's; such tokens come first."""
        self._news.append((text, token))

    def finish(self, finish: Finish) -> None:
        self._finish = finish

    @property
    def has_news(self) -> bool:
        return bool(self._news) or self._finish is not None

    def take(self) -> Event | None:
        """All news as one piece, then the finish."""
        last = self._finish  # read first: it is set after all news
        news = [self._news.popleft() for _ in range(len(self._news))]
        piece, tokens = "", tuple(token for _, token in news if token is not None)
        if self._reader is not None:
            piece = self._reader.feed([x.number for text, x in news if text is None and x is not None])
            piece += self._reader.flush() if last is not None else ""
        piece += "".join(text for text, _ in news if text)
        return AnswerPiece(piece, tokens) if news or piece else last


class WakeUps:
    """Many readers are woken for tokens of several steps at once: writing takes time from the engine."""

    def __init__(self) -> None:
        self.buffers: set[AnswerBuffer] = set()
        self._next_s = 0.0

    @property
    def due_s(self) -> float:
        return self._next_s - time.monotonic() if self.buffers else math.inf

    def flush(self, is_last: bool = False) -> None:
        if self.due_s > 0.0 and not is_last:
            return
        by_loop = defaultdict(list)
        for buffer in self.buffers:
            by_loop[buffer.waiter.loop].append(buffer.waiter)
        self.buffers.clear()
        self._next_s = time.monotonic() + LONGEST_S
        for loop, waiters in by_loop.items():
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(self._wake, loop, waiters)
            except RuntimeError:  # the loop is closed
                continue

    def _wake(self, loop: asyncio.AbstractEventLoop, waiters: Iterable[Waiter]) -> None:
        begun_s = time.monotonic()
        for waiter in waiters:
            waiter.wake()
        loop.call_soon(self._written, begun_s)  # behind the readers

    def _written(self, begun_s: float) -> None:
        self._next_s = begun_s + min((time.monotonic() - begun_s) / SHARE, LONGEST_S)


class Answer(AsyncGenerator[Event, None]):
    """Events of one ask, or of several as they come. Closing or dropping it cancels their requests."""

    def __init__(self) -> None:
        self.waiter = Waiter()
        # By number of the ask: those without a finish.
        self._open: dict[int, tuple[AnswerBuffer, Callable[[], object]]] = {}
        self._num_asks = 0
        # The ask of the last event.
        self.number = 0

    def add(self, buffer: AnswerBuffer, cancel: Callable[[], object]) -> None:
        self._open[self._num_asks] = buffer, cancel
        self._num_asks += 1

    async def asend(self, value: None) -> Event:
        if not self._open:
            raise StopAsyncIteration
        try:
            while (event := self._take()) is None:
                self.waiter.loop = asyncio.get_running_loop()
                self.waiter.future = self.waiter.loop.create_future()
                if not any(buffer.has_news for buffer, _ in self._open.values()):
                    await self.waiter.future
        except BaseException:  # the reader's task is cancelled
            self._close()
            raise
        return event

    def _take(self) -> Event | None:
        for number, (buffer, _) in self._open.items():
            if (event := buffer.take()) is not None:
                self.number = number
                if isinstance(event, Finish):
                    del self._open[number]
                return event
        return None

    async def athrow(self, kind: Any, value: Any = None, tb: TracebackType | None = None) -> Event:
        self._close()
        raise value or kind

    def _close(self) -> None:
        while self._open:
            self._open.popitem()[1][1]()

    def __del__(self) -> None:
        self._close()


class AnswerService(Protocol):
    """Thread-safe."""

    def answer(self, ask: Ask, beside: Answer | None = None) -> Answer:
        """Pieces, then one finish, added to those of `beside`. Refusals are raised here."""

    def snapshot(self) -> Snapshot: ...

    @property
    def failure(self) -> str:
        """Empty: it has not failed."""


class Holder(Protocol):
    """The microbatch that a request is in."""

    def leave(self, request: "ActiveRequest") -> None: ...


class ActiveRequest:
    """Only the engine's thread changes it, except for `is_cancelled`."""

    def __init__(self, ask: Ask, reader: Reader, end: Sequence[int]) -> None:
        self.ask, self.reader = ask, reader
        self.sequence = list(ask.prompt)
        self.num_out = 0
        self.predicted = ask.max_tokens
        self.ends = frozenset((*ask.stop_tokens, *(() if ask.ignores_end else end)))
        self.watch = StopWatch(ask.stop) if ask.stop else None
        self.buffer = AnswerBuffer(None if ask.stop else reader)
        self.pick = Pick.of(ask, end)
        self._keys: list[bytes] = []
        self.can_wait = ask.grammar is not None or ask.prompt_logprobs is not None
        self.prompt_notes: list[Token] = []
        # The prompt is read token by token while its logprobs are missing.
        self.wants_prompt = ask.prompt_logprobs is not None and len(ask.prompt) > 1
        self.batch: Holder | None = None
        self.is_cancelled = self.is_over = False
        self.arrived_s = time.monotonic()
        self.seated_s: float | None = None
        self.first_s: float | None = None
        self.last_s = 0.0

    def add(self, number: int) -> None:
        self.sequence.append(number)
        self.num_out += 1
        if not self.pick.is_plain:
            self.pick.add(number)

    def keys(self, num_pages: int) -> Sequence[bytes]:
        keys = self._keys
        while len(keys) < num_pages:
            start = len(keys) * PAGE
            seen = b"".join(p.digest for p in self.ask.pictures if p.start < start + PAGE)
            tokens = self.sequence[start : start + PAGE]
            keys.append(page_key(keys[-1] if keys else b"%d" % self.ask.adapter, tokens, seen))
        return keys[:num_pages]

    def cached(self, pool: PagePool, owner: object = None, read: int | None = None) -> Tables:
        """Page tables of the longest cached prefix of the first `read` tokens, the last token excepted."""
        if self.wants_prompt or not pool.is_caching:
            return pool.find(())
        most = len(self.sequence) - 1
        return pool.find(self.keys((most if read is None else min(read, most)) // PAGE), owner)

    def text_of(self, number: int) -> str | None:
        """Text that is no part of a stop string; None without stop strings: the buffer makes the text."""
        if self.watch is None:
            return None
        text = self.reader.feed((number,))
        return self.watch.skip(text) if self.num_out < self.ask.min_tokens else self.watch.feed(text)

    def rest_of_text(self) -> str:
        if self.watch is None or self.watch.is_stopped:
            return ""
        return self.watch.feed(self.reader.flush()) + self.watch.flush()

    def times(self, now_s: float) -> Times:
        start = self.arrived_s
        queued = None if self.seated_s is None else self.seated_s - start
        first = None if self.first_s is None else self.first_s - start
        return Times(queued, first, now_s - start)
