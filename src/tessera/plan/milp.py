"""One placement for all requests, of the shortest period: the mixed-integer program that others publish.

    x[n, d] = 1 iff node n runs on device d                 binary
    w[v, s, d] = 1 iff value v crosses from s to d          continuous, >= x[producer, s] + x[reader, d] - 1
    T = time between two requests                           minimise T
    every node is placed once; no device and no link is busy for longer than T a request

For comparison: a mix of placements is never slower, and found much sooner. HiGHS has `TIME_LIMIT_S`; what it
has by then, or a better placement that is known already, is returned. Memory is checked and not optimised.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tessera.plan.policies import Task
from tessera.plan.problem import Column, Floats, Ints, Mix, Problem

TIME_LIMIT_S = 60.0


def single_placement(task: Task, time_limit_s: float = TIME_LIMIT_S) -> tuple[Mix, ...] | None:
    """The best single placement, by the program or among those known."""
    known = [m.columns[0] for mixes in task.coarse.values() for m in mixes or () if len(m.columns) == 1]
    found = best_placement(task.problem, time_limit_s)
    columns = [c for c in (*known, *(() if found is None else (found[0],))) if task.pool.fits((c,))]
    if not columns:
        return None
    return (Mix((min(columns, key=lambda c: float(c.busy_us.max())),), (1.0,)),)


def best_placement(problem: Problem, time_limit_s: float = TIME_LIMIT_S) -> tuple[Column, float] | None:
    """(placement, proved lower bound of the period in microseconds); None if there was no time for one."""
    nodes, num = problem.num_nodes, problem.num_devices
    pairs = [(s, d) for s in range(num) for d in range(num) if s != d]
    vals = problem.values
    num_x, num_w = nodes * num, len(vals) * len(pairs)
    size = num_x + num_w + 1
    scale = float(problem.load_us.sum(axis=0).min())
    placed = _rows(
        [(np.arange(nodes), np.arange(nodes) * num + d, np.ones(nodes)) for d in range(num)], nodes, size
    )
    rows = _crossings(problem, pairs, num_x)
    crossing = _rows(rows, len(vals.pin_value) * len(pairs), size)
    busy = _rows(_loads(problem, pairs, num_x, scale), num + num * num, size)
    upper = np.ones(size)
    upper[-1] = np.inf
    if problem.allowed is not None:
        upper[:num_x] = problem.allowed.ravel()
    goal = np.zeros(size)
    goal[-1] = 1.0
    found = milp(
        goal,
        integrality=np.concatenate([np.ones(num_x), np.zeros(num_w + 1)]),
        bounds=Bounds(0.0, upper),
        constraints=[
            LinearConstraint(placed, 1.0, 1.0),
            LinearConstraint(crossing, -np.inf, 1.0),
            LinearConstraint(busy, -np.inf, 0.0),
        ],
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-4},
    )
    if found.x is None:
        return None
    labels = found.x[:num_x].reshape(nodes, num).argmax(axis=1).astype(np.int64)
    return problem.column(labels), float(found.mip_dual_bound or 0.0) * scale


Entries = tuple[Ints, Ints, Floats]


def _rows(entries: list[Entries], num_rows: int, size: int) -> coo_array:
    """A sparse matrix of (row, column, number)."""
    row, col, number = (np.concatenate([e[i] for e in entries]) for i in range(3))
    return coo_array((number, (row, col)), shape=(num_rows, size))


def _crossings(problem: Problem, pairs: list[tuple[int, int]], num_x: int) -> list[Entries]:
    """x[producer, s] + x[reader, d] - w[value, s, d] <= 1 for every reader and every two devices."""
    vals, num = problem.values, problem.num_devices
    pins = np.arange(len(vals.pin_value))
    ones = np.ones(len(pins))
    entries: list[Entries] = []
    for at, (src, dst) in enumerate(pairs):
        row = pins * len(pairs) + at
        entries.append((row, vals.producer[vals.pin_value] * num + src, ones))
        entries.append((row, vals.pin_node * num + dst, ones))
        entries.append((row, num_x + vals.pin_value * len(pairs) + at, -ones))
    return entries


def _loads(problem: Problem, pairs: list[tuple[int, int]], num_x: int, scale: float) -> list[Entries]:
    """Busy time of every device and link, less T."""
    vals, num = problem.values, problem.num_devices
    nodes, values = np.arange(problem.num_nodes), np.arange(len(vals))
    last = num_x + len(vals) * len(pairs)
    rows = np.arange(num + num * num)
    entries: list[Entries] = [(rows, np.full(len(rows), last), np.full(len(rows), -1.0))]
    for d in range(num):
        entries.append((np.full(len(nodes), d), nodes * num + d, problem.load_us[:, d] / scale))
    for at, (src, dst) in enumerate(pairs):
        row = num + int(problem.link_row[src * num + dst])
        wire = problem.wire_us[:, src, dst] / scale
        entries.append((np.full(len(values), row), num_x + values * len(pairs) + at, wire))
    return entries
