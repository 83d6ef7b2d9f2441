"""Sensitivity: how latency depends on the monitor's window and threshold, under a load in phases.

Windows are multiples of the monitor's own (a hundred requests at the load where the policies cross). The
threshold is the number of standard errors by which a counted load must be past the crossing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.library import Library
from benchmarks.paper.online import row_of
from benchmarks.paper.records import Shape
from benchmarks.paper.scale import Scale
from benchmarks.paper.serving import served
from benchmarks.row_service.study import adapt, compare

from tessera.adapt.monitor import Monitor, MonitorConfig

NAME = "sensitivity"


@dataclass(frozen=True, slots=True)
class Watching:
    """One shape on a pair under one load, with a monitor set in several ways."""

    shape: Shape
    gpus: tuple[str, ...]
    microbatches: int
    burst: float
    num_requests: int
    windows: tuple[float, ...]
    thresholds: tuple[float, ...]


def tasks(scale: Scale) -> list[Watching]:
    """One, for the same reason as the figure about rates."""
    how = (scale.bursts[0], scale.num_requests, scale.windows, scale.thresholds)
    return [Watching(scale.served, scale.first_pair, scale.microbatches, *how)]


def work(library: Library, task: Watching) -> dict[str, Any]:
    """Every setting of the monitor on the same arrivals."""
    made = served(library, task.shape, task.gpus, task.microbatches)
    text = made.phases(task.burst)
    setting = made.setting(text, task.num_requests)
    fixed = compare(made.plans, setting)
    usual_s = Monitor(made.known).window_s
    rows = []
    for window in task.windows:
        for errors in task.thresholds:
            watch = MonitorConfig(window_s=window * usual_s, errors=errors)
            adaptive, _ = adapt(made.plans, setting, watch, known=made.known)
            row = row_of(task.burst, text, fixed, adaptive)
            rows.append({"window": window, "window_s": window * usual_s, "threshold_errors": errors} | row)
    return {"source": made.source, "arrivals": text, "usual_window_s": usual_s, "rows": rows}


def document(scale: Scale, done: Mapping[Any, Any]) -> dict[str, Any]:
    """The task's own, with what it was for; nothing if it is not done."""
    (task,) = tasks(scale)
    if task not in done:
        return {}
    found: dict[str, Any] = done[task]
    return {
        "model": task.shape.load.model,
        "pair": "+".join(task.gpus),
        "link": "pcie4",
        "requests": task.num_requests,
    } | found


def draw(figure: Any, found: dict[str, Any]) -> None:
    """Latency over the window, a line a threshold; the fixed policies as lines."""
    left, right = figure.subplots(1, 2)
    rows = found["rows"]
    for errors in dict.fromkeys(r["threshold_errors"] for r in rows):
        here = [r for r in rows if r["threshold_errors"] == errors]
        label = f"threshold {errors:g} standard errors"
        left.plot([r["window_s"] for r in here], [r["normalised_ms"]["adaptive"] for r in here], marker="o")
        right.plot([r["window_s"] for r in here], [r["switches"] for r in here], marker="o", label=label)
    for name, style in (("latency", ":"), ("throughput", "--")):
        if name in rows[0]["normalised_ms"]:
            left.axhline(rows[0]["normalised_ms"][name], color="grey", linestyle=style, label=f"{name} alone")
    for panel, words in ((left, "ms per token"), (right, "switches")):
        panel.set_xscale("log")
        panel.set_xlabel("window of the monitor, seconds")
        panel.set_ylabel(words)
        panel.legend(fontsize=7)
    left.set_yscale("log")
