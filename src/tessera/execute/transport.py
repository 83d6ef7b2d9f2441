"""Transport: how the bytes of a transfer get from one worker process to another.

One interface, several ways, chosen by name:
  shm    processes of one machine: bytes in shared memory, news of them through a pipe. The default: one way
         takes a fraction of gloo's time on one machine.
  gloo   any machines, over torch.distributed; see `collective`.
  nccl   the same with a GPU in every worker process; see `collective`.

A transport owns the threads it needs and never keeps the worker's thread waiting. It tells the worker's inbox
three things: a transfer has arrived, a transfer has left (its memory may be written again), a peer is lost.
"""

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from tessera.errors import UnknownName
from tessera.execute.footprint import landing
from tessera.execute.inbox import Hangup, Inbox
from tessera.ir import Program

NAMES = ("gloo", "nccl", "shm")

_NEWS = struct.Struct("<qqd")


@dataclass(frozen=True, slots=True)
class Parcel:
    """One transfer of one run."""

    program: Program
    slot: int
    ticket: int
    number: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """News: the bytes of a transfer are here; sent and arrived at these times."""

    ticket: int
    number: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Left:
    """News: the bytes of a transfer have been read and may be overwritten."""

    ticket: int
    number: int


@dataclass(frozen=True, slots=True)
class Gone:
    """News: another worker cannot be reached."""

    device: int
    message: str


Post = Callable[[Any], None]


class Transport(Protocol):
    """One worker's end of all its links."""

    def start(self, post: Post) -> None:
        """Begins to tell news; called once."""

    def send(self, parcel: Parcel, contents: torch.Tensor) -> None:
        """Starts a transfer; `contents` must not change until it has left."""

    def fetch(self, parcel: Parcel) -> torch.Tensor:
        """The bytes of a transfer that has arrived; once only, valid until the run ends."""

    def forget(self, ticket: int) -> None:
        """Bytes of this run will not be fetched."""

    def close(self) -> None:
        """Ends what the transport has started."""


def check_name(name: str) -> None:
    """Raises UnknownName with the known ones."""
    if name not in NAMES:
        raise UnknownName("transport", name, NAMES)


@dataclass
class Wire:
    """One worker's end of the shared memory and pipe from one device to another.

    For each slot there is a fixed place for each transfer of a program. A sender copies into the place and
    writes the news to the pipe, which also orders memory between the processes. A place is used again only by
    the slot's next run, which starts when all devices have finished or forgotten the last one.
    """

    src: int
    dst: int
    arena: torch.Tensor
    slot_bytes: int
    pipe: Connection
    _places: dict[int, dict[int, int]] = field(default_factory=dict)

    def place(self, parcel: Parcel) -> torch.Tensor:
        """The bytes of the shared memory that belong to one transfer of one slot."""
        key = id(parcel.program)
        if key not in self._places:
            self._places[key] = landing(parcel.program, self.src, self.dst)[0]
        start = parcel.slot * self.slot_bytes + self._places[key][parcel.number]
        return self.arena[start : start + parcel.program.transfers[parcel.number].num_bytes]


class SharedMemory:
    """Transport `shm`: a send copies at once, so its memory has left when it returns."""

    def __init__(self, sends: Mapping[int, Wire], recvs: Mapping[int, Wire]) -> None:
        self._sends, self._recvs = sends, recvs
        self._lost: set[int] = set()
        self._post: Post = lambda news: None

    def start(self, post: Post) -> None:
        """One thread reads the news of all peers."""
        self._post = post
        if self._recvs:
            _News(post).listen({device: wire.pipe for device, wire in self._recvs.items()}, _decode_news)

    def send(self, parcel: Parcel, contents: torch.Tensor) -> None:
        """Copies the bytes over and tells the other end."""
        dst = parcel.program.transfers[parcel.number].dst
        start = time.monotonic()
        self._sends[dst].place(parcel).copy_(contents)
        self._post(Left(parcel.ticket, parcel.number))
        try:
            self._sends[dst].pipe.send_bytes(_NEWS.pack(parcel.ticket, parcel.number, start))
        except OSError:  # the peer has died; the engine sees that too and ends or restarts the run
            self._lost.add(dst)

    def fetch(self, parcel: Parcel) -> torch.Tensor:
        """The bytes where the sender left them."""
        return self._recvs[parcel.program.transfers[parcel.number].src].place(parcel)

    def forget(self, ticket: int) -> None:
        """Places are written again by the next run; nothing is kept."""

    def close(self) -> None:
        """Pipes close with the process."""


def _decode_news(data: bytes) -> Arrived:
    ticket, number, start = _NEWS.unpack(data)
    return Arrived(ticket, number, start, time.monotonic())


class _News(Inbox):
    """An inbox that hands on what it reads; a closed pipe is no news, the engine hears of it first."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._post = post

    def post(self, source: int, message: Any) -> None:
        """Hands on one message."""
        if not isinstance(message, Hangup):
            self._post(message)
