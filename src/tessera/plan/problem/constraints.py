"""Constraints: what the user wants where. They bind every planner and every coarse policy.

`PATTERN=DEVICES` pins launches to devices, or forbids them there. A pattern (shell wildcards) is held
against a launch's step kind ("prefill"), its kernel's name ("aten.mm.default", "mm"), its module path,
every path above it and every part of it ("model.layers.0", "self_attn"), and two words:
  attention   launches inside attention modules, found as the policy attention-ffn finds them
  gemm        matrix multiplications, by the kernel's name
DEVICES is a comma-separated list, wildcards allowed. Launches that share a device anyway (they share
state, or none of them may move) follow whichever of them is matched.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from tessera import ir
from tessera.errors import PlanInfeasible, TesseraError, UnknownName
from tessera.plan.problem import scopes
from tessera.plan.problem.arrays import Bools, Ints

GEMM = re.compile(r"(^|[._])(mm|addmm|bmm|baddbmm|matmul|linear|gemm|gemv)([._]|$)|grouped_mm|scaled_mm")


@dataclass(frozen=True, slots=True)
class Constraint:
    """Launches that match `pattern` run on one of `devices` (a pin), or on none of them."""

    pattern: str
    devices: tuple[str, ...]
    is_pin: bool

    def __str__(self) -> str:
        return f"{'--pin' if self.is_pin else '--forbid'} {self.pattern}={','.join(self.devices)}"


def parse_constraint(text: str, is_pin: bool) -> Constraint:
    """From `PATTERN=DEVICES`."""
    pattern, equals, devices = (part.strip() for part in text.partition("="))
    names = tuple(name.strip() for name in devices.split(","))
    if not (pattern and equals and all(names)):
        option = "--pin" if is_pin else "--forbid"
        raise TesseraError(f"'{text}' is not PATTERN=DEVICE", "Write it as attention=emu:a100.", option)
    return Constraint(pattern, names, is_pin)


def constraints_of(plan: ir.Plan) -> tuple[Constraint, ...]:
    """What a plan was asked for, read back from its own words."""
    words = [text.partition(" ") for text in plan.constraints]
    return tuple(parse_constraint(constraint, option == "--pin") for option, _, constraint in words)


def allowed(
    unit: ir.WorkUnit,
    node_of: tuple[Ints, ...],
    num_nodes: int,
    constraints: tuple[Constraint, ...],
    names: tuple[str, ...],
) -> Bools | None:
    """[node, device]: may the node run there? None without constraints; PlanInfeasible if they contradict."""
    if not constraints:
        return None
    free = np.ones((num_nodes, len(names)), dtype=np.bool_)
    last: dict[int, Constraint] = {}
    for constraint in constraints:
        chosen = _devices(constraint, names)
        for step, marks in enumerate(_matches(unit, constraint.pattern)):
            nodes = np.unique(node_of[step][marks])
            before = free[nodes].copy()
            free[nodes] &= chosen if constraint.is_pin else ~chosen
            _check(unit, node_of, free, nodes, constraint, last)
            for node in nodes[(before != free[nodes]).any(axis=1)].tolist():
                last[node] = constraint
    return free


def check_constraints(unit: ir.WorkUnit, constraints: tuple[Constraint, ...]) -> None:
    """Refuses a constraint that no launch matches: it is a typing error, or belongs to another model."""
    for constraint in constraints:
        if not any(marks.any() for marks in _matches(unit, constraint.pattern)):
            kinds = ", ".join(dict.fromkeys(g.trace.step.kind for g in unit.graphs))
            examples = dict.fromkeys(_short(k.name) for g in unit.graphs for k in g.trace.kernels)
            message = f"no launch matches '{constraint.pattern}'"
            some = ", ".join(list(examples)[:6])
            remedy = f"Name a step ({kinds}), a kernel ({some}, ...), a module, attention or gemm."
            raise TesseraError(message, remedy, str(constraint))


def restricted_constraints(
    constraints: tuple[Constraint, ...], names: tuple[str, ...], kept: tuple[str, ...]
) -> tuple[Constraint, ...]:
    """The constraints as they read when some devices are kept; what concerns none of these is dropped."""
    found = []
    for constraint in constraints:
        chosen = _devices(constraint, names)
        left = tuple(n for n, is_chosen in zip(names, chosen, strict=True) if is_chosen and n in kept)
        if left:
            found.append(Constraint(constraint.pattern, left, constraint.is_pin))
    return tuple(found)


def _devices(constraint: Constraint, names: tuple[str, ...]) -> Bools:
    chosen = np.zeros(len(names), dtype=np.bool_)
    for word in constraint.devices:
        hits = [name == word or fnmatchcase(name, word) for name in names]
        if not any(hits):
            raise UnknownName("device", word, names)
        chosen |= np.array(hits)
    return chosen


def _check(
    unit: ir.WorkUnit,
    node_of: tuple[Ints, ...],
    free: Bools,
    nodes: Ints,
    constraint: Constraint,
    last: dict[int, Constraint],
) -> None:
    """PlanInfeasible if some node may run nowhere any more."""
    stuck = nodes[~free[nodes].any(axis=1)]
    if not len(stuck):
        return
    node = int(stuck[0])
    step = next(s for s, members in enumerate(node_of) if (members == node).any())
    launch = int(np.flatnonzero(node_of[step] == node)[0])
    trace = unit.graphs[step].trace
    where = trace.launches[launch].scope or trace.step.kind
    # Every device may be forbidden by one constraint alone.
    against = f"contradicts {last[node]}" if node in last else "leaves no device"
    raise PlanInfeasible(
        f"'{constraint}' {against}: launch {launch} of {trace.step.kind} "
        f"({_short(trace.kernel_of(launch).name)} in {where}) could run nowhere",
        "Drop one of them, or name other devices.",
    )


def _matches(unit: ir.WorkUnit, pattern: str) -> tuple[Bools, ...]:
    """[step][launch]: does the pattern mean it?"""
    if pattern == "attention":
        marks = scopes.attention(unit)
        if marks is not None:
            return marks
    return tuple(
        np.array([_is_match(pattern, g.trace, i) for i in range(len(g.trace.launches))], dtype=np.bool_)
        for g in unit.graphs
    )


def _is_match(pattern: str, trace: ir.Trace, launch: int) -> bool:
    name = trace.kernel_of(launch).name
    if pattern == "gemm" and GEMM.search(name):
        return True
    if pattern == "attention" and any(word in name for word in scopes.ATTENTION_KERNELS):
        return True
    parts = trace.launches[launch].scope.split(".")
    paths = (".".join(parts[:n]) for n in range(2, len(parts) + 1))
    names = (trace.step.kind, name, _short(name), *parts, *paths)
    return any(fnmatchcase(x, pattern) for x in names)


def _short(name: str) -> str:
    """ "aten.mm.default" -> "mm"; other names stay as they are."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "aten" else name
