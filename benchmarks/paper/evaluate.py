"""evaluate: the figures that are asked for -> one document, from cases that are worked out once each.

With several processes steps are recorded first, each once; with one, where they are needed. What came out of
a case is kept, so that a run goes on where one ended. The document has one key a figure, and beside it what
the publication reports and why the figures differ. All but list prices is modelled or simulated unless a
row's source says otherwise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.paper.figures import Figure, Task, kept, steps_of, title_of, work
from benchmarks.paper.library import Library
from benchmarks.paper.online import Rates
from benchmarks.paper.pool import work_out
from benchmarks.paper.published import CITED, PUBLISHED
from benchmarks.paper.records import Case
from benchmarks.paper.scale import Scale
from benchmarks.paper.sensitivity import Watching

from tessera import __version__
from tessera.ir import Step

# Is told of everything that was done.
Advance = Callable[[str], None]


def evaluate(
    figures: Sequence[Figure],
    scale: Scale,
    library: Library,
    num_processes: int = 1,
    advance: Advance = lambda what: None,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """The whole document; with a limit of time, of what was done within it and before."""
    started = time.perf_counter()
    steps, tasks = needed(figures, scale, library, num_processes)
    for step, _ in work_out(library, record, steps, num_processes):
        advance(f"recorded {step.kind} of {step.model}")
    done: dict[Task, Any] = {}
    for task in tasks:
        if (found := kept(library, task)) is not None:
            done[task] = found
            advance(title_of(task))
    missing = [task for task in tasks if task not in done]
    until = None if limit_s is None else started + limit_s
    for task, result in work_out(library, work, missing, num_processes, until):
        done[task] = result
        advance(title_of(task))
    documents = {figure.name: figure.document(scale, done) for figure in figures}
    made = [figure for figure in figures if documents[figure.name]]
    return {
        "evaluation": CITED,
        "tessera": __version__,
        "scale": scale.name,
        "clock": "simulated",
        "figures": {
            figure.name: {"title": figure.title, "scale": scale.name, "label": figure.label}
            for figure in made
        },
        "seconds": round(time.perf_counter() - started, 1),
        "num_cases": len(done),
        "num_missing": len(tasks) - len(done),
        **{figure.name: documents[figure.name] for figure in made},
        "published": {
            figure.name: {
                "cited": CITED,
                "reports": PUBLISHED[figure.name].reports,
                "why_ours_differs": PUBLISHED[figure.name].differs,
            }
            for figure in made
        },
    }


def needed(
    figures: Sequence[Figure], scale: Scale, library: Library, num_processes: int
) -> tuple[list[Step], list[Task]]:
    """(steps to record first, tasks to work out or take from an earlier run)."""
    tasks = ordered([task for figure in figures for task in figure.tasks(scale)])
    if num_processes == 1:
        return [], tasks
    steps = dict.fromkeys(
        step for task in tasks if kept(library, task) is None for step in steps_of(library, task)
    )
    return [step for step in steps if not library.has(step)], tasks


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A document with the figures of both; where both have one, the new one."""
    both = old | new
    for key in ("figures", "published"):
        both[key] = old.get(key, {}) | new[key]
    scales = {figure["scale"] for figure in both["figures"].values()}
    return both | {"scale": scales.pop() if len(scales) == 1 else "mixed"}


def ordered(tasks: Sequence[Task]) -> list[Task]:
    """Each once, with all that any figure wants of it; long ones first, the others in their order."""
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
