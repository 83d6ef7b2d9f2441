"""One self-contained HTML page about plans and runs of them: no network, no script, light and dark.

The page states for every figure whether it was modelled, simulated or measured. All text from records is
escaped. What is drawn is bounded, so that a page of any run stays below two megabytes: see page_timeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from tessera.ir import Objective, Plan, Timeline
from tessera.report.dependencies import dependencies
from tessera.report.figures import gain, headline
from tessera.report.output import write_text
from tessera.report.page_plan import comparison, devices, lanes, layers
from tessera.report.page_timeline import closer_look, legend, overview
from tessera.report.tracks import end_us, tracks
from tessera.report.units import digits, duration, percent, plural, rate, ratio


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
    write_text(path, [text])


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
        source=f"simulated with {plan.slots} in flight, on modelled costs",
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
