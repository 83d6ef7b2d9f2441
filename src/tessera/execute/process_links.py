"""Times of transfers between two worker processes of this machine, by size, each way and both ways at once.

As workers do it: the sender copies into shared memory and writes to a pipe; the receiver reads the pipe and
copies into memory of its own. Both processes read the same monotonic clock. Needs no torch.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from tessera.errors import WorkerError

VIA = "shared memory and a pipe"
# Phase -> (first process sends, second process sends).
PHASES = {"there": (True, False), "back": (False, True), "both": (True, True)}
# Bytes moved for each size and phase, within these numbers of repeats.
BYTES_PER_SIZE, MIN_REPEATS, MAX_REPEATS = 256 << 20, 3, 30
TIMEOUT_S = 300.0

# Phase -> (bytes, microseconds) of every transfer; "both" as "both there" and "both back".
Times = dict[str, list[tuple[int, float]]]


def time_processes(sizes: Sequence[int]) -> Times:
    """Starts two processes and times transfers of these sizes between them."""
    context = multiprocessing.get_context("spawn")
    arenas = [SharedMemory(create=True, size=max(sizes)) for _ in range(2)]
    ends = context.Pipe()
    answers = [context.Pipe(duplex=False) for _ in range(2)]
    names = [arena.name for arena in arenas]
    workers = [
        context.Process(target=_worker, args=(i, ends[i], names, list(sizes), answers[i][1]), daemon=True)
        for i in range(2)
    ]
    try:
        for worker in workers:
            worker.start()
        return _collect([reader for reader, _ in answers])
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for arena in arenas:
            arena.close()
            arena.unlink()


def _collect(readers: list[Any]) -> Times:
    """What arrived at the second process went there, what arrived at the first came back."""
    found: Times = {}
    for reader, way in zip(readers, ("back", "there"), strict=True):
        if not reader.poll(TIMEOUT_S):
            raise WorkerError(
                "a process that measures a link did not answer", "Try again on an idle machine."
            )
        for phase, num_bytes, us in reader.recv():
            name = f"both {way}" if phase == "both" else phase
            found.setdefault(name, []).append((num_bytes, us))
    return found


def _worker(number: int, peer: Connection, names: list[str], sizes: list[int], answer: Connection) -> None:
    arenas = [SharedMemory(name=name) for name in names]
    outbox, inbox = (_array(arenas[i]) for i in (number, 1 - number))
    mine = np.ones(max(sizes), dtype=np.uint8)
    found = []
    for phase, senders in PHASES.items():
        for size in sizes:
            for turn in range(1 + min(MAX_REPEATS, max(MIN_REPEATS, BYTES_PER_SIZE // size // 4))):
                peer.send(None)  # both are here
                peer.recv()
                us = _exchange(size, peer, mine, outbox, inbox, senders[number], senders[1 - number])
                if us is not None and turn > 0:
                    found.append((phase, size, us))
    answer.send(found)
    del outbox, inbox
    for arena in arenas:
        arena.close()


def _array(arena: SharedMemory) -> Any:
    return np.ndarray((arena.size,), dtype=np.uint8, buffer=arena.buf)


def _exchange(
    size: int, peer: Connection, mine: Any, outbox: Any, inbox: Any, is_sender: bool, is_receiver: bool
) -> float | None:
    """One transfer; the time of the one that arrives here, from the start of its send."""
    if is_sender:
        start = time.monotonic()
        outbox[:size] = mine[:size]
        peer.send(start)
    if not is_receiver:
        return None
    start = float(peer.recv())
    mine[:size] = inbox[:size]
    return (time.monotonic() - start) * 1e6
