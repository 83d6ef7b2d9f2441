"""The dependency graph of one layer as HTML: a line a launch, arcs to the launches that wait for it.

An arc's bow grows with its length, so that near and far ones can be told apart; arcs that only say "memory is
used again" are dashed. What is drawn is bounded: of a layer with more launches, the first MAX_LAUNCHES.
"""

import math
from collections.abc import Iterator
from html import escape

from tessera.ir import Graph, Hazard, Plan
from tessera.report.figures import main_lane, step_title
from tessera.report.kernels import short_name
from tessera.report.page_plan import MAX_STEPS, cut, device_class
from tessera.report.picture import layer_of
from tessera.report.units import plural

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
