"""Pipes: how processes of this machine are started, handed what they need, and talked to. Imports no torch.

Workers are forked from a process that imports torch for all of them, beside whoever starts it (`warm_up`).

Inbox and Outbox: a process always reads and never waits to write, so that no two wait for each other. Each
pipe has a thread that reads it. What can be answered without the process's own loop is answered there
(`hear`), so also while the loop computes. A source whose message cannot be read, or is longer than any that
it could send, is not heard any more; the others are. What a full pipe does not take at once, a thread of its
own writes.

`hand_over` gives an object with tensors to a child. `Process.start` could do so itself, but it waits for ever
for a child that dies meanwhile, and a fork server takes no more than 256 tensors. Here the child's death is
an error of the socket. Tensors go as torch's own reductions give them: memory of this machine by its file
descriptors, CUDA memory by its IPC handle. Pickle: only between a process and the child that it has just
started.
"""

import contextlib
import multiprocessing
import os
import pickle
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing import context, forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from tessera.errors import TesseraError

# How processes are started: from one that stays until the program ends.
FORKSERVER = "forkserver"
# What a worker imports.
PRELOADED = ["tessera.execute.worker"]


def warm_up() -> None:
    """Starts the process that workers are forked from, if there is none; it imports what they need."""
    multiprocessing.get_context(FORKSERVER).set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


# The source of what this process tells itself.
NOBODY = -1
# As `Connection` writes lengths: short ones, and a mark before long ones.
_SHORT, _LONG, _MAX_SHORT = struct.Struct("!i"), struct.Struct("!iQ"), 0x7FFFFFFF
# Sizes of messages whose memory an outbox keeps.
MAX_SPARES = 64


@dataclass(frozen=True, slots=True)
class Hangup:
    """The message that stands for a closed pipe, or for one on which something unreadable came."""

    reason: str = ""


class Wake:
    """The message that says nothing but that someone wants to be heard."""


class Inbox:
    """Messages of several sources in the order they came: (source, message)."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()

    def listen(
        self,
        source: Hashable,
        pipe: Connection,
        decode: Callable[[bytes], Any],
        hear: Callable[[Any, Any], bool],
        max_bytes: Callable[[], int],
    ) -> None:
        """Reads this pipe from now on, and closes it when it ends.

        hear       called by the reading thread with (source, message), the Hangup too; True: that is enough
        max_bytes  how long a message may be
        """

        def read() -> None:
            reason = ""
            try:
                while True:
                    message = decode(pipe.recv_bytes(max_bytes()))
                    if not hear(source, message):
                        self.post(source, message)
            except EOFError:
                pass
            except OSError as error:
                # Of another error the pipe's end says as much: whoever was there is not.
                reason = "it sent a message that is too long" if str(error) == "bad message length" else ""
            except TesseraError as error:
                reason = str(error)
            finally:
                pipe.close()
                hear(source, Hangup(reason))
                self.post(source, Hangup(reason))

        threading.Thread(target=read, name="tessera-inbox", daemon=True).start()

    def post(self, source: Hashable, message: Any) -> None:
        self._queue.put((source, message))

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def take(self, block: bool, timeout_s: float | None = None) -> tuple[Any, Any] | None:
        """The next message; None if there is none and one need not wait, or not any longer."""
        if not block and self._queue.empty():  # the usual case of a worker, without an exception
            return None
        try:
            return self._queue.get(block, timeout_s)
        except queue.Empty:
            return None


class Outbox:
    """Writes to one socket from any thread, and keeps nobody waiting.

    link  the socket, or what opens it, as long as that takes, when there is something to write
    lost  hears why it cannot be opened or written any more; not of one that was closed
    bye   what the other end is told when it is closed, if it can take it at once
    """

    def __init__(
        self,
        link: socket.socket | Callable[[], socket.socket],
        lost: Callable[[BaseException], None] = lambda why: None,
        bye: bytes = b"",
    ) -> None:
        self._link = link if isinstance(link, socket.socket) else None
        self._open = None if isinstance(link, socket.socket) else link
        self._lost, self._bye = lost, bye
        self._changed = threading.Condition(threading.Lock())
        # What could not be written at once: (bytes that were, all). A thread of its own is at the first.
        self._left: deque[tuple[int, bytearray]] = deque()
        self._has_thread = False
        # True while a thread uses the socket, which is then closed by it and by nobody else.
        self._is_writing = False
        self.is_gone = False
        # Memory for what is left, used again: fresh memory costs more than the copy into it.
        self._spare: dict[int, bytearray] = {}

    def post(self, *parts: bytes | memoryview) -> bool:
        """Sends one message without waiting, False if nobody is there; it may change when this returns."""
        try:
            with self._changed:
                if not self.is_gone:
                    self._post(parts)
                return not self.is_gone
        except OSError as error:
            self._lost(error)
            return False

    def _post(self, parts: Sequence[bytes | memoryview]) -> None:
        """With the lock held."""
        size, sent = sum(map(len, parts)), 0
        if self._link is not None and not self._left:
            try:
                sent = self._link.sendmsg(parts, [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                self._end()
                raise
        if sent == size:
            return
        kept, at = self._spare.pop(size, None) or bytearray(size), 0
        for part in parts:
            memoryview(kept)[at : at + len(part)] = part
            at += len(part)
        self._left.append((sent, kept))
        self._changed.notify()
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._write_left, name="tessera-outbox", daemon=True).start()

    def write(self, *parts: bytes | memoryview) -> None:
        """Sends one message, as long as it takes; by one thread, and not mixed with `post`.

        Raises OSError, or what opening raises; nothing if it was closed.
        """
        why: OSError | TesseraError | None = None
        with self._changed:
            self._is_writing = True
        try:
            if self._link is None and self._open is not None:
                self._link = self._open()
            if self._link is not None and not self.is_gone:
                for part in parts:
                    self._link.sendall(part)
        except (OSError, TesseraError) as error:
            why = error
        with self._changed:
            self._is_writing, was_gone = False, self.is_gone
            if was_gone or why is not None:
                self._end(self._bye if was_gone else b"")  # it may have been opened when nobody wanted it
        if why is not None and not was_gone:
            raise why

    def close(self) -> None:
        """Ends the connection for both sides; what is left is not written."""
        with self._changed:
            self._end(self._bye)

    def _end(self, bye: bytes = b"") -> None:
        """With the lock held."""
        self.is_gone = True
        self._left.clear()
        self._changed.notify()
        if self._link is not None:
            if not self._is_writing:
                with contextlib.suppress(OSError):
                    self._link.send(bye, socket.MSG_DONTWAIT)
            end(self._link)
            if not self._is_writing:
                self._link.close()

    def _write_left(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self.is_gone)
                if self.is_gone:
                    return
                sent, kept = self._left[0]
            try:
                self.write(memoryview(kept)[sent:])
            except (OSError, TesseraError) as error:
                self._lost(error)
                return
            with self._changed:
                if self._left:  # not closed meanwhile
                    self._left.popleft()
                if len(self._spare) < MAX_SPARES:
                    self._spare[len(kept)] = kept


def framed(data: bytes) -> tuple[bytes, bytes]:
    """A message as `Connection` reads it: its length, and itself."""
    size = len(data)
    return (_SHORT.pack(size) if size <= _MAX_SHORT else _LONG.pack(-1, size)), data


# Number of descriptors, and bytes of the object.
_SIZES = struct.Struct("!QQ")
# Linux takes 253 at a time.
MAX_FDS = 200


class _Handed:
    """Stands for a descriptor in what is pickled."""

    # Of the process that takes; filled before it unpickles.
    taken: ClassVar[list[int]] = []

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """The descriptor, which is the caller's from now on."""
        return os.dup(self.taken[self._index])


