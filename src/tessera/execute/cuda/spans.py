"""spans: the records that turnstiles wrote -> rows of a worker's report, by the machine's own clock.

A launch on a dilated device lasts for the time it held the device; any other, from its entry to its end. A
send lasts while it held its link, without the latency.
"""

import time
from dataclasses import dataclass

import torch

from tessera.execute.cuda.device import GpuDevice
from tessera.execute.cuda.graph import ShareGraph
from tessera.execute.cuda.turnstile import RECORD_WORDS
from tessera.ir import Run

# Words of a record.
STARTED, DUE, ENDED = 0, 1, 2
# The GPU's clock is looked at so often; the quickest look counts.
LOOKS = 20


# (launch, start, stop, time at work) of launches, and (transfer, start, stop) of sends.
Rows = tuple[list[tuple[int, float, float, float]], list[tuple[int, float, float]]]


@dataclass(frozen=True, slots=True)
class GpuClock:
    """The GPU's clock in seconds of this machine's monotonic one."""

    zero_ns: int
    zero_s: float

    @classmethod
    def of(cls, device: GpuDevice) -> "GpuClock":
        record = torch.zeros(RECORD_WORDS, dtype=torch.int64, device=device.card)
        best = (float("inf"), 0, 0.0)
        for _ in range(LOOKS):
            device.synchronize()
            before = time.monotonic()
            device.turnstile(None, 0, None, record, 0)
            device.synchronize()
            after = time.monotonic()
            best = min(best, (after - before, int(record[STARTED].item()), (before + after) / 2))
        return cls(best[1], best[2])

    def seconds(self, time_ns: int) -> float:
        return self.zero_s + (time_ns - self.zero_ns) * 1e-9


def rows_of(graph: ShareGraph, device: int, is_stretched: bool, clock: GpuClock) -> Rows:
    records = graph.records.cpu().tolist()
    if not records:
        return [], []
    column, first = graph.program.instructions[device], len(graph.trace.launches)
    spans = []
    for launch in (x.launch for x in column if isinstance(x, Run)):
        if records[launch][STARTED]:
            start, stop = clock.seconds(records[launch][STARTED]), _stop(records[launch], is_stretched, clock)
            spans.append((launch, start, stop, stop - start))
    sends = [
        (number, clock.seconds(row[STARTED]), _stop(row, True, clock))
        for number, transfer in enumerate(graph.program.transfers)
        if transfer.src == device and (row := records[first + number])[STARTED]
    ]
    return spans, sends


def _stop(row: list[int], is_held: bool, clock: GpuClock) -> float:
    due, ended = row[DUE], row[ENDED]
    return clock.seconds(due if is_held and due > row[STARTED] else max(ended, due))
