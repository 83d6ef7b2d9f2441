"""One self-contained HTML page about a plan and a run of it: no network, no script, light and dark.

The page states for every figure whether it was modelled, simulated or measured. All text from records is
escaped. What is drawn is bounded, so that a page of any run stays below two megabytes: see page_timeline.
"""

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from tessera.ir import Objective, Plan, Timeline
from tessera.report.figures import gain
from tessera.report.output import write_text
from tessera.report.page_plan import comparison, devices, lanes, layers
from tessera.report.page_timeline import closer_look, legend, overview
from tessera.report.tracks import end_us, tracks
from tessera.report.units import duration, percent, plural, rate, ratio


def write_page(plan: Plan, timeline: Timeline, path: str | Path, verdict: str) -> None:
    """Writes the page; it opens in any browser, without a server. The planner's verdict heads it."""
    template = files("tessera.report").joinpath("timeline_page.html").read_text(encoding="utf-8")
    found = tracks(timeline, plan.cluster.names)
    first = plan.unit.graphs[0].trace.step
    text = Template(template).substitute(
        title=escape(f"{first.model}, {plan.policy} plan"),
        model=escape(first.model),
        subtitle=escape(_subtitle(plan)),
        verdict=escape(verdict),
        tiles=_tiles(plan, timeline),
        comparison=comparison(plan),
        devices=devices(plan, timeline, found),
        clock=escape(timeline.clock.value),
        run=escape(_run(timeline)),
        overview=overview(timeline, found),
        closer=closer_look(timeline, found),
        legend=legend(),
        layers=layers(plan),
        lanes=lanes(plan),
    )
    write_text(path, [text])


def _subtitle(plan: Plan) -> str:
    steps = zip(plan.unit.counts, plan.unit.graphs, strict=True)
    unit = " + ".join(f"{count} {graph.trace.step.kind}" for count, graph in steps)
    return f"{plan.policy} plan on {', '.join(plan.cluster.names)}; one request is {unit}"


def _run(timeline: Timeline) -> str:
    spans = plural(len(timeline.spans), "span")
    requests = plural(len(timeline.requests), "request")
    return f"{requests} in {duration(end_us(timeline))}, {spans}, {timeline.clock.value}"


def _tiles(plan: Plan, timeline: Timeline) -> str:
    total = end_us(timeline)
    reached = len(timeline.requests) / total * 1e6 if total > 0 else 0.0
    factor = gain(plan, plan)
    against = "lower latency" if plan.objective is Objective.LATENCY else "throughput"
    values = [
        ("throughput", rate(plan.throughput_per_s), "requests by busy time, modelled"),
        (f"with {plan.slots} in flight", rate(plan.simulated_per_s), "requests, simulated"),
        ("against best baseline", "" if factor is None else ratio(factor), f"{against}, modelled"),
        ("below the bound", percent(plan.gap), f"bound {rate(plan.bound_per_s)}, modelled"),
        ("latency, one alone", duration(plan.latency_us), "modelled"),
        ("in this run", rate(reached), f"requests, {timeline.clock.value}"),
    ]
    return _joined(
        f"<div class='tile'><span>{escape(name)}</span><b>{escape(value)}</b>"
        f"<small>{escape(note)}</small></div>"
        for name, value, note in values
        if value
    )


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(parts)
