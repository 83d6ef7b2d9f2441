"""The timeline as HTML: the whole run as a picture of columns, and a closer look at its middle.

The whole run: every track is COLUMNS wide. A column takes the colour of the request that was busy longest in
it, fainter the less of the column was busy; equal neighbours are one shape. So the size is bounded by
tracks x columns, however many spans there are. The closer look draws about MAX_SPANS single spans around the
middle of the run, each with its name. Both are fluid: positions are fractions of the width.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from tessera.ir import Span, Timeline
from tessera.report.kernels import short_name
from tessera.report.page_plan import cut
from tessera.report.tracks import Track, end_us, rows, utilisation
from tessera.report.units import duration, percent

NUM_COLOURS = 8
COLUMNS = 900
LEVELS = 4
MAX_TRACKS = 40
MAX_SPANS = 160
MAX_ROWS = 4
# A name is written into a span that is at least this part of the width.
NAMED_WIDTH = 0.022


def legend() -> str:
    """What the colours mean."""
    chips = "".join(f"<i class='r{n}'></i>" for n in range(NUM_COLOURS))
    return (
        f"<div class='legend'><span><span class='chips'>{chips}</span> one colour a request, "
        f"repeating after {NUM_COLOURS}</span>"
        "<span><i class='r0 t'></i> transfer on a link</span>"
        "<span><i class='r0 faint'></i> busy for part of that time</span></div>"
    )


def overview(timeline: Timeline, found: Sequence[Track]) -> str:
    """The whole run."""
    total = end_us(timeline)
    if not timeline.spans or total <= 0:
        return "<p class='note'>Nothing ran.</p>"
    shown = _shown(found)
    parts = [_track(t, percent(utilisation(t, total)), _columns(t.spans, total)) for t in shown]
    if len(shown) < len(found):
        parts.append(f"<p class='note'>{len(found) - len(shown)} less busy links are not drawn.</p>")
    return f"<div class='timeline'>{''.join(parts)}{_axis(0.0, total)}</div>"


def _shown(found: Sequence[Track]) -> list[Track]:
    """At most MAX_TRACKS: devices before links, then the ones with most spans; in their old order."""
    kept = sorted(found, key=lambda t: (t.is_link, -len(t.spans)))[:MAX_TRACKS]
    return [t for t in found if t in kept]


def _track(track: Track, note: str, body: str) -> str:
    kind = "links" if track.is_link else "devices"
    name = f"<div class='who'><b>{cut(track.name)}</b><small>{escape(note)}</small></div>"
    return f"<div class='row {kind}'>{name}<div class='run'>{body}</div></div>"


def _columns(spans: Sequence[Span], total_us: float) -> str:
    """The track as one path per colour and level."""
    paths: dict[tuple[int, int], list[str]] = defaultdict(list)
    start = 0
    cells = _cells(spans, total_us)
    for column in range(1, COLUMNS + 1):
        if column == COLUMNS or cells[column] != cells[start]:
            shape = f"M{start} 0h{column - start}v1H{start}z"
            paths[cells[start]].append(shape)
            start = column
    drawn = (
        f"<path class='r{colour}' opacity='{level / LEVELS:g}' d='{''.join(shapes)}'/>"
        for (colour, level), shapes in paths.items()
        if level
    )
    return (
        f"<svg viewBox='0 0 {COLUMNS} 1' preserveAspectRatio='none' aria-hidden='true'>{''.join(drawn)}</svg>"
    )


def _cells(spans: Sequence[Span], total_us: float) -> list[tuple[int, int]]:
    """(colour, level) of every column; level 0 is idle."""
    busy: list[dict[int, float]] = [{} for _ in range(COLUMNS)]
    for span in spans:
        left = max(0.0, span.start_us / total_us * COLUMNS)
        right = min(float(COLUMNS), span.stop_us / total_us * COLUMNS)
        colour = span.request % NUM_COLOURS
        for column in range(int(left), min(COLUMNS, math.ceil(right))):
            part = min(right, column + 1) - max(left, column)
            busy[column][colour] = busy[column].get(colour, 0.0) + part
    return [_cell(column) for column in busy]


def _cell(busy: dict[int, float]) -> tuple[int, int]:
    level = math.ceil(min(1.0, sum(busy.values())) * LEVELS - 1e-6)
    return (max(busy, key=lambda colour: busy[colour]), level) if level > 0 else (0, 0)


def closer_look(timeline: Timeline, found: Sequence[Track]) -> str:
    """Single spans around the middle of the run; empty if the run is empty."""
    if not timeline.spans:
        return ""
    start_us, stop_us = _window(timeline)
    if stop_us <= start_us:
        return ""
    parts = []
    for track in _shown(found):
        inside = [s for s in track.spans if s.stop_us > start_us and s.start_us < stop_us]
        body = "".join(_spans(inside[: 2 * MAX_SPANS], start_us, stop_us))
        parts.append(_track(track, f"{len(inside)} spans", body))
    return f"<div class='timeline closer'>{''.join(parts)}{_axis(start_us, stop_us)}</div>"


def _window(timeline: Timeline) -> tuple[float, float]:
    """The span of time that holds about MAX_SPANS spans around the middle one."""
    spans = timeline.spans
    if len(spans) <= MAX_SPANS:
        return spans[0].start_us, max(s.stop_us for s in spans)
    first = (len(spans) - MAX_SPANS) // 2
    return spans[first].start_us, spans[first + MAX_SPANS].start_us


def _spans(spans: Sequence[Span], start_us: float, stop_us: float) -> Iterator[str]:
    width_us = stop_us - start_us
    row_of = rows(spans)
    num = min(MAX_ROWS, max(row_of, default=0) + 1)
    for row, span in zip(row_of, spans, strict=True):
        left = (max(span.start_us, start_us) - start_us) / width_us
        width = (min(span.stop_us, stop_us) - start_us) / width_us - left
        place = f"left:{100 * left:.2f}%;width:{100 * width:.2f}%"
        if num > 1:  # spans in further rows share the last one
            place += f";top:{100 * min(row, num - 1) / num:.0f}%;height:{100 / num:.0f}%"
        name = short_name(span.label)
        took = duration(span.stop_us - span.start_us)
        about = f"{span.label}, request {span.request}, microbatch {span.slot}, {took}"
        text = cut(name, 24) if width >= NAMED_WIDTH and not span.is_transfer else ""
        style = f"r{span.request % NUM_COLOURS}" + (" t" if span.is_transfer else "")
        yield f'<i class="{style}" style="{place}" title="{cut(about, 140)}">{text}</i>'


def _axis(start_us: float, stop_us: float) -> str:
    """Round times below the tracks, about four to eight of them."""
    width_us = stop_us - start_us
    step = 10.0 ** math.floor(math.log10(width_us / 4))
    step *= next((k for k in (5, 2) if width_us / (step * k) >= 4), 1)
    unit, name = _unit(stop_us)
    places = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    # The last twentieth is left free: a number there would stick out.
    first, last = math.ceil(start_us / step - 1e-9), math.floor((stop_us - 0.05 * width_us) / step + 1e-9)
    times = (n * step for n in range(first, last + 1))
    marks = "".join(
        f"<span style='left:{100 * (us - start_us) / width_us:.2f}%'>{us / unit:,.{places}f}</span>"
        for us in times
    )
    who = f"<div class='who'><small>time, {name}</small></div>"
    return f"<div class='row axis'>{who}<div class='run'>{marks}</div></div>"


def _unit(us: float) -> tuple[float, str]:
    return (1.0, "us") if us < 1e4 else (1e3, "ms") if us < 1e7 else (1e6, "s")
