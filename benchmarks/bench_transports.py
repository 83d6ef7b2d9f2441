"""One way between two processes of this machine: the transports of CPU workers against gloo.

Run with: python -m benchmarks.bench_transports [--json PATH]
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.transport_times import time_processes

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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = [one_round() for _ in range(options.rounds)]
    best = {name: {n: min(r[name][n] for r in rounds) for n in SIZES} for name in rounds[0]}
    print(f"{'one way, us':20}" + "".join(f"{n >> 10:>10} KB" for n in SIZES))
    for name, row in best.items():
        print(f"{name:20}" + "".join(f"{row[n]:13.0f}" for n in SIZES))
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "best": best}, indent=1) + "\n")


if __name__ == "__main__":
    main()
