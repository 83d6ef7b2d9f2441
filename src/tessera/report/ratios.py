"""Ratio of launch times on two devices by kernel class, and its distribution by launches and by time.

Launches that take no time on a device are omitted.
"""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError, extra_module
from tessera.ir import Costs, Trace
from tessera.ir.files import write_whole

FORMATS = (".png", ".svg", ".pdf")
# Ratios nearer to 1 are within the error.
EVEN = 1.1
FIRST, SECOND, MIDDLE = "#2a6f97", "#c8553d", "#8a8a8a"


def check_plot(num_devices: int, path: Path) -> None:
    """Raises before anything is measured."""
    if num_devices != 2:
        message = f"a plot compares two devices; {num_devices} were named"
        raise TesseraError(message, "Name two with --devices.", "--plot")
    if path.suffix.lower() not in FORMATS:
        raise TesseraError(f"'{path.name}' is no picture", f"End its name in {', '.join(FORMATS)}.", "--plot")
    extra_module("matplotlib", "report")


def ratios(costs: Costs, classes: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Class -> (ratio of second to first device, time on the first), ascending."""
    by_class: dict[str, list[tuple[float, float]]] = {}
    for row, name in zip(costs.costs, classes, strict=True):
        first, second = row[0].us, row[1].us
        if first > 0 and second > 0:
            by_class.setdefault(name, []).append((second / first, first))
    return {name: sorted(rows) for name, rows in sorted(by_class.items(), key=lambda x: min(x[1]))}


def sources(costs: Costs) -> str:
    words = []
    for index, device in enumerate(costs.devices):
        counted = Counter(row[index].source.value for row in costs.costs if row[index].us > 0)
        parts = ", ".join(f"{name} {n}" for name, n in counted.most_common())
        words.append(f"{device.name}: {parts}")
    return "; ".join(words)


def draw_ratios(trace: Trace, costs: Costs, classes: Sequence[str], path: Path) -> None:
    check_plot(len(costs.devices), path)
    by_class = ratios(costs, classes)
    if not by_class:
        raise TesseraError("no launch takes time on both devices", "Name other devices.", "--plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    first, second = (d.name for d in costs.devices)
    step = trace.step
    figure.suptitle(
        f"{step.kind} of {Path(step.model).name}, batch {step.batch}, context {step.context}: "
        f"{sum(map(len, by_class.values()))} launches on {first} and {second}"
    )
    _bars(left, by_class, first, second)
    _distribution(right, by_class, first, second)
    figure.text(0.0, -0.03, f"sources of the times: {sources(costs)}", fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150, bbox_inches="tight")
    write_whole(path, [picture.getvalue()])


def _bars(axes: Any, by_class: dict[str, list[tuple[float, float]]], first: str, second: str) -> None:
    """One bar per launch, from the line of equal speed."""
    place, ticks = 0.0, []
    for name, rows in by_class.items():
        width = 1.0 / len(rows)
        xs = [place + (i + 0.5) * width for i in range(len(rows))]
        heights = [ratio - 1.0 for ratio, _ in rows]
        axes.bar(xs, heights, width, bottom=1.0, color=[_colour(ratio) for ratio, _ in rows])
        ticks.append((place + 0.5, f"{name}\n{len(rows)}"))
        place += 1.3
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks], fontsize=8, rotation=30, ha="right")
    axes.set_ylabel(f"time on {second} / time on {first}")
    axes.set_title(f"each launch, by class: above 1, {first} is faster", fontsize=10)


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _colour(ratio: float) -> str:
    if 1 / EVEN <= ratio <= EVEN:
        return MIDDLE
    return FIRST if ratio > 1 else SECOND


def _distribution(axes: Any, by_class: dict[str, list[tuple[float, float]]], first: str, second: str) -> None:
    rows = [row for group in by_class.values() for row in group]
    values = [ratio for ratio, _ in rows]
    axes.ecdf(values, label="share of launches")
    axes.ecdf(values, [us for _, us in rows], label=f"share of time on {first}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"time on {second} / time on {first}")
    axes.set_title("cumulative distribution", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")
