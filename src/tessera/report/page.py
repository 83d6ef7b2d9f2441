"""One self-contained HTML page about plans and runs of them: no network, no script, light and dark.

The page states for every figure whether it was modelled, simulated or measured. All text from records is
escaped. What is drawn is bounded, so that a page of any run stays below two megabytes.

Parts, each of which returns HTML: comparison, devices, lanes, one layer; the timeline, the whole run as a
picture of columns and a closer look at its middle; the dependency graph of one layer.

The whole run: every track is COLUMNS wide. A column takes the colour of the request that was busy longest in
it, fainter the less of the column was busy; equal neighbours are one shape. So the size is bounded by tracks
x columns, however many spans there are. The closer look draws about MAX_SPANS single spans around the middle
of the run, each with its name. Both are fluid: positions are fractions of the width.

The graph has a line for every launch and arcs to the launches that wait for it. An arc's bow grows with its
length, so that near and far ones can be told apart; arcs that only say "memory is used again" are dashed.
What is drawn is bounded: of a layer with more launches, the first MAX_LAUNCHES.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from tessera.ir import Graph, Hazard, Objective, Plan, Span, Timeline
from tessera.ir.files import write_whole
from tessera.report.figures import (
    Track,
    digits,
    duration,
    end_us,
    gain,
    headline,
    launches_on,
    main_lane,
    percent,
    plural,
    rate,
    ratio,
    rows,
    shares,
    short_name,
    size,
    step_title,
    step_us,
    tracks,
    utilisation,
    weight_bytes,
)
from tessera.report.picture import Picture, Row, layer_of, layer_picture


@dataclass(frozen=True, slots=True)
class Shown:
    """A plan, a run of it, and the planner's verdict."""

    plan: Plan
    timeline: Timeline
    verdict: str


def write_page(plan: Plan, timeline: Timeline, path: str | Path, verdict: str) -> None:
    """Writes the page of one plan; it opens in any browser, without a server."""
    step = plan.unit.graphs[0].trace.step
    body = plan_part(Shown(plan, timeline, verdict), "1")
    clock = f"The timeline is {timeline.clock.value}; figures of the plan are modelled."
    write_shell(path, f"{step.model}, {plan.policy} plan", body, clock)


def write_shell(path: str | Path, title: str, body: str, remark: str) -> None:
    """One self-contained file around a body of HTML."""
    text = Template(_template("page.html")).substitute(
        title=escape(title), body=body, footer=escape(f"Written by Tessera. {remark}")
    )
    write_whole(path, [text.encode()])


def plan_part(shown: Shown, level: str) -> str:
    """Everything about one plan, under a heading of a level."""
    plan, timeline = shown.plan, shown.timeline
    found = tracks(timeline, plan.cluster.names)
    return Template(_template("plan.html")).substitute(
        level=level,
        model=escape(plan.unit.graphs[0].trace.step.model),
        subtitle=escape(_subtitle(plan)),
        verdict=escape(shown.verdict),
        headline=escape(headline_text(plan)),
        source=f"simulated with {plan.microbatches} in flight, on modelled costs",
        tiles=_tiles(plan, timeline),
        comparison=comparison(plan),
        devices=devices(plan, timeline, found),
        clock=escape(timeline.clock.value),
        run=escape(_run(timeline)),
        overview=overview(timeline, found),
        closer=closer_look(timeline, found),
        legend=legend(),
        layers=layers(plan),
        dependencies=dependencies(plan),
        lanes=lanes(plan),
    )


def headline_text(plan: Plan) -> str:
    """One rate."""
    per_s, what = headline(plan)
    return f"{digits(per_s)} {what}/s"


def _template(name: str) -> str:
    return files("tessera.report").joinpath(name).read_text(encoding="utf-8")


def _subtitle(plan: Plan) -> str:
    steps = zip(plan.unit.counts, plan.unit.graphs, strict=True)
    unit = " + ".join(f"{count} {graph.trace.step.kind}" for count, graph in steps)
    batches = ", ".join(str(variant.batch) for variant in plan.every_variant)
    others = (
        f"; lanes of batch {batches}, rates count requests of batch {plan.batch}" if plan.variants else ""
    )
    return f"{plan.policy} plan on {', '.join(plan.cluster.names)}; one request is {unit}{others}"


