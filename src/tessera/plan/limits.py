"""Limits under which the linear program proposes mixes, and how one is chosen after the other.

Which depth is best differs from model to model: those with small launches and slow links want few transfers,
others many. So a few depths far apart are tried first, and then those around the best.
"""

import numpy as np

from tessera.plan.policies import Task
from tessera.plan.problem import Problem, spread_us
from tessera.plan.throughput import Limits

# Limits that are tried: the depth as a multiple of the number of devices (below one they could not all be
# busy), and how much of the other steps' time the main step may take on a device; None: any. First those in
# the first line, then always the one that is nearest to the best so far.
TRIED: tuple[tuple[float, float | None], ...] = (
    (1.2, None), (1.12, 0.2), (1.35, 0.2),
    (1.02, None), (1.02, 0.2), (1.05, None), (1.05, 0.1), (1.05, 0.2), (1.05, 0.4), (1.08, 0.0), (1.08, 0.4),
    (1.1, None), (1.12, 0.1), (1.08, 0.2), (1.12, 0.3), (1.15, None), (1.15, 0.2), (1.2, 0.0), (1.2, 0.2),
    (1.2, 0.4), (1.28, None), (1.28, 0.0), (1.28, 0.2), (1.28, 0.4), (1.35, None), (1.35, 0.0), (1.35, 0.4),
    (1.42, None), (1.42, 0.0), (1.42, 0.2), (1.42, 0.4), (1.5, None), (1.5, 0.0), (1.5, 0.2), (1.65, None),
    (1.65, 0.2), (2.0, None),
)  # fmt: skip
NUM_FIRST = 3
# How far any share and no limit at all are apart, in depth.
OTHER_SHARE = 0.03
# Where the other steps take less than this share of the time, spreading the main one alone changes nothing.
MIN_OTHER = 0.01


def limits_of(task: Task) -> list[Limits]:
    """Those of the table, each once; shares only where there is a main step among others."""
    num = task.problem.num_devices
    step, share = _main_step(task.problem)
    found = [
        Limits(depth * num)
        if spare is None or share > 1 - MIN_OTHER
        else Limits(depth * num, step, share + spare * (1 - share))
        for depth, spare in TRIED
    ]
    return list(dict.fromkeys(found))


def distance(one: Limits, other: Limits) -> float:
    """How unlike two of them are."""
    return abs((one.depth or 0.0) - (other.depth or 0.0)) / (one.depth or 1.0) + OTHER_SHARE * (
        one.share != other.share
    )


def _main_step(problem: Problem) -> tuple[int, float]:
    """(the step that takes most of the time, its share of it) if every step were spread evenly."""
    times = [count * spread_us(us) for us, count in zip(problem.cost_us, problem.unit.counts, strict=True)]
    step = int(np.argmax(times))
    return step, times[step] / sum(times)
