"""Times of transfers between two processes of this machine, by size, each way and both ways at once.

Over the transports of CPU workers themselves (`transport`): from the start of a send to when the receiver has
the bytes in memory of its own. Both processes read the same monotonic clock.
"""

import os
import queue
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute.links import Links
from tessera.execute.mailbox import Mailbox
from tessera.execute.messages import Setup
from tessera.execute.transport import HOST, SHM, TransferArrived, Transport, open_transport
from tessera.ir import Cluster, Program, Transfer

# Transport -> how bytes travel, in words.
VIA = {SHM: "shared memory", HOST: "a socket"}
# Phase -> (first process sends, second process sends).
PHASES = {"there": (True, False), "back": (False, True), "both": (True, True)}
# Bytes moved for each size and phase, within these numbers of repeats.
BYTES_PER_SIZE, MIN_REPEATS, MAX_REPEATS = 256 << 20, 3, 30
TIMEOUT_S = 300.0

# Phase -> (bytes, microseconds) of every transfer; "both" as "both there" and "both back".
Times = dict[str, list[tuple[int, float]]]


def time_processes(sizes: Sequence[int], transport: str = SHM) -> Times:
    """Starts two processes and times transfers of these sizes between them."""
    context = get_context("spawn")
    ends = context.Pipe()
    answers = [context.Pipe(duplex=False) for _ in range(2)]
    with _folder() as folder:
        workers = [
            context.Process(
                target=_worker, args=(i, transport, folder, list(sizes), ends[i], answers[i][1]), daemon=True
            )
            for i in range(2)
        ]
        try:
            for worker in workers:
                worker.start()
            return _collect([reader for reader, _ in answers])
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.join(1.0)
                    worker.kill()


@contextmanager
def _folder() -> Iterator[str]:
    home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tessera-links-", dir=home) as folder:
        yield folder


def _collect(readers: Sequence[Connection]) -> Times:
    found: Times = {}
    for reader, way in zip(readers, ("back", "there"), strict=True):  # who receives tells
        if not reader.poll(TIMEOUT_S):
            raise WorkerError(
                "a process that measures a link did not answer", "Try again on an idle machine."
            )
        for phase, num_bytes, us in reader.recv():
            name = f"both {way}" if phase == "both" else phase
            found.setdefault(name, []).append((num_bytes, us))
    return found


class _End:
    """One process's transport, with a lane a size and a transfer each way."""

    def __init__(self, number: int, transport: str, folder: str, sizes: Sequence[int]) -> None:
        self._number = number
        self._programs = [
            Program(0, 0, 1, ((), ()), tuple(_transfer(n, src) for src in (0, 1)), ((), ()), (), ())
            for n in sizes
        ]
        lanes = tuple((program,) for program in self._programs)
        setup = Setup(
            number,
            Cluster((), ()),
            (),
            lanes,
            1,
            transport=transport,
            epochs=(0, 0),
            weights={},
            folder=folder,
        )
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        mailbox = Mailbox()
        self._links = Links(setup, mailbox, self._news.put)
        self._transport: Transport = open_transport(setup, self._links, self._news.put)
        mailbox.start()
        self.address = self._links.address
        self._mine = torch.ones(max(sizes), dtype=torch.uint8)
        self._theirs = torch.zeros(max(sizes), dtype=torch.uint8)

    def link(self, address: str) -> None:
        """Tells where the other process listens."""
        self._links.relink(1 - self._number, 0, address)

    def exchange(self, lane: int, run: int, is_sender: bool, is_receiver: bool) -> float | None:
        """One transfer; the microseconds of the one that arrives here, from the start of its send."""
        program = self._programs[lane]
        size = program.transfers[0].num_bytes
        if is_sender:
            self._transport.sender(program, 0, self._number, self._mine[:size])(run)
        if not is_receiver:
            return None
        news = self._news.get(timeout=TIMEOUT_S)
        if not isinstance(news, TransferArrived):
            raise WorkerError(f"the link was lost: {news.message}")
        self._transport.receiver(program, 0, 1 - self._number, self._theirs[:size])(run)
        return (time.monotonic() - news.start_s) * 1e6


def _transfer(num_bytes: int, src: int) -> Transfer:
    return Transfer(src, src, 0, num_bytes, src, 1 - src)


def _worker(
    number: int, transport: str, folder: str, sizes: list[int], peer: Connection, answer: Connection
) -> None:
    torch.set_num_threads(1)
    end = _End(number, transport, folder, sizes)
    peer.send(end.address)
    end.link(peer.recv())
    found = []
    run = 0
    for phase, senders in PHASES.items():
        for lane, size in enumerate(sizes):
            for turn in range(1 + min(MAX_REPEATS, max(MIN_REPEATS, BYTES_PER_SIZE // size // 4))):
                peer.send(None)  # both are here
                peer.recv()
                run += 1
                us = end.exchange(lane, run, senders[number], senders[1 - number])
                if us is not None and turn > 0:
                    found.append((phase, size, us))
    answer.send(found)
    peer.send(None)  # the other may still read
    peer.recv()
    os._exit(0)  # threads of the links wait for ever
