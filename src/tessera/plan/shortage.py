"""Shortage: why nothing fits, by how much, and what to change.

Proved, where all weights once and the state of all slots exceed the memory of all devices together, or where
launches that must share a device need more than the largest one has. Else it is said of the best placement
that was found.
"""

import numpy as np

from tessera.errors import PlanInfeasible
from tessera.plan.problem import Column, Problem

GB = 1e9


def shortage(problem: Problem, found: Column, slots: int) -> PlanInfeasible:
    """The refusal of a problem that no placement found fits; `found` is the one that lacks least."""
    return _together(problem, slots) or _node(problem, slots) or _at_best(problem, found, slots)


def _together(problem: Problem, slots: int) -> PlanInfeasible | None:
    weights, state = float(problem.weights.num_bytes.sum()), float(problem.states.num_bytes.sum())
    memory = float(problem.memory_bytes.sum())
    lacking = weights + slots * state - memory
    if lacking <= 0:
        return None
    need = f"weights take {weights / GB:.3g} GB and the state of {slots} requests {slots * state / GB:.3g} GB"
    message = f"the model does not fit: {need}; {_devices(problem)} {memory / GB:.3g} GB, {_lacks(lacking)}"
    return PlanInfeasible(message, _remedy(memory - weights, state, lacking))


def _node(problem: Problem, slots: int) -> PlanInfeasible | None:
    """Launches that share a device, with all they must find there."""
    need = np.zeros(problem.num_nodes)
    for held, copies in ((problem.weights, 1), (problem.states, slots)):
        np.add.at(need, held.pin_node, copies * held.num_bytes[held.pin_item])
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
    return PlanInfeasible(message, "Add a larger device, or lower the batch, the context or the slots.")


def _at_best(problem: Problem, found: Column, slots: int) -> PlanInfeasible:
    weights, per_slot = problem.footprint((found,))
    excess = problem.excess_bytes((found,), slots)
    worst = int(excess.argmax())
    parts = f"weights {weights[worst] / GB:.3g} GB, state and temporaries of {slots} requests"
    message = (
        f"no placement found fits: at best {problem.cluster.names[worst]} needs {parts} "
        f"{slots * per_slot[worst] / GB:.3g} GB; it has {problem.memory_bytes[worst] / GB:.3g}, "
        f"{_lacks(float(excess[worst]))}"
    )
    left = float(problem.memory_bytes[worst] - weights[worst])
    return PlanInfeasible(message, _remedy(left, float(per_slot[worst]), float(excess[worst])))


def _devices(problem: Problem) -> str:
    names = problem.cluster.names
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names)} together have"


def _lacks(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3g} GB too little"


def _remedy(left: float, per_slot: float, lacking: float) -> str:
    """Fewer slots where that would do; else more memory."""
    slots = int(left // per_slot) if per_slot > 0 else 0
    if slots >= 1:
        return f"Use at most {slots} slots, lower the batch or the context, or add {lacking / GB:.3g} GB."
    return f"Add a device with {lacking / GB:.3g} GB or more, or lower the batch or the context."
