"""Shortage: why nothing fits, by how much, and what to change.

Proved, where weights once and the state of one request exceed the memory of all devices together, or where
launches that must share a device need more than the largest one has, or by the mixed-integer program of
`milp.roomiest`. It leaves temporaries out: where only they are too many, that is said of the placement found.
"""

import numpy as np

from tessera.errors import PlanInfeasible
from tessera.plan.problem import Column, Problem

GB = 1e9


def shortage(problem: Problem, found: Column, least_bytes: float) -> PlanInfeasible:
    """Why no placement fits with one request in flight; `found` lacks least, and `least_bytes` is proved."""
    return _at_best(problem, found, least_bytes)


def check_total(problem: Problem) -> None:
    """Raises PlanInfeasible where sums show that nothing fits."""
    error = _together(problem) or _node(problem)
    if error is not None:
        raise error


def _together(problem: Problem) -> PlanInfeasible | None:
    weights, state = float(problem.weights.num_bytes.sum()), float(problem.states.num_bytes.sum())
    memory = float(problem.memory_bytes.sum())
    lacking = weights + state - memory
    if lacking <= 0:
        return None
    need = f"weights take {weights / GB:.3g} GB and the state of one request {state / GB:.3g} GB"
    message = f"the model does not fit: {need}; {_devices(problem)} {memory / GB:.3g} GB, {_lacks(lacking)}"
    return PlanInfeasible(message, _remedy(lacking))


def _node(problem: Problem) -> PlanInfeasible | None:
    """Launches that share a device, with all they must find there."""
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
    room = (
        f"the largest device, {problem.cluster.names[largest]}, has {problem.memory_bytes[largest] / GB:.3g}"
    )
    message = f"{what} and what must be with it need {need[node] / GB:.3g} GB; {room}, {_lacks(lacking)}"
    return PlanInfeasible(message, "Add a larger device, or lower the batch or the context.")


def _at_best(problem: Problem, found: Column, least_bytes: float) -> PlanInfeasible:
    weights, per_microbatch = problem.footprint((found,))
    excess = problem.excess_bytes((found,), 1)
    worst = int(excess.argmax())
    lacking = max(float(excess[worst]), least_bytes)
    how = "no placement fits" if least_bytes > 0 else "no placement was found that fits"
    message = (
        f"{how}: at best {problem.cluster.names[worst]} needs weights {weights[worst] / GB:.3g} GB, "
        f"state and temporaries of 1 request {per_microbatch[worst] / GB:.3g} GB; it has "
        f"{problem.memory_bytes[worst] / GB:.3g}, {_lacks(lacking)}"
    )
    return PlanInfeasible(message, _remedy(lacking))


def _devices(problem: Problem) -> str:
    names = problem.cluster.names
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names)} together have"


def _lacks(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3g} GB too little"


def _remedy(lacking: float) -> str:
    return f"Add a device with {lacking / GB:.3g} GB or more, or lower the batch or the context."
