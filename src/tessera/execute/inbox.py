"""Inbox: threads that always read, so that whoever sends to this process can never wait for it forever.

Two processes that each write a large message to the other before reading would both wait. With an inbox
in every process, a sender waits at most until the other's thread has read. A source whose message cannot be
read is not heard any more; the others are.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tessera.errors import TesseraError

# The source of what this process tells itself.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Hangup:
    """The message that stands for a closed pipe, or for one on which something unreadable came."""

    reason: str = ""


class Wake:
    """The message that says nothing but that someone wants to be heard."""


class Inbox:
    """Messages of several sources in the order they came: (source, message)."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def listen(self, pipes: Mapping[int, Connection], decode: Callable[[bytes], Any]) -> None:
        """Reads these pipes from now on, each under its own source number."""
        thread = threading.Thread(target=self._read, args=(dict(pipes), decode), daemon=True)
        self._threads.append(thread)
        thread.start()

    def post(self, source: int, message: Any) -> None:
        """Puts a message in, from any thread."""
        self._queue.put((source, message))

    @property
    def is_empty(self) -> bool:
        """True if nothing waits to be taken."""
        return self._queue.empty()

    def take(self, block: bool, timeout_s: float | None = None) -> tuple[int, Any] | None:
        """The next message; None if there is none and one need not wait, or not any longer."""
        if not block and self._queue.empty():  # the usual case of a worker, without an exception
            return None
        try:
            return self._queue.get(block, timeout_s)
        except queue.Empty:
            return None

    def join(self, timeout_s: float) -> None:
        """Waits until every pipe is closed at its other end."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _read(self, pipes: dict[int, Connection], decode: Callable[[bytes], Any]) -> None:
        sources = {pipe: source for source, pipe in pipes.items()}
        while sources:
            # One pipe needs no selector: whoever reads it waits.
            for pipe in wait(list(sources)) if len(sources) > 1 else list(sources):
                assert isinstance(pipe, Connection)
                try:
                    self.post(sources[pipe], decode(pipe.recv_bytes()))
                except (EOFError, OSError):
                    self.post(sources.pop(pipe), Hangup())
                except TesseraError as error:
                    self.post(sources.pop(pipe), Hangup(str(error)))
