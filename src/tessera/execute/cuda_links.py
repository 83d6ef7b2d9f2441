"""Times of copies between two CUDA devices, or a device and the host, by size, each way and both at once.

Between two cards: peer copies where the cards reach one another, else copies that the driver stages through
host memory. Between parts of one card: a copy inside it, which reads and writes the same memory. To and from
the host: pinned memory. Timed by events, behind a gate that holds the queue until the copy is submitted; what
a CPU takes to submit a copy is not part of the time, as it is not in a graph.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

GATE_CYCLES = 150_000
WARMUPS, REPEATS = 2, 7

Times = dict[str, list[tuple[int, float]]]


def via(src: int | None, dst: int | None) -> str:
    """How bytes travel between two devices; None is the host."""
    if src is None or dst is None:
        return "pinned host memory"
    if src == dst:
        return "a copy inside one card"
    reach = torch.cuda.can_device_access_peer(src, dst) and torch.cuda.can_device_access_peer(dst, src)
    return "peer copies" if reach else "copies staged through host memory"


def time_copies(src: int | None, dst: int | None, sizes: Sequence[int]) -> Times:
    """Medians of copies of these sizes. One of the two must be a card."""
    main = src if src is not None else dst
    if main is None:
        raise ValueError("copies between the host and itself")
    found: Times = {"there": [], "back": [], "both there": [], "both back": []}
    with torch.cuda.device(main):
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for size in sizes:
            there = (_memory(size, src), _memory(size, dst))
            back = (_memory(size, dst), _memory(size, src))
            found["there"].append((size, _median_us([there], streams)))
            found["back"].append((size, _median_us([back], streams)))
            both = _median_us([there, back], streams)
            found["both there"].append((size, both))
            found["both back"].append((size, both))
    return found


def _memory(size: int, ordinal: int | None) -> torch.Tensor:
    if ordinal is None:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return torch.zeros(size, dtype=torch.uint8, device=f"cuda:{ordinal}")


def _median_us(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: Sequence[Any]) -> float:
    return median([_once_us(pairs, streams) for _ in range(WARMUPS + REPEATS)][WARMUPS:])


def _once_us(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], streams: Sequence[Any]) -> float:
    """From the start of all copies to the end of the last."""
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first = streams[0]
    with torch.cuda.stream(first):
        torch.cuda._sleep(GATE_CYCLES)
        start.record()
    for stream, (source, target) in zip(streams, pairs, strict=False):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        if stream is not first:
            first.wait_stream(stream)
    with torch.cuda.stream(first):
        stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