def _run(timeline: Timeline) -> str:
    spans = plural(len(timeline.spans), "span")
    requests = plural(len(timeline.requests), "request")
    return f"{requests} in {duration(end_us(timeline))}, {spans}, {timeline.clock.value}"


def _tiles(plan: Plan, timeline: Timeline) -> str:
    total = end_us(timeline)
    num = sum(timeline.weights) if timeline.weights else len(timeline.requests)
    reached = num / total * 1e6 if total > 0 else 0.0
    factor = gain(plan, plan)
    against = "lower latency" if plan.objective is Objective.LATENCY else "throughput"
    values = [
        ("throughput", rate(plan.throughput_per_s), "requests by busy time, modelled"),
        (f"with {plan.microbatches} in flight", rate(plan.simulated_per_s), "requests, simulated"),
        ("against best baseline", "" if factor is None else ratio(factor), f"{against}, modelled"),
        ("below the bound", percent(plan.gap), f"bound {rate(plan.bound_per_s)}, modelled"),
        ("latency, one alone", duration(plan.latency_us), "modelled"),
        ("in this run", rate(reached), f"requests, {timeline.clock.value}"),
    ]
    return "\n".join(
        f"<div class='tile'><span>{escape(name)}</span><b>{escape(value)}</b>"
        f"<small>{escape(note)}</small></div>"
        for name, value, note in values
        if value
    )


NUM_DEVICE_COLOURS = 6
# More would not be read, and each costs bytes.
MAX_LINKS, MAX_STEPS, MAX_LANES, MAX_TEXT = 24, 4, 12, 60


