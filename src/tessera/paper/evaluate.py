"""evaluate: the figures that are asked for -> one document, from cases that are worked out once each.

Steps are recorded first, then every case, in several processes. The document has one key a figure, and beside
it what the publication reports and why the figures differ. All but list prices is modelled or simulated
unless a row's source says otherwise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera import __version__
from tessera.ir import Step
from tessera.paper.figures import Figure, Task, title_of, work, workload_of
from tessera.paper.library import Library
from tessera.paper.online import Rates
from tessera.paper.pool import work_out
from tessera.paper.published import CITED, PUBLISHED
from tessera.paper.records import Case
from tessera.paper.scale import Scale
from tessera.paper.sensitivity import Watching

# Is told of everything that was done.
Advance = Callable[[str], None]


def evaluate(
    figures: Sequence[Figure],
    scale: Scale,
    library: Library,
    num_processes: int = 1,
    advance: Advance = lambda what: None,
) -> dict[str, Any]:
    """The whole document."""
    started = time.perf_counter()
    steps, tasks = needed(figures, scale, library)
    for step, _ in work_out(library, record, steps, num_processes):
        advance(f"recorded {step.kind} of {step.model}")
    done: dict[Task, Any] = {}
    for task, result in work_out(library, work, tasks, num_processes):
        done[task] = result
        advance(title_of(task))
    return {
        "evaluation": CITED,
        "tessera": __version__,
        "scale": scale.name,
        "clock": "simulated",
        "figures": {
            figure.name: {"title": figure.title, "scale": scale.name, "label": figure.label}
            for figure in figures
        },
        "seconds": round(time.perf_counter() - started, 1),
        "num_cases": len(tasks),
        **{figure.name: figure.document(scale, done) for figure in figures},
        "published": {
            figure.name: {
                "cited": CITED,
                "reports": PUBLISHED[figure.name].reports,
                "why_ours_differs": PUBLISHED[figure.name].differs,
            }
            for figure in figures
        },
    }


def needed(figures: Sequence[Figure], scale: Scale, library: Library) -> tuple[list[Step], list[Task]]:
    """(steps to record, tasks to work out)."""
    tasks = ordered([task for figure in figures for task in figure.tasks(scale)])
    steps = dict.fromkeys(step for task in tasks for step in workload_of(task).steps)
    return [step for step in steps if not library.has(step)], tasks


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A document with the figures of both; where both have one, the new one."""
    both = old | new
    for key in ("figures", "published"):
        both[key] = old.get(key, {}) | new[key]
    scales = {figure["scale"] for figure in both["figures"].values()}
    return both | {"scale": scales.pop() if len(scales) == 1 else "mixed"}


def ordered(tasks: Sequence[Task]) -> list[Task]:
    """Each once, with all that any figure wants of it; long ones first, one workload's together."""
    unique: dict[Task, Task] = {}
    for task in tasks:
        known = unique.get(task)
        if isinstance(known, Case) and isinstance(task, Case):
            unique[task] = replace(known, effort=known.effort.joined(task.effort))
        elif known is None:
            unique[task] = task
    # `dict` keeps the first of two equal keys, whose effort may be the smaller: the values count.
    return sorted(unique.values(), key=lambda task: not isinstance(task, Rates | Watching))


def record(library: Library, step: Step) -> None:
    """Records one step; a function of the module, so that a process can be sent it."""
    library.record(step)
