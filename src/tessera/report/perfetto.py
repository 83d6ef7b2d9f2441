"""Timeline as Chrome JSON trace events for ui.perfetto.dev.

Overlapping spans of a device or link get further threads of the same name, since slices must nest. A flow
arrow joins a transfer with the last launch before it on the source and the first one after it on the
destination, which are neighbours in time and not always producer and consumer.
"""

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tessera.ir import Span, Timeline
from tessera.ir.files import write_whole
from tessera.report.figures import Track, rows, ticks, tracks

DEVICES, LINKS, REQUESTS = 1, 2, 3
NAMES = {DEVICES: "devices", LINKS: "links", REQUESTS: "requests"}

Event = dict[str, Any]
Drawn = tuple[int, Span]


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
    """A second timeline has its own processes and arrows."""
    for event in events:
        moved = {**event, "pid": event["pid"] + len(NAMES)}
        if moved.get("cat") == "flow":
            moved["id"] = f"beside {event['id']}"
        if moved.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": moved["pid"]}
        yield moved


def _events(timeline: Timeline) -> Iterator[Event]:
    for pid, name in NAMES.items():
        yield _name("process_name", pid, 0, f"{name} ({timeline.clock.value})")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    found = tracks(timeline)
    drawn: dict[str, list[Drawn]] = {}
    first_tid = 1
    for track in found:
        row_of = rows(track.spans)
        yield from _threads(track, first_tid, max(row_of, default=0) + 1)
        drawn[track.name] = [(first_tid + row, s) for row, s in zip(row_of, track.spans, strict=True)]
        yield from (_slice(_pid(track), tid, span) for tid, span in drawn[track.name])
        first_tid += max(row_of, default=0) + 1
    yield from _flows(found, drawn)
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


def _flows(found: Sequence[Track], drawn: dict[str, list[Drawn]]) -> Iterator[Event]:
    by_request: dict[tuple[str, int], list[Drawn]] = defaultdict(list)
    for track in found:
        if not track.is_link:
            for tid, span in drawn[track.name]:
                by_request[track.name, span.request].append((tid, span))
    number = 0
    for track in found:
        ends = track.ends
        if ends is None:
            continue
        for tid, span in drawn[track.name]:
            producer = _last_before(by_request[ends[0], span.request], span)
            reader = _first_after(by_request[ends[1], span.request], span)
            stops = [(DEVICES, producer), (LINKS, (tid, span)), (DEVICES, reader)]
            number += 1
            yield from _arrow(number, [(pid, at) for pid, at in stops if at is not None and _long(at[1])])


def _long(span: Span) -> bool:
    """An arrow attaches to the middle of the slice."""
    return ticks(span.stop_us) - ticks(span.start_us) >= 2


def _last_before(launches: list[Drawn], transfer: Span) -> Drawn | None:
    index = bisect_right(launches, ticks(transfer.start_us), key=lambda d: ticks(d[1].stop_us))
    return launches[index - 1] if index else None


def _first_after(launches: list[Drawn], transfer: Span) -> Drawn | None:
    index = bisect_left(launches, ticks(transfer.stop_us), key=lambda d: ticks(d[1].start_us))
    return launches[index] if index < len(launches) else None


def _arrow(number: int, stops: list[tuple[int, Drawn]]) -> Iterator[Event]:
    if len(stops) < 2:
        return
    phases = ["s"] + ["t"] * (len(stops) - 2) + ["f"]
    for phase, (pid, (tid, span)) in zip(phases, stops, strict=True):
        middle = (ticks(span.start_us) + ticks(span.stop_us)) // 2
        event = {"ph": phase, "name": "transfer", "cat": "flow", "id": number, "pid": pid, "tid": tid}
        # "e": attach to the enclosing slice, not the next one.
        yield {**event, "ts": middle / 1000} | ({"bp": "e"} if phase == "f" else {})


def _requests(timeline: Timeline) -> Iterator[Event]:
    for request, arrival_us, done_us in timeline.requests:
        event = {"cat": "request", "id": request, "pid": REQUESTS, "tid": 0, "name": f"request {request}"}
        yield {**event, "ph": "b", "ts": ticks(arrival_us) / 1000, "args": {"request": request}}
        yield {**event, "ph": "e", "ts": ticks(done_us) / 1000}
