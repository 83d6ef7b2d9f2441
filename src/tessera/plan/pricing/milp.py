"""Single placements as mixed-integer programs: the fastest, and the one that fits best.

    x[n, d] = 1 iff node n runs on device d             binary; every node is placed once
    w[v, s, d] = 1 iff value v crosses from s to d      continuous, >= x[producer, s] + x[reader, d] - 1
    h[i, d] = 1 iff device d holds weight or state i    continuous, >= x[reader, d]

`best_placement` minimises T, the bottleneck's busy time per request, within memory. `roomiest` minimises the
fullest device's shortage; above zero it proves that nothing fits. Temporaries are not counted. HiGHS stops at
a small gap or after an amount of work, never by time: a slow machine finds the same placement.
"""

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import block_array, coo_array, eye_array, kron

from tessera.errors import PlanInfeasible
from tessera.ir import units
from tessera.plan.arrays import Bools, Floats, Holdings, Ints, Labels, first_launch
from tessera.plan.problem import Column, Problem

# Relative gap below the error of costs; entries times nodes that end a search; entries of a program whose
# first node takes a minute.
GAP = 1e-3
MAX_WORK, MAX_ENTRIES = 1_000_000, 100_000


def best_placement(problem: Problem, microbatches: int = 1) -> tuple[Column, float] | None:
    """The fastest placement and a lower bound of its period in microseconds; None without one."""
    nodes, num = problem.num_nodes, problem.num_devices
    if num == 1:
        only = problem.alone(0)
        return only, float(only.busy_us.max())
    src, dst = np.nonzero(~np.eye(num, dtype=np.bool_))
    vals, held = problem.values, problem.resident(microbatches)
    scale = float(problem.load_us.sum(axis=0).min())
    producer, reader = _one_hot(vals.producer[vals.pin_value], nodes), _one_hot(vals.pin_node, nodes)
    crosses = kron(_one_hot(vals.pin_value, len(vals)), eye_array(len(src)))
    both = kron(producer, _one_hot(src, num)) + kron(reader, _one_hot(dst, num))
    num_busy = num + num * num
    load = _sums(problem.load_us / scale, np.arange(num), num_busy)
    wire = _sums(problem.wire_us[:, src, dst] / scale, num + problem.link_row[src * num + dst], num_busy)
    reads, holds, full, room = _memory(problem, held, _one_hot(held.pin_node, nodes))
    rows = [
        [both, -crosses, None, None],
        [load, wire, None, -np.ones((num_busy, 1))],
        [reads, None, -holds, None],
        [None, None, full, None],
    ]
    upper = np.concatenate([np.ones(both.shape[0]), np.zeros(num_busy + reads.shape[0]), room])
    solution = _solved(rows, upper, problem.allowed, nodes, num)
    if solution is None or solution.x is None:
        return None
    labels = solution.x[: nodes * num].reshape(nodes, num).argmax(axis=1).astype(np.int64)
    return problem.column(labels), float(solution.mip_dual_bound or 0.0) * scale


def roomiest(problem: Problem) -> tuple[Column, float]:
    """The least shortage for one request and its proved minimum, in bytes."""
    held, num = problem.resident(1.0), problem.num_devices
    load = problem.load_us if problem.allowed is None else np.where(problem.allowed, problem.load_us, np.inf)
    labels: Labels = load.argmin(axis=1).astype(np.int64)  # devices without residents
    nodes, at = np.unique(held.pin_node, return_inverse=True)
    if not len(nodes):
        return problem.column(labels), -float(problem.memory_bytes.min())
    reads, holds, full, room = _memory(problem, held, _one_hot(at, len(nodes)))
    rows = [[reads, -holds, None], [None, full, -np.ones((num, 1))]]
    upper = np.append(np.zeros(reads.shape[0]), room)
    allowed = None if problem.allowed is None else problem.allowed[nodes]
    solution = _solved(rows, upper, allowed, len(nodes), num)
    if solution is not None and solution.x is not None:
        labels[nodes] = solution.x[: len(nodes) * num].reshape(-1, num).argmax(axis=1)
    least = -np.inf if solution is None or solution.mip_dual_bound is None else float(solution.mip_dual_bound)
    return problem.column(labels), least * float(problem.memory_bytes.max())