def device_class(device: int) -> str:
    """The class that gives a device its colour."""
    return f"d{device % NUM_DEVICE_COLOURS}"


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Text escaped, shortened to a limit."""
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


def bar(name: str, about: str, share: float, value: str, style: str = "") -> str:
    """What it is of, how long it is, and what it says, in HTML."""
    return (
        f"<div class='bar {style}'><div class='name'>{cut(name)} <small>{cut(about)}</small></div>"
        f"<div class='track'><i style='width:{100 * share:.2f}%'></i></div>"
        f"<div class='value'>{value}</div></div>"
    )


def comparison(plan: Plan) -> str:
    """Bars of throughput: the plan, every baseline simulated alike, and the bound."""
    baselines = sorted(plan.baselines, key=lambda b: -(b.throughput_per_s or 0.0))
    how, own = f"simulated, {plan.microbatches} in flight", gain(plan, plan)
    # (name, how its rate is known, rate, latency, how many times as good as the best baseline, style)
    shown = [
        (f"{plan.policy} (this plan)", how, plan.simulated_per_s, plan.latency_us, own, "own"),
        ("the same", "by busy time alone", plan.throughput_per_s, None, None, "own soft"),
        *((b.name, "simulated", b.throughput_per_s, b.latency_us, gain(plan, b), "") for b in baselines),
        ("upper bound", "of any mix, modelled", plan.bound_per_s, None, None, "bound"),
    ]
    top = max(per_s or 0.0 for _, _, per_s, *_ in shown) or 1.0
    return "\n".join(
        bar(name, how, (per_s or 0.0) / top, _rates(per_s, latency_us, factor), style)
        for name, how, per_s, latency_us, factor, style in shown
    )


def _rates(per_s: float | None, latency_us: float | None, factor: float | None) -> str:
    number = f"<b>{rate(per_s)}</b>" if per_s is not None else "<small>does not apply</small>"
    against = f" <em>{ratio(factor)}</em>" if factor is not None else ""
    return (
        number + against + (f"<small>{duration(latency_us)} alone</small>" if latency_us is not None else "")
    )


def devices(plan: Plan, timeline: Timeline, found: Sequence[Track]) -> str:
    """Utilisation bars of devices, then of links."""
    placed, weights = launches_on(plan), weight_bytes(plan)
    run_us = end_us(timeline)
    busy = {track.name: utilisation(track, run_us) for track in found}
    parts = []
    for index, device in enumerate(plan.cluster.devices):
        facts = f"{placed[index]:,.0f} launches, {size(weights[index])} weights"
        parts.append(_usage(device.name, device.gpu or "CPU", busy[device.name], facts, device_class(index)))
    kinds = {f"{link.src} -> {link.dst}": link for link in plan.cluster.links}
    links = sorted((t for t in found if t.is_link), key=lambda t: -busy[t.name])
    for track in links[:MAX_LINKS]:
        wire = kinds.get(track.name)
        kind = f"{wire.name}, {wire.gbps:g} GB/s" if wire else "link"
        parts.append(_usage(track.name, kind, busy[track.name], f"{len(track.spans):,} transfers", "link"))
    if len(links) > MAX_LINKS:
        parts.append(f"<p class='note'>{len(links) - MAX_LINKS} less busy links are not listed.</p>")
    return "\n".join(parts)


def _usage(name: str, kind: str, busy: float, facts: str, style: str) -> str:
    value = f"<b>{percent(busy)}</b><small>{escape(facts)}</small>"
    return bar(name, kind, min(1.0, busy), value, style)


def lanes(plan: Plan) -> str:
    """Each lane's share and rate, and how it divides each step's time among the devices."""
    found = shares(plan)
    order = sorted(range(len(found)), key=lambda n: -found[n])
    parts = [_lane(plan, number) for number in order[:MAX_LANES]]
    if len(order) > MAX_LANES:
        parts.append(f"<p class='note'>{len(order) - MAX_LANES} smaller lanes are not listed.</p>")
    return "\n".join(parts)


def _lane(plan: Plan, number: int) -> str:
    lane = plan.lanes[number]
    batch = f", batch {plan.batch_of(lane)}" if plan.variants else ""
    about = f"{percent(shares(plan)[number])} of the work, {rate(lane.rate_per_s)}{batch}"
    head = f"<div class='lane'><h3>Lane {number} <small>{about}</small></h3>"
    steps = []
    for step, graph in list(enumerate(plan.unit_of(lane).graphs))[:MAX_STEPS]:
        times = step_us(plan, lane, step)
        steps.append(
            f"<div class='split'><div class='name'>{cut(graph.trace.step.kind)}</div>"
            f"<div class='track'>{''.join(_pieces(plan, times))}</div>"
            f"<div class='value'><small>{duration(sum(times))} busy</small></div></div>"
        )
    return f"{head}{''.join(steps)}</div>"


def _pieces(plan: Plan, times: tuple[float, ...]) -> Iterator[str]:
    total = sum(times) or 1.0
    for device, us in enumerate(times):
        if us > 0:
            name = escape(plan.cluster.names[device], quote=True)
            width, about = f"{100 * us / total:.2f}%", f"{name}: {duration(us)}"
            text = percent(us / total) if us / total > 0.12 else ""
            yield f'<i class="{device_class(device)}" style="width:{width}" title="{about}">{text}</i>'


def layers(plan: Plan) -> str:
    """The placement of one layer of every step, along the lane that most work follows."""
    lane = main_lane(plan)
    return "\n".join(_layer(plan, lane, step) for step in range(min(MAX_STEPS, len(plan.unit.graphs))))


def _layer(plan: Plan, lane: int, step: int) -> str:
    shown = layer_picture(plan, lane, step)
    columns = f"minmax(6.5rem,1.3fr) repeat({len(shown.devices)},minmax(5.5rem,1.5fr)) minmax(3.6rem,auto)"
    names = [f"<b class='{device_class(d)}'>{cut(plan.cluster.names[d])}</b>" for d in shown.devices]
    head = f"<div class='head'><span>sub-module</span>{''.join(names)}<span class='time'>time</span></div>"
    body = "".join(_layer_rows(shown))
    about = f"<p class='note'>{escape(shown.subject)}; {escape(shown.lane)}</p>"
    return (
        f"<figure class='layer'><h3>{escape(shown.step)}</h3>"
        f"{about}<div class='scroll'><div class='grid' style='--columns:{columns}'>{head}{body}</div></div>"
        f"<figcaption>{escape(shown.summary)}</figcaption></figure>"
    )


def _layer_rows(shown: Picture) -> Iterator[str]:
    for module, row in shown.lines():
        if row is None:
            yield f"<div class='gap'>… {module} …</div>"
            continue
        cells = "".join(_layer_cell(row, device) for device in shown.devices)
        time = f"<span class='time'>{duration(row.us)}</span>"
        yield f"<div class='line'><span>{_breakable(module)}</span>{cells}{time}</div>"


def _breakable(name: str) -> str:
    """A dotted name that a narrow screen may break after dots and, in long parts, after underscores."""
    parts = cut(name).split(".")
    return ".<wbr>".join(part if len(part) <= 12 else part.replace("_", "_<wbr>") for part in parts)


def _layer_cell(row: Row, device: int) -> str:
    if device == row.device:
        return f'<span class="block {device_class(device)}" title="{cut(row.text)}">{cut(row.text)}</span>'
    crossing = row.arrow_from(device)
    if crossing is not None:
        way = "right" if crossing.src < crossing.dst else "left"
        return f"<span class='wire {way} {device_class(device)}'><u>{size(crossing.num_bytes)}</u></span>"
    return "<span class='wire pass'></span>" if row.is_passed(device) else "<span></span>"


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
    return [_column(column) for column in busy]


def _column(busy: dict[int, float]) -> tuple[int, int]:
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
        about = f"{span.label}, request {span.request}, microbatch {span.microbatch}, {took}"
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


MAX_LAUNCHES = 64
LINE_PX, WIDTH_PX = 22, 88


def dependencies(plan: Plan) -> str:
    """One figure a step, placed along the lane that most work follows."""
    lane = plan.lanes[main_lane(plan)]
    steps = list(enumerate(plan.unit_of(lane).graphs))[:MAX_STEPS]
    return "\n".join(_figure(graph, lane.placement.devices[step]) for step, graph in steps)


def _figure(graph: Graph, devices: tuple[int, ...]) -> str:
    layer = layer_of(graph.trace)
    launches = layer.launches if layer else tuple(range(len(graph.trace.launches)))
    shown = launches[:MAX_LAUNCHES]
    subject = layer.scope if layer else "the whole step"
    about = [f"{subject}: {len(launches):,} launches"]
    outside = sum(e.dst in set(shown) and e.src not in set(shown) for e in graph.edges)
    about.append(f"{plural(outside, 'wait')} for launches before it")
    if len(shown) < len(launches):
        about.append(f"the first {len(shown)} are drawn")
    height = LINE_PX * len(shown)
    lines = "".join(_line(graph, launch, devices[launch], layer.scope if layer else "") for launch in shown)
    arcs = "".join(_arcs(graph, shown, devices))
    return (
        f"<figure class='layer'><h3>{escape(step_title(graph.trace.step))}</h3>"
        f"<p class='note'>{escape('; '.join(about))}</p><div class='deps'>"
        f"<svg viewBox='0 0 {WIDTH_PX} {height}' height='{height}' preserveAspectRatio='none' "
        f"role='img' aria-label='dependencies'>{arcs}</svg><ol>{lines}</ol></div></figure>"
    )


def _line(graph: Graph, launch: int, device: int, scope: str) -> str:
    name = short_name(graph.trace.kernel_of(launch).name)
    module = graph.trace.launches[launch].scope
    inside = module[len(scope) :].lstrip(".") if scope and module.startswith(scope) else module
    block = f"<span class='block {device_class(device)}'>{cut(name, 40)}</span>"
    return f"<li>{block}<small>{cut(inside)}</small></li>"


def _arcs(graph: Graph, shown: tuple[int, ...], devices: tuple[int, ...]) -> Iterator[str]:
    place = {launch: number for number, launch in enumerate(shown)}
    longest = max(1, len(shown) - 1)
    for edge in graph.edges:
        if edge.src not in place or edge.dst not in place:
            continue
        top, bottom = ((place[x] + 0.5) * LINE_PX for x in (edge.src, edge.dst))
        reach = math.sqrt((place[edge.dst] - place[edge.src]) / longest)
        bow = WIDTH_PX * (1.0 - 0.25 - 1.05 * reach)
        crosses = devices[edge.src] != devices[edge.dst]
        style = "other" if edge.hazard is not Hazard.RAW else "cross" if crosses else ""
        end = WIDTH_PX - 4
        curve = f"M{end} {top:g}C{bow:.1f} {top:g} {bow:.1f} {bottom:g} {end} {bottom:g}"
        yield f"<path class='{style}' d='{curve}'/>"
