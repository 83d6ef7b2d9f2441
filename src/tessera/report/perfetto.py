"""Timeline as Chrome JSON trace events for ui.perfetto.dev.

Overlapping spans of a device or link get further threads of the same name, since slices must nest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tessera.ir import Span, Timeline
from tessera.ir.files import write_whole
from tessera.report.figures import rows, ticks, tracks

DEVICES, LINKS, REQUESTS = 1, 2, 3
NAMES = {DEVICES: "devices", LINKS: "links", REQUESTS: "requests"}

Event = dict[str, Any]


def write_perfetto(timeline: Timeline, path: str | Path, beside: Timeline | None = None) -> None:
    about = {"clock": timeline.clock.value, "made_by": "tessera"}
    events = [*_events(timeline), *(_events(beside, len(NAMES)) if beside else ())]
    document = {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}
    write_whole(path, [msgspec.json.encode(document)])


def _events(timeline: Timeline, offset: int = 0) -> Iterator[Event]:
    """`offset`: processes of another timeline before it."""
    for pid, name in enumerate(NAMES.values(), offset + 1):
        yield _meta("process_name", pid, 0, name=f"{name} ({timeline.clock.value})")
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    first_tid = 1
    for track in tracks(timeline):
        row_of, pid = rows(track.spans), offset + (LINKS if track.is_link else DEVICES)
        num = max(row_of, default=0) + 1
        for tid in range(first_tid, first_tid + num):
            yield _meta("thread_name", pid, tid, name=track.name)
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)
        for row, span in zip(row_of, track.spans, strict=True):
            yield _slice(pid, first_tid + row, span)
        first_tid += num
    for request, arrival_us, done_us in timeline.requests:
        about = {"cat": "request", "id": request, "tid": 0, "name": f"request {request}"}
        event = {**about, "pid": offset + REQUESTS}
        yield {**event, "ph": "b", "ts": ticks(arrival_us) / 1000, "args": {"request": request}}
        yield {**event, "ph": "e", "ts": ticks(done_us) / 1000}


def _meta(kind: str, pid: int, tid: int, **about: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": about}


def _slice(pid: int, tid: int, span: Span) -> Event:
    start, stop = ticks(span.start_us), ticks(span.stop_us)
    return {
        "ph": "X",
        "name": span.label,
        "cat": "transfer" if span.is_transfer else "launch",
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (stop - start) / 1000,
        "args": {"request": span.request, "microbatch": span.microbatch},
    }
