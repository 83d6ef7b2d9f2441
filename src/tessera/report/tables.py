"""Terminal tables. Figures are modelled unless the title names a clock."""

from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from tessera.ir import Objective, Plan, Timeline
from tessera.report.figures import (
    best_baseline,
    duration,
    end_us,
    gain,
    launches_on,
    modelled_utilisation,
    percent,
    rate,
    ratio,
    size,
    tracks,
    utilisation,
    weight_bytes,
)
from tessera.report.picture import device_colour

BAR_WIDTH = 16
NOT_APPLICABLE = "n/a"
WORDS = {
    Objective.THROUGHPUT: "throughput",
    Objective.LATENCY: "latency",
    Objective.COST: "work per dollar",
    Objective.ENERGY: "work per joule",
}


def _number(header: str) -> Column:
    return Column(header, justify="right")


def devices_table(plan: Plan, timeline: Timeline | None = None) -> Table:
    """Devices with their launches and utilisation, from the timeline or the plan's rates."""
    clock = timeline.clock.value if timeline else "modelled"
    launches, held = _number("launches / request"), _number("weights")
    table = Table("device", "GPU", launches, "utilisation", _number(""), held, title_justify="left")
    table.title = f"Devices (utilisation {clock})"
    busy = _utilisation(plan, timeline)
    placed, weights = launches_on(plan), weight_bytes(plan)
    for index, device in enumerate(plan.cluster.devices):
        bar = ProgressBar(
            total=1.0,
            completed=min(1.0, busy[index]),
            width=BAR_WIDTH,
            complete_style=device_colour(index),
            finished_style=device_colour(index),
        )
        name = Text(device.name, style=device_colour(index))
        share = f"{placed[index]:,.0f} ({percent(placed[index] / (sum(placed) or 1))})"
        table.add_row(name, Text(device.gpu or "-"), share, bar, percent(busy[index]), size(weights[index]))
    return table


def _utilisation(plan: Plan, timeline: Timeline | None) -> tuple[float, ...]:
    if timeline is None:
        return modelled_utilisation(plan)
    run_us = end_us(timeline)
    found = {track.name: utilisation(track, run_us) for track in tracks(timeline, plan.cluster.names)}
    return tuple(found[name] for name in plan.cluster.names)


def comparison_table(plan: Plan) -> Table:
    """The plan against all baselines, simulated under the same costs."""
    title = f"Against coarser policies (modelled costs, simulated with {plan.microbatches} in flight)"
    against = f"{WORDS[plan.objective]} vs best baseline"
    numbers = map(_number, ("requests/s", against, "latency"))
    table = Table("policy", *numbers, title=title, title_justify="left")
    own = gain(plan, plan)
    name = Text(f"{plan.policy} (this plan)", style="bold")
    table.add_row(name, rate(plan.simulated_per_s), _ratio(own), duration(plan.latency_us), style="bold")
    table.add_row(Text("  by busy time alone"), rate(plan.throughput_per_s), "", "", end_section=True)
    best = best_baseline(plan)
    for b in sorted(plan.baselines, key=lambda b: -(b.throughput_per_s or 0.0)):
        speed = NOT_APPLICABLE if b.throughput_per_s is None else rate(b.throughput_per_s)
        wait = NOT_APPLICABLE if b.latency_us is None else duration(b.latency_us)
        mark = Text(f"{b.name} (best baseline)" if b == best else b.name)
        table.add_row(mark, speed, _ratio(gain(plan, b)), wait)
    table.add_section()
    table.add_row(Text("upper bound of any mix", style="dim"), rate(plan.bound_per_s), "", "", style="dim")
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else ratio(value)
