"""The trace for Perfetto."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from report_factory import make_plan, make_timeline
from tessera.errors import ArtifactError
from tessera.ir import Clock, Span, Timeline
from tessera.report import write_perfetto

Events = list[dict[str, Any]]


def events_of(timeline: Timeline, folder: Path) -> Events:
    """The events of the file written for a timeline."""
    path = folder / "out.perfetto.json"
    write_perfetto(timeline, path)
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: Events = document["traceEvents"]
    return events


def of(events: Events, phase: str) -> Events:
    """The events of one phase."""
    return [e for e in events if e["ph"] == phase]


def test_every_span_is_one_event(tmp_path: Path) -> None:
    """Each span appears once, with its times, request and microbatch."""
    timeline = make_timeline(make_plan())
    slices = of(events_of(timeline, tmp_path), "X")

    shown = sorted(
        (e["name"], e["args"]["request"], e["args"]["microbatch"], e["ts"], e["dur"]) for e in slices
    )
    spans = timeline.spans
    meant = sorted(
        (s.label, s.request, s.microbatch, s.start_us, round(s.stop_us - s.start_us, 3)) for s in spans
    )
    assert meant == shown


def test_tracks_are_named(tmp_path: Path) -> None:
    """Every device and every link is a named thread."""
    names = {
        e["args"]["name"]
        for e in events_of(make_timeline(make_plan()), tmp_path)
        if e["name"] == "thread_name"
    }

    assert {"emu:a100", "emu:l40s", "emu:a100 -> emu:l40s", "emu:l40s -> emu:a100"} == names


@pytest.mark.parametrize("clock", list(Clock))
def test_process_names_say_whose_clock(tmp_path: Path, clock: Clock) -> None:
    """A reader of the trace sees whether it was simulated or measured."""
    events = events_of(make_timeline(make_plan(), clock=clock), tmp_path)

    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [f"devices ({clock})", f"links ({clock})", f"requests ({clock})"] == named


def test_slices_of_one_thread_do_not_overlap(tmp_path: Path) -> None:
    """Messages that share a link in time are drawn on threads of their own."""
    spans = tuple(Span("a -> b", f"m{n}", n, n, 2.0 * n, 2.0 * n + 5.0, is_transfer=True) for n in range(9))
    threads = defaultdict(list)
    for e in of(events_of(Timeline(Clock.SIMULATED, spans, ()), tmp_path), "X"):
        threads[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))

    assert 3 == len(threads)
    assert all(a[1] <= b[0] for own in threads.values() for a, b in pairwise(own))


def test_requests_span_arrival_to_completion(tmp_path: Path) -> None:
    """Each request begins when it arrives and ends when it is complete."""
    events = events_of(Timeline(Clock.SIMULATED, (), ((7, 1.0, 9.0),)), tmp_path)

    assert [(7, 1.0)] == [(e["id"], e["ts"]) for e in of(events, "b")]
    assert [(7, 9.0)] == [(e["id"], e["ts"]) for e in of(events, "e")]


def test_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    """A folder that does not exist is named in the error."""
    with pytest.raises(ArtifactError, match="missing"):
        write_perfetto(Timeline(Clock.SIMULATED, (), ()), tmp_path / "missing" / "out.json")
