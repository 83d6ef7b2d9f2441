"""Transfers and messages between two processes of this machine.

transports  one way of a transfer: the transports of CPU workers against gloo
messages    round trip of a message and start-up of a worker: a pipe, and mailboxes over ipc:// and tcp://

Run with: python -m benchmarks.bench_transports [--parts transports,messages] [--json PATH]
"""

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.transport_times import time_processes

from tessera.execute.engine_connection import EngineConnection
from tessera.execute.mailbox import Hangup, Mailbox, PeerConnection
from tessera.execute.messages import Cancel, StoreValue

MESSAGE_SIZES, ROUND_TRIPS = (100, 20_000), 2000
SIZES = (16 << 10, 1 << 20, 64 << 20)
REPEATS = {16 << 10: 200, 1 << 20: 100, 64 << 20: 10}


def time_gloo() -> dict[int, list[float]]:
    """Microseconds by size, from the start of a send to its arrival."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, f"{folder}/store", theirs)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        found: dict[int, list[float]] = ours.recv()
        for rank in ranks:
            rank.join()
    return found


def _rank(rank: int, path: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found: dict[int, list[float]] = {}
    header = torch.zeros(1, dtype=torch.float64)
    for size in SIZES:
        contents = torch.ones(size, dtype=torch.uint8)
        for turn in range(REPEATS[size] + 1):
            dist.barrier()
            if rank == 0:  # as a worker would: what comes, then the bytes
                header[0] = time.monotonic()
                dist.send(header, 1)
                dist.send(contents, 1)
            else:
                dist.recv(header, 0)
                came = torch.empty(size, dtype=torch.uint8)  # its place may not be free yet
                dist.recv(came, 0)
                contents.copy_(came)
                if turn:
                    found.setdefault(size, []).append((time.monotonic() - float(header[0])) * 1e6)
    if rank == 1:
        answer.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _echo_mailbox(address: str, secret: bytes) -> None:
    engine = EngineConnection(address, secret)
    engine.tell(Cancel(0))
    while not isinstance(message := engine.take(block=True), Hangup):
        engine.tell(message)


def _echo_pipe(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(pipe.recv_bytes())


def time_mailbox(address: str, secret: bytes, size: int) -> tuple[float, float]:
    """Milliseconds until a new process answers, and median microseconds of a round trip."""
    news: deque[PeerConnection] = deque()
    box = Mailbox()
    where = box.listen(address, lambda connection, message, contents: news.append(connection), secret)
    start_s = time.perf_counter()
    process = multiprocessing.get_context("forkserver").Process(target=_echo_mailbox, args=(where, secret))
    process.start()
    while not news:
        box.pump(1.0)
    start_ms, times, message = (time.perf_counter() - start_s) * 1e3, [], StoreValue("", bytes(size))
    for _ in range(ROUND_TRIPS):
        connection, start_s = news.popleft(), time.perf_counter()
        connection.send(message)
        while not news:
            box.pump(1.0)
        times.append((time.perf_counter() - start_s) * 1e6)
    box.close()
    process.join()
    return start_ms, statistics.median(times)


def time_pipe(size: int) -> tuple[float, float]:
    """The same for a pipe without threads or types: the least that can be had."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    start_s = time.perf_counter()
    process = context.Process(target=_echo_pipe, args=(theirs,))
    process.start()
    theirs.close()
    times = []
    for _ in range(ROUND_TRIPS + 1):
        ours.send_bytes(bytes(size))
        ours.recv_bytes()
        times.append((time.perf_counter() - start_s) * 1e6)
        start_s = time.perf_counter()
    ours.close()
    process.join()
    return times[0] * 1e-3, statistics.median(times[1:])


def messages_round() -> dict[str, dict[int, tuple[float, float]]]:
    """By kind of connection and size."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.bench_transports"])
    found: dict[str, dict[int, tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in MESSAGE_SIZES:
            found.setdefault("pipe", {})[size] = time_pipe(size)
            kinds = {"ipc": f"ipc://{folder}/{size}", "tcp": "tcp://127.0.0.1:*"}
            for kind, address in kinds.items():
                found.setdefault(kind, {})[size] = time_mailbox(address, b"", size)
            curve = time_mailbox("tcp://127.0.0.1:*", b"a secret for this benchmark", size)
            found.setdefault("tcp, CURVE", {})[size] = curve
    return found


def print_messages() -> None:
    """One row per kind of connection."""
    print(f"{'round trip, us':20}" + "".join(f"{n:>10} B " for n in MESSAGE_SIZES) + "  start, ms")
    for name, row in messages_round().items():
        trips = "".join(f"{row[n][1]:12.0f}" for n in MESSAGE_SIZES)
        print(f"{name:20}{trips}{min(start for start, _ in row.values()):12.1f}")


def one_round() -> dict[str, dict[int, float]]:
    """Median microseconds by transport and size."""
    medians: dict[str, dict[int, float]] = {}
    for name in ("shm", "host"):
        times = time_processes(SIZES, name)["there"]
        medians[name] = {n: statistics.median(us for size, us in times if size == n) for n in SIZES}
    medians["gloo"] = {n: statistics.median(us) for n, us in time_gloo().items()}
    return medians


def main() -> None:
    """Prints the best round of each, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="transports,messages", help="transports, messages")
    parser.add_argument("--json", type=Path, help="file for the transports' times")
    options = parser.parse_args()
    if "messages" in options.parts:
        print_messages()
    if "transports" not in options.parts:
        return
    rounds = [one_round() for _ in range(options.rounds)]
    best = {name: {n: min(r[name][n] for r in rounds) for n in SIZES} for name in rounds[0]}
    print(f"{'one way, us':20}" + "".join(f"{n >> 10:>10} KB" for n in SIZES))
    for name, row in best.items():
        print(f"{name:20}" + "".join(f"{row[n]:13.0f}" for n in SIZES))
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "best": best}, indent=1) + "\n")


if __name__ == "__main__":
    main()
