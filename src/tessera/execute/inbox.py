"""Inbox: a thread that always reads, so that whoever sends to this process can never wait for it forever.

Two processes that each write a large message to the other before reading would both wait. With an inbox
in every process, a sender waits at most until the other's thread has read.
"""

import queue
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any


class Hangup:
    """The message that stands for a closed pipe."""


class Inbox:
    """Messages of several pipes in the order they came: (index of the pipe, message)."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(list(pipes),), daemon=True)
        self._thread.start()

    def take(self, block: bool) -> tuple[int, Any] | None:
        """The next message; None if there is none and one need not wait."""
        try:
            return self._queue.get(block)
        except queue.Empty:
            return None

    def join(self, timeout_s: float) -> None:
        """Waits until every pipe is closed at its other end."""
        self._thread.join(timeout_s)

    def _read(self, pipes: list[Connection]) -> None:
        open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
        while open_pipes:
            for pipe in wait(list(open_pipes)):
                assert isinstance(pipe, Connection)
                try:
                    self._queue.put((open_pipes[pipe], pipe.recv()))
                except (EOFError, OSError):
                    self._queue.put((open_pipes.pop(pipe), Hangup()))
