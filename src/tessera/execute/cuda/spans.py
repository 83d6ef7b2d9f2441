"""spans: the records that turnstiles wrote -> spans of a timeline.

A launch on a stretched device lasts for the time it held the device; any other, from its entry to its end. A
copy lasts while it held its link, without the latency. Records are in nanoseconds of the GPU's clock; spans
in microseconds after a given moment, divided by the time scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.execute.cuda.issue import Track
from tessera.ir import Cluster, Program, Run, Span, Trace

# Words of a record.
STARTED, DUE, ENDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Since:
    """The GPU's clock, which counts from far too long ago for a float, as microseconds after a moment."""

    zero_ns: int
    scale: float = 1.0

    def us(self, time_ns: int) -> float:
        """Microseconds after the moment, divided by the time scale."""
        return (time_ns - self.zero_ns) / 1e3 / self.scale


def spans_of(
    program: Program,
    trace: Trace,
    cluster: Cluster,
    rows: Mapping[Track, Any],
    request: int,
    slot: int,
    clock: Since,
) -> list[Span]:
    """One span for each launch and copy that was timed. `rows[track]`: records, a row each."""
    names, spans = cluster.names, []
    for device, column in enumerate(program.instructions):
        if device not in rows:
            continue
        stop = DUE if cluster.devices[device].is_stretched else ENDED
        for launch in (i.launch for i in column if isinstance(i, Run)):
            times = _times(rows[device], launch, stop, clock)
            if times is not None:
                label = trace.kernel_of(launch).name
                spans.append(Span(names[device], label, request, slot, *times))
    for number, transfer in enumerate(program.transfers):
        pair = (transfer.src, transfer.dst)
        if pair not in rows:
            continue
        held = any(cluster.devices[d].is_stretched for d in pair)
        times = _times(rows[pair], len(trace.launches) + number, DUE if held else ENDED, clock)
        if times is not None:
            track = f"{names[transfer.src]} -> {names[transfer.dst]}"
            label = f"{transfer.num_bytes} bytes"
            spans.append(Span(track, label, request, slot, *times, True))
    return spans


def lateness_us(
    program: Program, cluster: Cluster, rows: Mapping[Track, Any], clock: Since
) -> dict[str, tuple[float, float]]:
    """Stretched device -> (how much later than due its launches ended, how long they held it), together."""
    found = {}
    for number, device in enumerate(cluster.devices):
        if not device.is_stretched or number not in rows:
            continue
        mine = [rows[number][i.launch] for i in program.instructions[number] if isinstance(i, Run)]
        times = [tuple(int(row[word]) for word in (STARTED, DUE, ENDED)) for row in mine]
        done = [(start, due, ended) for start, due, ended in times if start]
        late = sum(max(0, ended - due) for _, due, ended in done)
        held = sum(due - start for start, due, _ in done)
        found[device.name] = (late / 1e3 / clock.scale, held / 1e3 / clock.scale)
    return found


def _times(rows: Any, row: int, stop: int, clock: Since) -> tuple[float, float] | None:
    """(start, stop) in microseconds; None of a record that was never written."""
    started, ended = int(rows[row][STARTED]), int(rows[row][stop])
    return (clock.us(started), clock.us(ended)) if started else None


def first_start(rows: Mapping[Track, Any]) -> int | None:
    """The earliest start among the records, in nanoseconds; None if nothing was timed."""
    starts = [int(row[STARTED]) for records in rows.values() for row in records if int(row[STARTED])]
    return min(starts, default=None)