class _Descriptors:
    """What multiprocessing asks for a way to pass descriptors to a child."""

    DupFd = _Handed

    def __init__(self) -> None:
        self.found: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Its number among those that are sent."""
        self.found.append(fd)
        return len(self.found) - 1


def hand_over(pipe: Connection, value: Any) -> None:
    """Writes an object; raises OSError if the other process is gone."""
    descriptors = _Descriptors()
    context.set_spawning_popen(descriptors)  # type: ignore[arg-type]
    try:
        data = ForkingPickler.dumps(value)
    finally:
        context.set_spawning_popen(None)
    with socket_of(pipe) as link:
        link.sendall(_SIZES.pack(len(descriptors.found), len(data)))
        for start in range(0, len(descriptors.found), MAX_FDS):
            socket.send_fds(link, [b"."], descriptors.found[start : start + MAX_FDS])
        link.sendall(data)


def take_over(pipe: Connection) -> Any:
    """Reads the object; raises EOFError if the other process is gone."""
    with socket_of(pipe) as link:
        num_fds, size = _SIZES.unpack(_read(link, _SIZES.size))
        fds: list[int] = []
        while len(fds) < num_fds:
            mark, some, _, _ = socket.recv_fds(link, 1, MAX_FDS)
            if not mark:
                raise EOFError
            fds += some
        data = _read(link, size)
    _Handed.taken = fds
    try:
        return pickle.loads(data)  # of the process that started this one
    finally:
        _Handed.taken = []
        for fd in fds:
            os.close(fd)


def _read(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    read_into(link, memoryview(data))
    return data


def read_into(link: socket.socket, place: memoryview, deadline: float | None = None) -> None:
    """Exactly as many bytes as there is place for; EOFError where the other end has ended."""
    at, size = 0, len(place)
    while at < size:
        if deadline is not None:
            link.settimeout(max(0.001, deadline - time.monotonic()))
        got = link.recv_into(place[at:] if at else place, 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError
        at += got


def socket_of(pipe: Connection) -> socket.socket:
    """Another hold on the socket under a connection."""
    return socket.socket(fileno=os.dup(pipe.fileno()))


def end(link: socket.socket) -> None:
    """Ends a socket for both sides, and wakes the thread that uses it, which closes it.

    Nobody else may: the number of a closed socket is given to the next one, under the other thread's hands.
    """
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
