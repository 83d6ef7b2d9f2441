"""The parts of the page that show the plan: comparison, devices, lanes, one layer. Each returns HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tessera.ir import Plan, Timeline
from tessera.report.figures import gain, launches_on, main_lane, shares, step_us, weight_bytes
from tessera.report.picture import Picture, Row, picture
from tessera.report.tracks import Track, end_us, utilisation
from tessera.report.units import duration, percent, rate, ratio, size

NUM_DEVICE_COLOURS = 6
# More would not be read, and each costs bytes.
MAX_LINKS, MAX_STEPS, MAX_LANES, MAX_TEXT = 24, 4, 12, 60


def device_class(device: int) -> str:
    """The class that gives a device its colour."""
    return f"d{device % NUM_DEVICE_COLOURS}"


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Text escaped, shortened to a limit."""
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


@dataclass(frozen=True, slots=True)
class Bar:
    """One policy in the comparison."""

    name: str
    how: str
    per_s: float | None
    latency_us: float | None
    style: str = ""
    # How many times as good as the best baseline.
    factor: float | None = None


def comparison(plan: Plan) -> str:
    """Bars of throughput: the plan, every baseline simulated alike, and the bound."""
    bars = list(_bars(plan))
    top = max(bar.per_s or 0.0 for bar in bars) or 1.0
    return "\n".join(_bar(bar, top) for bar in bars)


def _bars(plan: Plan) -> Iterator[Bar]:
    how = f"simulated, {plan.slots} in flight"
    own = plan.simulated_per_s
    factor = gain(plan, plan)
    yield Bar(f"{plan.policy} (this plan)", how, own, plan.latency_us, "own", factor)
    yield Bar("the same", "by busy time alone", plan.throughput_per_s, None, "own soft")
    for b in sorted(plan.baselines, key=lambda b: -(b.throughput_per_s or 0.0)):
        yield Bar(b.name, "simulated", b.throughput_per_s, b.latency_us, factor=gain(plan, b))
    yield Bar("upper bound", "of any mix, modelled", plan.bound_per_s, None, "bound")


def _bar(bar: Bar, top: float) -> str:
    name = f"<div class='name'>{cut(bar.name)} <small>{escape(bar.how)}</small></div>"
    width = 100 * (bar.per_s or 0.0) / top
    against = f" <em>{ratio(bar.factor)}</em>" if bar.factor is not None else ""
    wait = f"<small>{duration(bar.latency_us)} alone</small>" if bar.latency_us is not None else ""
    number = f"<b>{rate(bar.per_s)}</b>" if bar.per_s is not None else "<small>does not apply</small>"
    return (
        f"<div class='bar {bar.style}'>{name}<div class='track'><i style='width:{width:.2f}%'></i></div>"
        f"<div class='value'>{number}{against}{wait}</div></div>"
    )


def devices(plan: Plan, timeline: Timeline, found: Sequence[Track]) -> str:
    """Utilisation bars of devices, then of links."""
    placed, weights = launches_on(plan), weight_bytes(plan)
    run_us = end_us(timeline)
    busy = {track.name: utilisation(track, run_us) for track in found}
    parts = []
    for index, device in enumerate(plan.cluster.devices):
        facts = f"{placed[index]:,.0f} launches, {size(weights[index])} weights"
        parts.append(_usage(device.name, device.gpu or "CPU", busy[device.name], device_class(index), facts))
    kinds = {f"{link.src} -> {link.dst}": link for link in plan.cluster.links}
    links = sorted((t for t in found if t.is_link), key=lambda t: -busy[t.name])
    for track in links[:MAX_LINKS]:
        wire = kinds.get(track.name)
        kind = f"{wire.name}, {wire.gbps:g} GB/s" if wire else "link"
        parts.append(_usage(track.name, kind, busy[track.name], "link", f"{len(track.spans):,} transfers"))
    if len(links) > MAX_LINKS:
        parts.append(f"<p class='note'>{len(links) - MAX_LINKS} less busy links are not listed.</p>")
    return "\n".join(parts)


def _usage(name: str, kind: str, busy: float, style: str, facts: str) -> str:
    return (
        f"<div class='bar {style}'><div class='name'>{cut(name)} <small>{cut(kind)}</small></div>"
        f"<div class='track'><i style='width:{100 * min(1.0, busy):.2f}%'></i></div>"
        f"<div class='value'><b>{percent(busy)}</b><small>{escape(facts)}</small></div></div>"
    )


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
    shown = picture(plan, lane, step)
    columns = f"minmax(6.5rem,1.3fr) repeat({len(shown.devices)},minmax(5.5rem,1.5fr)) minmax(3.6rem,auto)"
    names = [f"<b class='{device_class(d)}'>{cut(plan.cluster.names[d])}</b>" for d in shown.devices]
    head = f"<div class='head'><span>sub-module</span>{''.join(names)}<span class='time'>time</span></div>"
    body = "".join(_layer_rows(shown))
    busy = (
        f"{plan.cluster.names[d]} {duration(us)}" for d, us in zip(shown.devices, shown.us, strict=True) if us
    )
    leaving = (
        f"{size(c.num_bytes)} leave {plan.cluster.names[c.src]} for {plan.cluster.names[c.dst]}"
        for c in shown.leaving
    )
    about = f"<p class='note'>{escape(shown.subject)}; {escape(shown.lane)}</p>"
    return (
        f"<figure class='layer'><h3>{escape(shown.step)}</h3>"
        f"{about}<div class='scroll'><div class='grid' style='--columns:{columns}'>{head}{body}</div></div>"
        f"<figcaption>{escape('; '.join([*busy, *leaving]))}</figcaption></figure>"
    )


def _layer_rows(shown: Picture) -> Iterator[str]:
    previous = ""
    for number, row in enumerate(shown.rows):
        if number == shown.hidden_after and shown.num_hidden:
            yield f"<div class='gap'>… {shown.num_hidden:,} launches between …</div>"
        module = "" if row.module == previous else row.module
        previous = row.module
        cells = "".join(_cell(row, device) for device in shown.devices)
        time = f"<span class='time'>{duration(row.us)}</span>"
        yield f"<div class='line'><span>{_breakable(module)}</span>{cells}{time}</div>"


def _breakable(name: str) -> str:
    """A dotted name that a narrow screen may break after dots and, in long parts, after underscores."""
    parts = cut(name).split(".")
    return ".<wbr>".join(part if len(part) <= 12 else part.replace("_", "_<wbr>") for part in parts)


def _cell(row: Row, device: int) -> str:
    if device == row.device:
        return f'<span class="block {device_class(device)}" title="{cut(row.text)}">{cut(row.text)}</span>'
    crossing = next((c for c in row.arrivals if c.src == device), None)
    if crossing is not None:
        way = "right" if crossing.src < crossing.dst else "left"
        return f"<span class='wire {way} {device_class(device)}'><u>{size(crossing.num_bytes)}</u></span>"
    passing = any(min(c.src, row.device) < device < max(c.src, row.device) for c in row.arrivals)
    return "<span class='wire pass'></span>" if passing else "<span></span>"
