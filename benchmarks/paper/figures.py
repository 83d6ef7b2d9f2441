"""The figures of the evaluation by name: what each has worked out, its document and its plot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper import cost, heterogeneity, links, online, regimes, scaling, sensitivity, throughput
from benchmarks.paper.compare import compare
from benchmarks.paper.heterogeneity import Ratios
from benchmarks.paper.library import Library
from benchmarks.paper.online import Rates
from benchmarks.paper.records import Case, Outcome
from benchmarks.paper.scale import Scale
from benchmarks.paper.sensitivity import Watching

from tessera.errors import UnknownName
from tessera.ir import Step

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
            throughput.tasks, throughput.document, throughput.draw, (11.0, 5.0),
        ),
        Figure(
            cost.NAME, "Cost efficiency", f"{_SIMULATED}; list prices",
            cost.tasks, cost.document, cost.draw, (11.0, 5.0),
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
    """Works one task out, and keeps what came out of it."""
    found = _worked(library, task)
    library.keep(repr(task), found)
    return found


def _worked(library: Library, task: Task) -> Any:
    match task:
        case Case():
            return compare(library, task)
        case Ratios():
            return heterogeneity.work(library, task)
        case Rates():
            return online.work(library, task)
        case Watching():
            return sensitivity.work(library, task)


def kept(library: Library, task: Task) -> Any:
    """What came out of it in an earlier run; None if there was none."""
    return library.kept(repr(task), Outcome if isinstance(task, Case) else dict[str, Any])


def steps_of(library: Library, task: Task) -> Sequence[Step]:
    """What has to be recorded for a task."""
    return library.recorded_for(task.load if isinstance(task, Case) else task.shape.load)


def title_of(task: Task) -> str:
    """A task in a few words."""
    match task:
        case Case():
            return f"{task.load.title} on {task.pair}, {task.wire.name}"
        case Ratios():
            return f"kernels of {task.shape.load.model}"
        case Rates() | Watching():
            return f"serving {task.shape.load.model}"
