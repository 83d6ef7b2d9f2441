"""The figures of the evaluation by name: what each has worked out, its document and its plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.errors import UnknownName
from tessera.paper import cost, heterogeneity, links, online, regimes, scaling, sensitivity, throughput
from tessera.paper.compare import compare
from tessera.paper.heterogeneity import Ratios
from tessera.paper.library import Library
from tessera.paper.online import Rates
from tessera.paper.records import Case, Workload
from tessera.paper.scale import Scale
from tessera.paper.sensitivity import Watching

# Whatever can be worked out by itself.
Task = Case | Ratios | Rates | Watching


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure."""

    name: str
    title: str
    # Labels that its numbers can have; each row says which.
    label: str
    tasks: Callable[[Scale], Sequence[Task]]
    document: Callable[[Scale, Mapping[Any, Any]], Any]
    draw: Callable[[Any, Any], None]
    # Inches.
    size: tuple[float, float] = (10.0, 5.0)


_SIMULATED = "simulated, on costs that are measured, from tables or modelled"
FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            heterogeneity.NAME, "Kernels on different cards", "tables where installed, else modelled",
            heterogeneity.tasks, heterogeneity.document, heterogeneity.draw, (12.0, 5.5),
        ),
        Figure(
            throughput.NAME, "Offline throughput", _SIMULATED,
            throughput.tasks, throughput.document, throughput.draw, (11.0, 10.0),
        ),
        Figure(
            cost.NAME, "Cost efficiency", f"{_SIMULATED}; list prices",
            cost.tasks, cost.document, cost.draw, (11.0, 8.0),
        ),
        Figure(
            online.NAME, "Latency under load", _SIMULATED,
            online.tasks, online.document, online.draw, (9.0, 10.0),
        ),
        Figure(
            sensitivity.NAME, "The monitor's window and threshold", _SIMULATED,
            sensitivity.tasks, sensitivity.document, sensitivity.draw,
        ),
        Figure(
            scaling.NAME, "Scaling to 16 GPUs", _SIMULATED,
            scaling.tasks, scaling.document, scaling.draw, (7.0, 5.0),
        ),
        Figure(
            links.NAME, "Influence of the link", _SIMULATED,
            links.tasks, links.document, links.draw, (8.0, 5.0),
        ),
        Figure(
            regimes.NAME, "Map of regimes", _SIMULATED,
            regimes.tasks, regimes.document, regimes.draw, (11.0, 9.0),
        ),
    )
}  # fmt: skip


def chosen(names: Sequence[str]) -> list[Figure]:
    """The named figures, in the order of the evaluation; all if none is named."""
    for name in names:
        if name not in FIGURES:
            raise UnknownName("figure", name, FIGURES)
    return [figure for name, figure in FIGURES.items() if not names or name in names]


def work(library: Library, task: Task) -> Any:
    """Works one task out."""
    match task:
        case Case():
            return compare(library, task)
        case Ratios():
            return heterogeneity.work(library, task)
        case Rates():
            return online.work(library, task)
        case Watching():
            return sensitivity.work(library, task)


def workload_of(task: Task) -> Workload:
    """What has to be recorded for a task."""
    return task.case.workload if isinstance(task, Rates | Watching) else task.workload


def title_of(task: Task) -> str:
    """A task in a few words."""
    match task:
        case Case():
            return f"{task.workload.model} on {task.pair}, {task.wire.name}"
        case Ratios():
            return f"kernels of {task.workload.model}"
        case Rates() | Watching():
            return f"serving {task.case.workload.model}"
