"""Online latency: normalised latency against the request rate, for two fixed policies and a monitor.

Also one stream in phases over time, with every switch of the monitor, so that one sees when and why it acts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tessera.adapt import crossing_per_s
from tessera.ir import ServingReport
from tessera.paper.library import Library
from tessera.paper.records import Case, Wire
from tessera.paper.scale import Scale
from tessera.paper.serving import Served, served
from tessera.simulate.metrics import measured
from tessera.simulate.study import adapt, compare, watched

NAME = "online"
# Parts that a stream over time is shown in.
NUM_BINS = 60


@dataclass(frozen=True, slots=True)
class Rates:
    """One case under several loads, as shares of what its best policy can do."""

    case: Case
    loads: tuple[float, ...]
    bursts: tuple[float, ...]
    num_requests: int


def case_of(scale: Scale) -> Case:
    """The served workload on the first pair."""
    return Case(scale.served, scale.pairs[0], Wire.preset(scale.links[0]), scale.slots)


def tasks(scale: Scale) -> list[Rates]:
    """One: its loads share two plans, which take longer to make than a load to simulate."""
    return [Rates(case_of(scale), scale.loads, scale.bursts, scale.num_requests)]


def work(library: Library, task: Rates) -> dict[str, Any]:
    """Every load through both policies and with a monitor."""
    made = served(library, task.case)
    streams = [(x, f"poisson:{x * made.best_per_s:.5g}") for x in task.loads]
    streams += [(x, f"bursty:{x * made.best_per_s:.5g}") for x in task.bursts]
    rows = [_row(made, share, text, task.num_requests) for share, text in streams]
    shown = made.phases(task.bursts[0])
    return {
        "source": made.source,
        "lengths": made.lengths,
        "capacity_per_s": {x.name: x.capacity_per_s for x in made.known},
        "crossing_per_s": crossing_per_s(made.known),
        "rates": rows,
        "over_time": _over_time(made, shown, 2 * task.num_requests),
    }


def _row(made: Served, share: float, text: str, num: int) -> dict[str, Any]:
    setting = made.setting(text, num)
    adaptive, _ = adapt(made.plans, setting, known=made.known)
    fixed = compare(made.plans, setting)
    return row_of(share, text, fixed, adaptive)


def row_of(
    share: float, text: str, fixed: Sequence[ServingReport], adaptive: ServingReport
) -> dict[str, Any]:
    """One load in figures."""
    reports = {r.policy: r for r in (*fixed, adaptive)}
    means = {name: r.normalised_s.mean * 1e3 for name, r in reports.items() if r.normalised_s}
    tails = {name: r.normalised_s.p99 * 1e3 for name, r in reports.items() if r.normalised_s}
    better = min((v for name, v in means.items() if name != adaptive.policy), default=None)
    return {
        "arrivals": text,
        "share_of_capacity": share,
        "rate_per_s": adaptive.offered_per_s,
        "normalised_ms": means,
        "normalised_p99_ms": tails,
        "ratio_to_better_fixed": means[adaptive.policy] / better if better else None,
        "switches": sum(d.kind.value == "switch" for d in adaptive.decisions),
        "is_saturated": adaptive.is_saturated,
    }


def _over_time(made: Served, text: str, num: int) -> dict[str, Any]:
    setting = made.setting(text, num)
    found = watched(made.plans, setting, made.known)
    came = np.array(found.demand.times_us) * 1e-6
    normalised = measured(found)["normalised"] * 1e3
    edges = np.linspace(0.0, float(came[-1]), NUM_BINS + 1)
    which = np.clip(np.digitize(came, edges) - 1, 0, NUM_BINS - 1)
    width = float(edges[1])
    bins = []
    for index in range(NUM_BINS):
        here = normalised[which == index]
        mean = float(np.nanmean(here)) if len(here) and not np.isnan(here).all() else None
        row = {"from_s": float(edges[index]), "rate_per_s": len(here) / width, "normalised_ms": mean}
        bins.append(row)
    decisions = [
        {"at_s": d.at_s, "kind": d.kind.value, "policy": d.policy, "why": d.why} for d in found.decisions
    ]
    return {"arrivals": text, "first_policy": made.known[0].name, "bins": bins, "decisions": decisions}


def document(scale: Scale, done: Mapping[Any, Any]) -> dict[str, Any]:
    """The task's own, with what it was for."""
    (task,) = tasks(scale)
    found: dict[str, Any] = done[task]
    words = {
        "model": task.case.workload.model,
        "workload": task.case.workload.title,
        "pair": task.case.pair,
        "link": task.case.wire.name,
        "slots": task.case.slots,
        "requests": task.num_requests,
    }
    ratios = [r["ratio_to_better_fixed"] for r in found["rates"] if r["ratio_to_better_fixed"]]
    return words | found | {"worst_ratio_to_better_fixed": max(ratios, default=None)}


def draw(figure: Any, found: dict[str, Any]) -> None:
    """Latency over rate; below it the stream in phases over time with the policy in force."""
    top, middle, low = figure.subplots(3, 1, height_ratios=(3, 2, 2))
    poisson = [r for r in found["rates"] if r["arrivals"].startswith("poisson")]
    for name in poisson[0]["normalised_ms"]:
        points = [(r["rate_per_s"], r["normalised_ms"][name]) for r in poisson]
        top.plot(*zip(*points, strict=True), "--" if name == "adaptive" else "-", marker="o", label=name)
    if found["crossing_per_s"]:
        top.axvline(found["crossing_per_s"], color="grey", linestyle=":", label="computed crossing")
    top.set_yscale("log")
    top.set_xlabel("requests per second")
    top.set_ylabel("ms per token")
    top.legend(fontsize=7)
    bins = found["over_time"]["bins"]
    times = [b["from_s"] for b in bins]
    middle.step(times, [b["rate_per_s"] for b in bins], where="post")
    middle.set_ylabel("requests/s")
    known = [(b["from_s"], b["normalised_ms"]) for b in bins if b["normalised_ms"] is not None]
    low.plot(*zip(*known, strict=True))
    low.set_ylabel("ms per token")
    low.set_xlabel("seconds; shaded: the throughput policy is in force")
    for panel in (middle, low):
        for start, stop in _in_force(found["over_time"], "throughput"):
            panel.axvspan(start, stop, alpha=0.2, color="#c8553d")


def _in_force(found: dict[str, Any], policy: str) -> list[tuple[float, float]]:
    """Spans in which a policy was in force."""
    end = 2 * found["bins"][-1]["from_s"] - found["bins"][-2]["from_s"]
    switches = [(d["at_s"], d["policy"]) for d in found["decisions"] if d["kind"] == "switch"]
    marks = [(0.0, found["first_policy"]), *switches, (end, "")]
    return [(a, b) for (a, name), (b, _) in pairwise(marks) if name == policy and b > a]
