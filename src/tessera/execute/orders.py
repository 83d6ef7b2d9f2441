"""What passes between a worker and its engine: orders, answers, and what workers tell one another."""

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tessera.errors import WorkerError
from tessera.execute import messages
from tessera.execute.messages import Message, Progress, StoreGet, StoreSet, StoreValue, Where
from tessera.execute.pipes import NOBODY, Hangup, Inbox


class OwnerGone(WorkerError):
    """What was asked for will not be set: the worker that would have is gone."""


def key_of(kind: str, device: int, epoch: int) -> str:
    """Under which a device's worker sets something, so that nobody waits for it when that worker is gone."""
    return f"{kind}/{device}/{epoch}"


class EngineLine:
    """A worker's way to its engine and back, for any of its threads.

    A thread reads what the engine says. It answers at once what needs no loop, and keeps the rest: orders,
    which the loop takes with what other threads post. What workers tell one another is set once under a key.
    """

    def __init__(self, pipe: Connection, max_bytes: int) -> None:
        self._pipe, self._sending = pipe, threading.Lock()
        self._known = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._is_over = False
        # (microbatch, run, position) of every run that the worker is at; the worker's own.
        self.where: Callable[[], list[tuple[int, int, int]]] = list
        self._inbox = Inbox()
        self._inbox.listen(NOBODY, pipe, messages.decode, self._hear, lambda: max_bytes)

    def tell(self, message: Message) -> None:
        """Returns when the engine's end has taken it; raises OSError if it is gone."""
        data = messages.encode(message)
        with self._sending:
            self._pipe.send_bytes(data)

    def set(self, key: str, value: bytes) -> None:
        self.tell(StoreSet(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """What was set under this key, or will be within the time; raises WorkerError after it.

        Raises OwnerGone as soon as it is known that it will not be.
        """
        with self._known:
            is_known = key in self._values
        if not is_known:
            self.tell(StoreGet(key))
        with self._known:
            self._known.wait_for(lambda: key in self._values or self._is_over, timeout_s)
            if key not in self._values:
                raise WorkerError(f"nobody has set {key} within {timeout_s:.0f} s")
            if not self._values[key]:
                raise OwnerGone(f"nobody will set {key}")
            return self._values[key]

    def take(self, block: bool) -> Any:
        """What the loop has to do next; None if there is nothing and one need not wait."""
        news = self._inbox.take(block)
        return None if news is None else news[1]

    def post(self, news: Any) -> None:
        self._inbox.post(NOBODY, news)

    @property
    def is_empty(self) -> bool:
        return self._inbox.is_empty

    def _hear(self, source: Any, message: Any) -> bool:
        match message:
            case Where():
                self.tell(Progress(self.where()))
                return True
            case StoreValue(key, value):
                with self._known:
                    self._values[key] = value
                    self._known.notify_all()
                return True
            case Hangup():
                with self._known:
                    self._is_over = True
                    self._known.notify_all()
        return False


class Board:
    """The engine's side: what workers tell one another, addresses mostly. Used by its reading threads.

    An empty value says that there will be none.
    """

    def __init__(self, send: Callable[[tuple[int, int], Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        # Ends of keys, of workers that are gone.
        self._gone: set[str] = set()
        self._asking: list[tuple[tuple[int, int], str]] = []

    def set(self, key: str, value: bytes) -> None:
        """Whoever waits for it is answered."""
        with self._lock:
            self._values[key] = value
            asking = [source for source, wanted in self._asking if wanted == key]
            self._asking = [(source, wanted) for source, wanted in self._asking if wanted != key]
        for source in asking:
            self._send(source, StoreValue(key, value))

    def get(self, source: tuple[int, int], key: str) -> None:
        with self._lock:
            value = b"" if any(map(key.endswith, self._gone)) else self._values.get(key)
            if value is None:
                self._asking.append((source, key))
        if value is not None:
            self._send(source, StoreValue(key, value))

    def forget(self, device: int, epoch: int) -> None:
        """A worker is gone: it waits for nothing, and nobody waits for what it has not told."""
        end = key_of("", device, epoch)
        with self._lock:
            self._gone.add(end)
            self._values = {key: value for key, value in self._values.items() if not key.endswith(end)}
            asking = [ask for ask in self._asking if ask[0][0] != device]
            self._asking = [ask for ask in asking if not ask[1].endswith(end)]
        for source, key in asking:
            if key.endswith(end):
                self._send(source, StoreValue(key, b""))
