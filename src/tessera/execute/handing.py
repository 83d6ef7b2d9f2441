"""Hands an object with tensors to a process of this machine, over a socket that joins the two.

`Process.start` could hand it over itself, but it waits for ever for a child that dies meanwhile, and a fork
server takes no more than 256 tensors. Here the child's death is an error of the socket. Tensors go as torch's
own reductions give them: memory of this machine by its file descriptors, CUDA memory by its IPC handle.

Pickle: only between a process and the child that it has just started.
"""

import os
import pickle
import socket
import struct
from multiprocessing import context
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from tessera.execute.handshake import read_into, socket_of

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
