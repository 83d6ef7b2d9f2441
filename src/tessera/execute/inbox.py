"""Inbox: threads that always read, so that whoever sends to this process can never wait for it forever.

Two processes that each write a large message to the other before reading would both wait. With an inbox
in every process, a sender waits at most until the other's thread has read.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any


class Hangup:
    """The message that stands for a closed pipe."""


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

    def take(self, block: bool, timeout_s: float | None = None) -> tuple[int, Any] | None:
        """The next message; None if there is none and one need not wait, or not any longer."""
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
            for pipe in wait(list(sources)):
                assert isinstance(pipe, Connection)
                try:
                    self.post(sources[pipe], decode(pipe.recv_bytes()))
                except (EOFError, OSError):
                    self.post(sources.pop(pipe), Hangup())
