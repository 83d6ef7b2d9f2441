"""Spans sorted into tracks: devices first, then links.

A device runs one launch at a time, but messages may overlap on a link (the second leaves while the first
is still on its way) and measured spans may overlap anywhere. So a track has rows: a span goes to the first
row that is free. A track's utilisation counts overlapping time once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tessera.ir import Span, Timeline

LINK_ARROW = " -> "


@dataclass(frozen=True, slots=True)
class Track:
    """The spans of one device or one link, in order of their start."""

    name: str
    is_link: bool
    spans: tuple[Span, ...]

    @property
    def ends(self) -> tuple[str, str] | None:
        """Source and destination of a link; None for a device or a link named otherwise."""
        src, arrow, dst = self.name.partition(LINK_ARROW)
        return (src, dst) if self.is_link and arrow else None


def tracks(timeline: Timeline, devices: Iterable[str] = ()) -> tuple[Track, ...]:
    """Tracks of a timeline; the named devices come first and even if they did nothing."""
    spans: dict[str, list[Span]] = {name: [] for name in devices}
    for span in timeline.spans:
        spans.setdefault(span.track, []).append(span)
    made = [Track(name, any(s.is_transfer for s in own), tuple(own)) for name, own in spans.items()]
    return tuple(sorted(made, key=lambda track: track.is_link))  # stable: order of appearance within a kind


def busy_us(spans: Sequence[Span]) -> float:
    """Time during which at least one of the spans, sorted by start, runs."""
    busy, until = 0.0, float("-inf")
    for span in spans:
        busy += max(0.0, span.stop_us - max(span.start_us, until))
        until = max(until, span.stop_us)
    return busy


def utilisation(track: Track, run_us: float) -> float:
    """Fraction of a run of that length during which the track was busy."""
    return busy_us(track.spans) / run_us if run_us > 0 else 0.0


def end_us(timeline: Timeline) -> float:
    """When the last request and the last span are over."""
    return max(timeline.makespan_us, max((s.stop_us for s in timeline.spans), default=0.0))


def ticks(us: float) -> int:
    """A time in whole nanoseconds: what stops at a moment and what starts there get the same number."""
    return round(us * 1000)


def rows(spans: Sequence[Span]) -> list[int]:
    """For each span, sorted by start, the first row whose last span is over when it starts."""
    free_at: list[int] = []
    placed = []
    for span in spans:
        start = ticks(span.start_us)
        row = next((n for n, free in enumerate(free_at) if free <= start), len(free_at))
        if row == len(free_at):
            free_at.append(0)
        free_at[row] = ticks(span.stop_us)
        placed.append(row)
    return placed
