"""Transports over torch.distributed: `gloo` between CPUs of any machines, `nccl` where each worker has a GPU.

Every worker is a rank, numbered as its device. For each peer there are at most two threads: one sends what
it is given in order, one receives. A message is a header (ticket, transfer, when it was sent) and the bytes.
The header says what comes next, so a receiver never waits for one run's transfer while another's is there,
and what arrives before its place is free is kept in memory of its own until it is fetched.

Workers find each other through the engine: what torch would keep in its own key-value server, which accepts
anybody, goes over each worker's connection to the engine, which is authenticated or a pipe. The bytes
themselves travel as gloo and NCCL send them: neither encrypted nor authenticated, so use a private network.

`nccl` moves the same bytes through GPU memory; see `nccl_road`.
"""

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tessera.errors import TesseraError
from tessera.execute import messages
from tessera.execute.messages import StoreGet, StoreSet, StoreValue
from tessera.execute.transport import Arrived, Gone, Left, Parcel, Post

# A peer may be idle for long; whether it lives is seen by its connection, not by a clock.
IDLE = timedelta(days=365)
# ticket, transfer, bytes, start in nanoseconds
HEADER = 4
# A ticket no run has: the peer leaves.
BYE = -1


class EngineStore(dist.Store):  # type: ignore[name-defined, misc]
    """The key-value store that a process group is made with, kept by the engine."""

    def __init__(self, orders: Connection, answers: Connection) -> None:
        super().__init__()
        self._orders, self._answers = orders, answers
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        """Tells the engine."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._answers.send_bytes(messages.encode(StoreSet(key, data.hex())))

    def get(self, key: str) -> bytes:
        """Asks the engine, which answers when somebody has set it."""
        with self._lock:
            self._answers.send_bytes(messages.encode(StoreGet(key)))
            answer = messages.decode(self._orders.recv_bytes())
        if not isinstance(answer, StoreValue):
            raise TesseraError(f"the engine answered {type(answer).__name__} before the workers had met")
        return bytes.fromhex(answer.value_hex)

    def wait(self, keys: list[str], timeout: timedelta = IDLE) -> None:
        """Returns when all are set."""
        for key in keys:
            self.get(key)


@dataclass(frozen=True)
class Meeting:
    """How one worker opens its collective transport."""

    backend: str
    rank: int
    world: int
    # Address of this machine under which the others reach it.
    host: str
    # (source, destination) that some program has a transfer between, in order.
    pairs: tuple[tuple[int, int], ...]
    # Which of the ranks with this address it is.
    place: int = 0

    @property
    def sends(self) -> tuple[int, ...]:
        """Whom this rank sends to."""
        return tuple(dst for src, dst in self.pairs if src == self.rank)

    @property
    def recvs(self) -> tuple[int, ...]:
        """Whom this rank receives from."""
        return tuple(src for src, dst in self.pairs if dst == self.rank)

    def __call__(self, orders: Connection, answers: Connection) -> "Collective":
        store = EngineStore(orders, answers)
        if self.backend == "gloo":
            return Collective(self, GlooRoad(gloo_group(store, self.rank, self.world, self.host)))
        from tessera.execute.nccl_road import open_nccl

        return Collective(self, open_nccl(store, self.rank, self.world, self.place, self.pairs))


def gloo_group(store: Any, rank: int, world: int, host: str) -> Any:
    """Ranks that reach one another over the network."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = IDLE
    return dist.ProcessGroupGloo(store, rank, world, options)


class Road(Protocol):
    """Moves one message between two ranks; called by one thread a peer and direction."""

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Returns when the tensor's memory may be written again."""

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Returns when the tensor holds what the peer sent."""


@dataclass(frozen=True)
class GlooRoad:
    """From CPU to CPU."""

    group: Any

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Blocks this thread only."""
        self.group.send([tensor], peer, 0).wait()

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Likewise."""
        self.group.recv([tensor], peer, 0).wait()


@dataclass
class Collective:
    """One worker's end of all its links."""

    meeting: Meeting
    road: Road
    _post: Post = lambda news: None
    _outgoing: dict[int, "queue.SimpleQueue[tuple[Parcel, torch.Tensor] | None]"] = field(
        default_factory=dict
    )
    _held: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _forgotten: set[int] = field(default_factory=set)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, post: Post) -> None:
        """A thread for each peer and direction."""
        self._post = post
        for peer in self.meeting.sends:
            self._outgoing[peer] = queue.SimpleQueue()
            self._spawn(self._send_all, peer)
        for peer in self.meeting.recvs:
            self._spawn(self._receive_all, peer)

    def send(self, parcel: Parcel, contents: torch.Tensor) -> None:
        """Hands the bytes to the peer's thread."""
        self._outgoing[parcel.program.transfers[parcel.number].dst].put((parcel, contents))

    def fetch(self, parcel: Parcel) -> torch.Tensor:
        """The bytes as they arrived."""
        return self._held.pop((parcel.ticket, parcel.number))

    def forget(self, ticket: int) -> None:
        """Lets go of what arrived for a run that has ended."""
        self._forgotten.add(ticket)
        for key in [k for k in list(self._held) if k[0] == ticket]:
            self._held.pop(key, None)

    def close(self) -> None:
        """Says goodbye to every peer; who is already gone needs none."""
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        for thread in self._threads[: len(self._outgoing)]:
            thread.join(1.0)

    def _spawn(self, target: Callable[[int], None], peer: int) -> None:
        self._threads.append(threading.Thread(target=self._watched, args=(target, peer), daemon=True))
        self._threads[-1].start()

    def _watched(self, target: Callable[[int], None], peer: int) -> None:
        try:
            target(peer)
        except RuntimeError as error:  # what torch raises for a connection that is gone
            self._post(Gone(peer, _first_sentence(str(error))))

    def _send_all(self, peer: int) -> None:
        while True:
            item = self._outgoing[peer].get()
            if item is None:
                self.road.send(_header(BYE, 0, 0), peer)
                return
            parcel, contents = item
            self.road.send(_header(parcel.ticket, parcel.number, contents.numel()), peer)
            self.road.send(contents, peer)
            self._post(Left(parcel.ticket, parcel.number))

    def _receive_all(self, peer: int) -> None:
        while True:
            header = torch.empty(HEADER, dtype=torch.int64)
            self.road.recv(header, peer)
            ticket, number, size, start_ns = header.tolist()
            if ticket == BYE:
                return
            contents = torch.empty(size, dtype=torch.uint8)
            self.road.recv(contents, peer)
            if ticket not in self._forgotten:
                self._held[ticket, number] = contents
                self._post(Arrived(ticket, number, start_ns * 1e-9, time.monotonic()))


def _first_sentence(text: str) -> str:
    """What gloo says, without the line of its source before it and the advice behind it."""
    return re.sub(r"^\[.*?\] ", "", text.splitlines()[0]).split(". ")[0]


def _header(ticket: int, number: int, size: int) -> torch.Tensor:
    return torch.tensor([ticket, number, size, time.monotonic_ns()], dtype=torch.int64)


def meetings(
    backend: str, num_devices: int, joined: Iterable[tuple[int, int]], hosts: list[str]
) -> list[Meeting]:
    """One a worker; `joined` are the (source, destination) that some program has a transfer between."""
    pairs = tuple(sorted(set(joined)))
    return [
        Meeting(backend, rank, num_devices, hosts[rank], pairs, hosts[:rank].count(hosts[rank]))
        for rank in range(num_devices)
    ]
