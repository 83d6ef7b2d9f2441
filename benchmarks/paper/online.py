"""Online latency: normalised latency against the request rate, for two fixed policies and a monitor.

Also one stream in phases over time, with every switch of the monitor, so that one sees when and why it acts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.paper.library import Library
from benchmarks.paper.records import Shape
from benchmarks.paper.scale import Scale
from benchmarks.paper.serving import Served, served
from benchmarks.row_service.metrics import ServingReport, measured
from benchmarks.row_service.study import Scenario, adapt, compare, watched

from tessera.adapt.capability import crossing_per_s

NAME = "online"
# Parts that a stream over time is shown in.
NUM_BINS = 60


@dataclass(frozen=True, slots=True)
class Rates:
    """One shape on a pair under several loads, as shares of what its best policy can do."""

    shape: Shape
    gpus: tuple[str, ...]
    microbatches: int
    loads: tuple[float, ...]
    bursts: tuple[float, ...]
    seeds: int
    logs: tuple[str, ...]
    num_requests: int


def tasks(scale: Scale) -> list[Rates]:
    """One: its loads share two plans, which take longer to make than a load to simulate."""
    how = (scale.loads, scale.bursts, scale.seeds, scale.logs, scale.num_requests)
    return [Rates(scale.served, scale.first_pair, scale.microbatches, *how)]


def work(library: Library, task: Rates) -> dict[str, Any]:
    """Every load through both policies and with a monitor, seed by seed; then the logs."""
    made = served(library, task.shape, task.gpus, task.microbatches)
    streams = [(x, f"poisson:{x * made.best_per_s:.5g}") for x in task.loads]
    streams += [(x, f"bursty:{x * made.best_per_s:.5g}") for x in task.bursts]
    rows = [
        _row(made, share, text, made.setting(text, task.num_requests, seed)) | {"seed": seed}
        for seed in range(task.seeds)
        for share, text in streams
    ]
    rows += [
        _row(made, share, Path(log).name, made.logged(log, share, task.num_requests)) | {"seed": None}
        for log in task.logs
        for share in task.bursts
    ]
    shown = made.phases(task.bursts[0])
    return {
        "source": made.source,
        "lengths": made.lengths,
        "capacity_per_s": {x.name: x.capacity_per_s for x in made.known},
        "crossing_per_s": crossing_per_s(made.known),
        "rates": rows,
        "over_time": _over_time(made, shown, 2 * task.num_requests),
    }


def _row(made: Served, share: float, text: str, setting: Scenario) -> dict[str, Any]:
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
    came = np.array(found.requests.times_us) * 1e-6
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
    """The task's own, with what it was for; nothing if it is not done."""
    (task,) = tasks(scale)
    if task not in done:
        return {}
    found: dict[str, Any] = done[task]
    words = {
        "model": task.shape.load.model,
        "workload": task.shape.title,
        "pair": "+".join(task.gpus),
        "link": "pcie4",
        "slots": task.microbatches,
        "requests": task.num_requests,
        "seeds": task.seeds,
    }
    ratios = [r["ratio_to_better_fixed"] for r in found["rates"] if r["ratio_to_better_fixed"]]
    return (
        words
        | found
        | {
            "worst_ratio_to_better_fixed": max(ratios, default=None),
            "median_ratio_to_better_fixed": float(np.median(ratios)) if ratios else None,
            "mean_of_seeds": _means(found["rates"]),
        }
    )


def _means(rates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over all seeds, one row a stream: mean latencies, and the ratio of the means and its spread."""
    rows = []
    for text in dict.fromkeys(r["arrivals"] for r in rates):
        here = [r for r in rates if r["arrivals"] == text]
        means = {n: float(np.mean([r["normalised_ms"][n] for r in here])) for n in here[0]["normalised_ms"]}
        better = min((v for n, v in means.items() if n != "adaptive"), default=None)
        ratios = [r["ratio_to_better_fixed"] for r in here if r["ratio_to_better_fixed"]]
        row = {"arrivals": text, "seeds": len(here), "normalised_ms": means}
        row |= {"ratio_to_better_fixed": means["adaptive"] / better if better else None}
        row |= {"least_ratio": min(ratios, default=None), "worst_ratio": max(ratios, default=None)}
        rows.append(row)
    return rows


def draw(figure: Any, found: dict[str, Any]) -> None:
    """Latency over rate; below it the stream in phases over time with the policy in force."""
    top, middle, low = figure.subplots(3, 1, height_ratios=(3, 2, 2))
    poisson = [r for r in found["rates"] if r["arrivals"].startswith("poisson") and not r["seed"]]
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
