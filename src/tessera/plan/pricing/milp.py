"""Single placements as mixed-integer programs: the fastest, and the one that fits best.

    x[n, d] = 1 iff node n runs on device d             binary; every node is placed once
    w[v, s, d] = 1 iff value v crosses from s to d      continuous, >= x[producer, s] + x[reader, d] - 1
    h[i, d] = 1 iff device d holds weight or state i    continuous, >= x[reader, d]

`best_placement` minimises T, the bottleneck's busy time per request, within memory. `roomiest` minimises the
fullest device's shortage; above zero it proves that nothing fits. Temporaries are not counted. HiGHS stops at
a small gap or after an amount of work, never by time: a slow machine finds the same placement.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from tessera.errors import PlanInfeasible
from tessera.ir import units
from tessera.plan.arrays import Floats, Holdings, Ints, Labels
from tessera.plan.problem import Column, Problem

# Relative gap below the error of costs; entries times nodes that end a search; entries of a program whose
# first node takes a minute.
GAP = 1e-3
MAX_WORK, MAX_ENTRIES = 1_000_000, 100_000

Entries = tuple[Ints, Ints, Floats]
Limited = tuple[coo_array, float | Floats]


def best_placement(problem: Problem, microbatches: int = 1) -> tuple[Column, float] | None:
    """With a lower bound of the period in microseconds; None if none was found."""
    nodes, num = problem.num_nodes, problem.num_devices
    if num == 1:
        only = problem.alone(0)
        return only, float(only.busy_us.max())
    pairs = [(s, d) for s in range(num) for d in range(num) if s != d]
    vals, held = problem.values, problem.resident(microbatches)
    num_x, num_w, num_h = nodes * num, len(vals) * len(pairs), len(held.num_bytes) * num
    size = num_x + num_w + num_h + 1
    scale = float(problem.load_us.sum(axis=0).min())
    upper = np.ones(size)
    upper[-1] = np.inf
    if problem.allowed is not None:
        upper[:num_x] = problem.allowed.ravel()
    crossing = _rows(_crossings(problem, pairs, num_x), len(vals.pin_value) * len(pairs), size)
    busy = _rows(_loads(problem, pairs, num_x, scale, size - 1), num + num * num, size)
    found = _solved(
        _placed(nodes, num, size),
        [(crossing, 1.0), (busy, 0.0), *_within_memory(problem, held, held.pin_node, num_x + num_w, size)],
        Bounds(0.0, upper),
        num_x,
    )
    if found is None or found.x is None:
        return None
    labels = found.x[:num_x].reshape(nodes, num).argmax(axis=1).astype(np.int64)
    return problem.column(labels), float(found.mip_dual_bound or 0.0) * scale


def roomiest(problem: Problem) -> tuple[Column, float]:
    """The least shortage for one request, and its proved minimum: bytes of the fullest device, without
    temporaries.
    """
    held = problem.resident(1.0)
    load = problem.load_us if problem.allowed is None else np.where(problem.allowed, problem.load_us, np.inf)
    labels: Labels = load.argmin(axis=1).astype(np.int64)  # devices without residents
    nodes, at = np.unique(held.pin_node, return_inverse=True)
    if not len(nodes):
        return problem.column(labels), -float(problem.memory_bytes.min())
    num = problem.num_devices
    num_x = len(nodes) * num
    size = num_x + len(held.num_bytes) * num + 1
    lower, upper = np.zeros(size), np.ones(size)
    lower[-1], upper[-1] = -np.inf, np.inf
    if problem.allowed is not None:
        upper[:num_x] = problem.allowed[nodes].ravel()
    rows = _within_memory(problem, held, at, num_x, size, slack=size - 1)
    bounds = Bounds(lower, upper)
    found = _solved(_placed(len(nodes), num, size), rows, bounds, num_x)
    if found is not None and found.x is not None:
        labels[nodes] = found.x[:num_x].reshape(-1, num).argmax(axis=1)
    least = -np.inf if found is None or found.mip_dual_bound is None else float(found.mip_dual_bound)
    return problem.column(labels), least * float(problem.memory_bytes.max())


def _solved(placed: coo_array, rows: list[Limited], bounds: Bounds, num_x: int) -> OptimizeResult | None:
    """None for a program that is too large."""
    size, entries = placed.shape[1], placed.nnz + sum(matrix.nnz for matrix, _ in rows)
    if entries > MAX_ENTRIES:
        return None
    goal = np.zeros(size)
    goal[-1] = 1.0
    return milp(
        goal,
        integrality=np.concatenate([np.ones(num_x), np.zeros(size - num_x)]),
        bounds=bounds,
        constraints=[
            LinearConstraint(placed, 1.0, 1.0),
            *(LinearConstraint(matrix, -np.inf, upper) for matrix, upper in rows),
        ],
        options={"node_limit": MAX_WORK // entries, "mip_rel_gap": GAP},
    )


def _rows(entries: list[Entries], num_rows: int, size: int) -> coo_array:
    row, col, number = (np.concatenate([e[i] for e in entries]) for i in range(3))
    return coo_array((number, (row, col)), shape=(num_rows, size))


def _placed(nodes: int, num: int, size: int) -> coo_array:
    every = np.arange(nodes)
    return _rows([(every, every * num + d, np.ones(nodes)) for d in range(num)], nodes, size)


def _within_memory(
    problem: Problem, held: Holdings, node_of: Ints, first: int, size: int, slack: int | None = None
) -> list[Limited]:
    num, items = problem.num_devices, len(held.num_bytes)
    if not items:
        return []
    unit = float(problem.memory_bytes.max())
    row = np.arange(len(node_of) * num)
    pin, device = row // num, row % num
    ones = np.ones(len(row))
    reads = [
        (row, node_of[pin] * num + device, ones),
        (row, first + held.pin_item[pin] * num + device, -ones),
    ]
    every = np.arange(items)
    full = [(np.full(items, d), first + every * num + d, held.num_bytes / unit) for d in range(num)]
    if slack is not None:
        full.append((np.arange(num), np.full(num, slack), -np.ones(num)))
    return [
        (_rows(reads, len(row), size), 0.0),
        (_rows(full, num, size), problem.memory_bytes / unit),
    ]


def _crossings(problem: Problem, pairs: list[tuple[int, int]], num_x: int) -> list[Entries]:
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


def _loads(
    problem: Problem, pairs: list[tuple[int, int]], num_x: int, scale: float, last: int
) -> list[Entries]:
    vals, num = problem.values, problem.num_devices
    nodes, values = np.arange(problem.num_nodes), np.arange(len(vals))
    rows = np.arange(num + num * num)
    entries: list[Entries] = [(rows, np.full(len(rows), last), np.full(len(rows), -1.0))]
    for d in range(num):
        entries.append((np.full(len(nodes), d), nodes * num + d, problem.load_us[:, d] / scale))
    for at, (src, dst) in enumerate(pairs):
        row = num + int(problem.link_row[src * num + dst])
        wire = problem.wire_us[:, src, dst] / scale
        entries.append((np.full(len(values), row), num_x + values * len(pairs) + at, wire))
    return entries


def shortage(problem: Problem, found: Column, least_bytes: float) -> PlanInfeasible:
    """`found` lacks least; `least_bytes` is proved."""
    weights, (per_microbatch,) = problem.footprints((found,))
    excess = problem.excess_bytes((found,), 1)
    worst = int(excess.argmax())
    lacking = max(float(excess[worst]), least_bytes)
    how = "no placement fits" if least_bytes > 0 else "no placement was found that fits"
    message = (
        f"{how}: at best {problem.cluster.names[worst]} needs weights {units.size(weights[worst])}, "
        f"state and temporaries of 1 request {units.size(per_microbatch[worst])}; it has "
        f"{units.size(problem.memory_bytes[worst])}, {_lacks(lacking)}"
    )
    return PlanInfeasible(message, _remedy(lacking))


def check_total(problem: Problem) -> None:
    error = _together(problem) or _node(problem)
    if error is not None:
        raise error


def _together(problem: Problem) -> PlanInfeasible | None:
    weights, state = float(problem.weights.num_bytes.sum()), float(problem.states.num_bytes.sum())
    memory = float(problem.memory_bytes.sum())
    lacking = weights + state - memory
    if lacking <= 0:
        return None
    need = f"weights take {units.size(weights)} and the state of one request {units.size(state)}"
    message = f"the model does not fit: {need}; {_devices(problem)} {units.size(memory)}, {_lacks(lacking)}"
    return PlanInfeasible(message, _remedy(lacking))


def _node(problem: Problem) -> PlanInfeasible | None:
    need = np.zeros(problem.num_nodes)
    for held in (problem.weights, problem.states):
        np.add.at(need, held.pin_node, held.num_bytes[held.pin_item])
    node, largest = int(need.argmax()), int(problem.memory_bytes.argmax())
    lacking = need[node] - problem.memory_bytes[largest]
    if lacking <= 0:
        return None
    step = next(s for s, nodes in enumerate(problem.node_of) if (nodes == node).any())
    launch = int(np.flatnonzero(problem.node_of[step] == node)[0])
    trace = problem.unit.graphs[step].trace
    what = f"launch {launch} of {trace.step.kind} ({trace.kernel_of(launch).name})"
    room = units.size(problem.memory_bytes[largest])
    message = (
        f"{what} and what must be with it need {units.size(need[node])}; the largest device, "
        f"{problem.cluster.names[largest]}, has {room}, {_lacks(lacking)}"
    )
    return PlanInfeasible(message, "Add a larger device, or lower the batch or the context.")


def _devices(problem: Problem) -> str:
    names = problem.cluster.names
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names)} together have"


def _lacks(num_bytes: float) -> str:
    return f"{units.size(num_bytes)} too little"


def _remedy(lacking: float) -> str:
    return f"Add a device with {units.size(lacking)} or more, or lower the batch or the context."