def _solved(
    blocks: list[list[Any]], upper: Floats, allowed: Bools | None, nodes: int, num: int
) -> OptimizeResult | None:
    """Minimises the last variable, with every node placed once. None for a program that is too large."""
    placed = [kron(eye_array(nodes), np.ones((1, num))), *[None] * (len(blocks[0]) - 1)]
    rows = block_array([placed, *blocks], format="csr")
    rows.eliminate_zeros()
    if rows.nnz > MAX_ENTRIES:
        return None
    size, num_x = rows.shape[1], nodes * num
    goal, most = np.zeros(size), np.ones(size)
    goal[-1], most[-1] = 1.0, np.inf
    if allowed is not None:
        most[:num_x] = allowed.ravel()
    once = np.ones(nodes)
    return milp(
        goal,
        integrality=(np.arange(size) < num_x).astype(np.int64),
        bounds=Bounds(np.where(goal, -np.inf, 0.0), most),
        constraints=LinearConstraint(rows, [*once, *np.full(len(upper), -np.inf)], [*once, *upper]),
        options={"node_limit": MAX_WORK // rows.nnz, "mip_rel_gap": GAP},
    )


def _one_hot(columns: Ints, size: int) -> coo_array:
    row = np.arange(len(columns))
    return coo_array((np.ones(len(row)), (row, columns)), shape=(len(row), size))


def _sums(table: Floats, rows: Ints, num_rows: int) -> coo_array:
    """Column (i, j) has table[i, j] in rows[j]."""
    at = np.tile(rows, len(table)), np.arange(table.size)
    return coo_array((table.ravel(), at), shape=(num_rows, table.size))


def _memory(problem: Problem, held: Holdings, node_of: coo_array) -> tuple[Any, Any, Any, Floats]:
    """Who reads what, who holds what, bytes held, and room, as shares of the largest memory."""
    unit, by_device = float(problem.memory_bytes.max()), eye_array(problem.num_devices)
    item_of = _one_hot(held.pin_item, len(held.num_bytes))
    full = kron(coo_array(held.num_bytes[None] / unit), by_device)
    return kron(node_of, by_device), kron(item_of, by_device), full, problem.memory_bytes / unit


def shortage(problem: Problem, column: Column, least_bytes: float) -> PlanInfeasible:
    """`column` lacks least; `least_bytes` is the proved minimum."""
    weights, (per_microbatch,) = problem.footprints((column,))
    excess = problem.excess_bytes((column,), 1)
    worst = int(excess.argmax())
    lacking = max(float(excess[worst]), least_bytes)
    how = "no placement fits" if least_bytes > 0 else "no placement was found that fits"
    return _too_little(
        f"{how}: at best {problem.cluster.names[worst]} needs weights {units.size(weights[worst])}, "
        f"state and temporaries of 1 request {units.size(per_microbatch[worst])}; it has "
        f"{units.size(problem.memory_bytes[worst])}",
        lacking,
    )


def check_total(problem: Problem) -> None:
    """All devices together hold the model, and the largest one holds what must be together."""
    weights, state = float(problem.weights.num_bytes.sum()), float(problem.states.num_bytes.sum())
    memory = float(problem.memory_bytes.sum())
    lacking = weights + state - memory
    if lacking > 0:
        need = f"weights take {units.size(weights)} and the state of one request {units.size(state)}"
        names = problem.cluster.names
        holders = f"{names[0]} has" if len(names) == 1 else f"{', '.join(names)} together have"
        raise _too_little(f"the model does not fit: {need}; {holders} {units.size(memory)}", lacking)
    each = np.zeros(problem.num_nodes)
    for held in (problem.weights, problem.states):
        np.add.at(each, held.pin_node, held.num_bytes[held.pin_item])
    node, largest = int(each.argmax()), int(problem.memory_bytes.argmax())
    lacking = each[node] - problem.memory_bytes[largest]
    if lacking > 0:
        step, launch = first_launch(problem.node_of, node)
        trace, room = problem.unit.graphs[step].trace, units.size(problem.memory_bytes[largest])
        raise _too_little(
            f"launch {launch} of {trace.step.kind} ({trace.kernel_of(launch).name}) and what must be with it "
            f"need {units.size(each[node])}; the largest device, {problem.cluster.names[largest]}, has "
            f"{room}",
            lacking,
            "Add a larger device, or lower the batch or the context.",
        )


def _too_little(message: str, lacking: float, remedy: str = "") -> PlanInfeasible:
    size = units.size(lacking)
    remedy = remedy or f"Add a device with {size} or more, or lower the batch or the context."
    return PlanInfeasible(f"{message}, {size} too little", remedy)
