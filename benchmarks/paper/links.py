"""Links: what bandwidth the gain of kernel-level placement needs, and where it ends."""

from collections.abc import Mapping
from typing import Any

from benchmarks.paper.records import Case, Outcome, Wire
from benchmarks.paper.scale import Scale

NAME = "links"
# A gain below this is none: it is within what a simulation of a finite run can tell.
NO_GAIN = 1.005


def tasks(scale: Scale) -> list[Case]:
    """The first load on the first pair at every bandwidth."""
    return [Case(scale.first_load, scale.first_pair, Wire.of_gbps(x), scale.effort) for x in scale.gbps]


def document(scale: Scale, done: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """One row a bandwidth that is done."""
    rows = []
    for case in (case for case in tasks(scale) if case in done):
        found: Outcome = done[case]
        ratio = found.over("data-parallel")
        rows.append(
            {
                "model": case.load.model,
                "workload": case.load.title,
                "pair": case.pair,
                "gbps": case.wire.gbps,
                "latency_us": case.wire.latency_us,
                "policies": found.rates,
                **found.ratios,
                "has_gain": None if ratio is None else ratio > NO_GAIN,
                "launches": found.launches,
                "source": found.source,
            }
        )
    return rows


def draw(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Gain over bandwidth."""
    axes = figure.subplots()
    for title in dict.fromkeys(r["workload"] for r in rows):
        here = [r for r in rows if r["workload"] == title]
        for key, style in (("ratio_to_data_parallel", "-"), ("ratio_to_best_baseline", "--")):
            points = [(r["gbps"], r[key]) for r in here if r[key]]
            label = f"{title}: over {'data-parallel' if style == '-' else 'the best baseline'}"
            if points:
                axes.plot(*zip(*points, strict=True), style, marker="o", label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("link, GB/s each way")
    axes.set_ylabel("throughput, times")
    axes.set_title(f"{rows[0]['pair']}: where the gain ends", fontsize=9)
    axes.legend(fontsize=7)
