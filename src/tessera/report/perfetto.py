"""Timeline as Chrome JSON trace events for ui.perfetto.dev.

Overlapping spans of a device or link get further threads of the same name, since slices must nest.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tessera.ir import Span, Timeline
from tessera.ir.files import write_whole
from tessera.report.figures import Track, rows, ticks, tracks

DEVICES, LINKS, REQUESTS = 1, 2, 3
NAMES = {DEVICES: "devices", LINKS: "links", REQUESTS: "requests"}

Event = dict[str, Any]


def write_perfetto(timeline: Timeline, path: str | Path, beside: Timeline | None = None) -> None:
    write_whole(path, (chunk.encode() for chunk in _document(timeline, beside)))


def _document(timeline: Timeline, beside: Timeline | None) -> Iterator[str]:
    about = json.dumps({"clock": timeline.clock.value, "made_by": "tessera"})
    yield f'{{"displayTimeUnit": "ns", "otherData": {about}, "traceEvents": [\n'
    separator = ""
    events = _events(timeline) if beside is None else chain(_events(timeline), _shifted(_events(beside)))
    for event in events:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def _shifted(events: Iterator[Event]) -> Iterator[Event]:
    """A second timeline has its own processes."""
    for event in events:
        moved = {**event, "pid": event["pid"] + len(NAMES)}
        if moved.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": moved["pid"]}
        yield moved


def _events(timeline: Timeline) -> Iterator[Event]:
    for pid, name in NAMES.items():
        yield _name("process_name", pid, 0, f"{name} ({timeline.clock.value})")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    first_tid = 1
    for track in tracks(timeline):
        row_of = rows(track.spans)
        num = max(row_of, default=0) + 1
        yield from _threads(track, first_tid, num)
        for row, span in zip(row_of, track.spans, strict=True):
            yield _slice(_pid(track), first_tid + row, span)
        first_tid += num
    yield from _requests(timeline)


def _pid(track: Track) -> int:
    return LINKS if track.is_link else DEVICES


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _threads(track: Track, first_tid: int, num: int) -> Iterator[Event]:
    for tid in range(first_tid, first_tid + num):
        yield _name("thread_name", _pid(track), tid, track.name)
        index = {"sort_index": tid}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _pid(track), "tid": tid, "args": index}


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


def _requests(timeline: Timeline) -> Iterator[Event]:
    for request, arrival_us, done_us in timeline.requests:
        event = {"cat": "request", "id": request, "pid": REQUESTS, "tid": 0, "name": f"request {request}"}
        yield {**event, "ph": "b", "ts": ticks(arrival_us) / 1000, "args": {"request": request}}
        yield {**event, "ph": "e", "ts": ticks(done_us) / 1000}
