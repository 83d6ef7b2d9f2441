"""Self-contained HTML pages of a plan, a folder of plans, and advice: no network, no script, light and dark.

Every figure states whether it is modelled, simulated or measured. A page stays below two megabytes: each
track has COLUMNS columns, in the colour of the busiest request, with opacity by busy share; the dependency
graph has the first MAX_LAUNCHES of a layer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from tessera.ir import Graph, Hazard, Plan, Span, Timeline, units
from tessera.ir.files import write_whole
from tessera.plan import explain
from tessera.report import figures
from tessera.report.picture import Picture, layer_of, layer_picture

FILTERS = ("digits", "duration", "percent", "plural", "rate", "ratio", "size")
MAX_LINKS, MAX_STEPS, MAX_LANES, MAX_TEXT = 24, 4, 12, 60
# Longer parts of a dotted name are broken.
MAX_UNBROKEN = 12
NUM_COLOURS = 8
COLUMNS = 900
LEVELS = 4
MAX_TRACKS = 40
MAX_LAUNCHES = 64
LINE_PX, WIDTH_PX = 22, 88


def write_report(folder: Path, plans: Sequence[tuple[str, Plan, Timeline]], path: Path) -> None:
    ordered = sorted(plans, key=lambda named: -(figures.best_baseline(named[1]) or ("", 0.0))[1])
    parts = [(name, plan_part(plan, timeline)) for name, plan, timeline in ordered]
    render(path, "folder.html", title=folder.resolve().name, plans=parts)


def write_advice(
    path: str | Path, advice: object, answer: Sequence[str], plan: Plan | None, remarks: Sequence[str]
) -> None:
    pictures = layers(plan) if plan is not None else ()
    render(path, "advice.html", advice=advice, answer=answer, layers=pictures, remarks=remarks)


def render(path: str | Path, template: str, **values: Any) -> None:
    write_whole(path, [_environment().get_template(template).render(values).encode()])


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tessera.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(units, name) for name in FILTERS}
    environment.filters |= {"breakable": breakable, "cut": cut}
    environment.filters["step_title"] = figures.step_title
    return environment


def cut(text: str, limit: int = MAX_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def breakable(name: str) -> Markup:
    """May break after dots and, in long parts, underscores."""
    parts = (Markup.escape(part) for part in name.split("."))
    wrapped = (part if len(part) <= MAX_UNBROKEN else part.replace("_", Markup("_<wbr>")) for part in parts)
    return Markup(".<wbr>").join(wrapped)


def plan_part(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    tracks, run_us = figures.tracks(timeline, plan.cluster.names), figures.end_us(timeline)
    busy = figures.utilisation(timeline)
    links = [(busy.get(track.name, 0.0), track) for track in tracks if track.is_link]
    return {
        "plan": plan,
        "model": plan.unit.graphs[0].trace.step.model,
        "verdict": explain(plan).verdict,
        "headline": figures.headline(plan),
        "best": figures.best_baseline(plan),
        "comparison": figures.compared(plan),
        "timeline": timeline,
        "run_us": run_us,
        "devices": figures.device_uses(plan, timeline),
        "links": sorted(links, key=lambda x: -x[0]),
        "wires": {f"{link.src} -> {link.dst}": link for link in plan.cluster.links},
        "max_links": MAX_LINKS,
        "num_colours": NUM_COLOURS,
        "overview": _overview(timeline, tracks, busy),
        "layers": layers(plan),
        "dependencies": _dependencies(plan),
        "lanes": sorted(enumerate(figures.shares(plan)), key=lambda lane: -lane[1])[:MAX_LANES],
        "max_steps": MAX_STEPS,
        "num_hidden_lanes": len(plan.lanes) - MAX_LANES,
    }


def layers(plan: Plan) -> list[Picture]:
    lane = figures.main_lane(plan)
    return [layer_picture(plan, lane, step) for step in range(min(MAX_STEPS, len(plan.unit.graphs)))]


def _overview(
    timeline: Timeline, tracks: Sequence[figures.Track], busy: dict[str, float]
) -> dict[str, Any] | None:
    """Devices, then the links with most spans."""
    total = figures.end_us(timeline)
    if not timeline.spans or total <= 0:
        return None
    kept = sorted(tracks, key=lambda t: (t.is_link, -len(t.spans)))[:MAX_TRACKS]
    drawn = [
        {
            "name": track.name,
            "is_link": track.is_link,
            "note": units.percent(busy.get(track.name, 0.0)),
            "paths": _columns(track.spans, total),
        }
        for track in tracks
        if track in kept
    ]
    unit, marks = _axis(total)
    hidden = len(tracks) - len(drawn)
    return {"tracks": drawn, "unit": unit, "marks": marks, "num_hidden": hidden, "columns": COLUMNS}


def _columns(spans: Sequence[Span], total_us: float) -> list[tuple[int, str, str]]:
    paths: dict[tuple[int, int], list[str]] = defaultdict(list)
    start = 0
    cells = _cells(spans, total_us)
    for column in range(1, COLUMNS + 1):
        if column == COLUMNS or cells[column] != cells[start]:
            paths[cells[start]].append(f"M{start} 0h{column - start}v1H{start}z")
            start = column
    return [
        (colour, f"{level / LEVELS:g}", "".join(shapes)) for (colour, level), shapes in paths.items() if level
    ]


def _cells(spans: Sequence[Span], total_us: float) -> list[tuple[int, int]]:
    """(colour, level) of every column; level 0 is idle."""
    busy, edges = np.zeros((NUM_COLOURS, COLUMNS)), np.arange(COLUMNS + 1)
    for span in spans:
        left, right = (us / total_us * COLUMNS for us in (span.start_us, span.stop_us))
        columns = slice(max(0, int(left)), max(0, math.ceil(right)))
        parts = np.minimum(right, edges[1:][columns]) - np.maximum(left, edges[:-1][columns])
        busy[span.request % NUM_COLOURS, columns] += parts
    levels = np.ceil(np.minimum(1.0, busy.sum(axis=0)) * LEVELS - 1e-6).astype(int)
    return list(zip(busy.argmax(axis=0).tolist(), levels.tolist(), strict=True))


def _axis(total_us: float) -> tuple[str, list[tuple[str, str]]]:
    """The unit, and marks as (position in percent, number)."""
    step = 10.0 ** math.floor(math.log10(total_us / 4))
    step *= next((k for k in (5, 2) if total_us / (step * k) >= 4), 1)
    unit, name = (1.0, "us") if total_us < 1e4 else (1e3, "ms") if total_us < 1e7 else (1e6, "s")
    places = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    # A number in the last twentieth would stick out.
    times = (n * step for n in range(math.floor(0.95 * total_us / step + 1e-9) + 1))
    return name, [(f"{100 * us / total_us:.2f}", f"{us / unit:,.{places}f}") for us in times]


def _dependencies(plan: Plan) -> list[dict[str, Any]]:
    lane = plan.lanes[figures.main_lane(plan)]
    steps = list(zip(plan.graphs, lane.placement.devices, strict=True))[:MAX_STEPS]
    return [_figure(graph, devices) for graph, devices in steps]


def _figure(graph: Graph, devices: tuple[int, ...]) -> dict[str, Any]:
    trace, layer = graph.trace, layer_of(graph.trace)
    launches = layer.launches if layer else tuple(range(len(trace.launches)))
    shown, scope = launches[:MAX_LAUNCHES], layer.scope if layer else ""
    inside = [trace.launches[launch].scope.removeprefix(scope).lstrip(".") for launch in shown]
    names = [figures.short_name(trace.kernel_of(launch).name) for launch in shown]
    return {
        "step": trace.step,
        "scope": scope,
        "num_launches": len(launches),
        "num_outside": sum(e.dst in set(shown) and e.src not in set(shown) for e in graph.edges),
        "width": WIDTH_PX,
        "height": LINE_PX * len(shown),
        "arcs": list(_arcs(graph, shown, devices)),
        "lines": list(zip((devices[launch] for launch in shown), names, inside, strict=True)),
    }


def _arcs(graph: Graph, shown: tuple[int, ...], devices: tuple[int, ...]) -> Iterator[tuple[str, str]]:
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
        yield style, curve
