"""Placement constraints, and launch classes by module scope.

`PATTERN=DEVICES` pins launches to devices or forbids them there. A pattern (shell wildcards) matches a step
kind ("prefill"), a kernel name ("aten.mm.default", "mm"), a module path, its parents and parts
("model.layers.0", "self_attn"), `attention` (launches inside attention modules) or `gemm`. DEVICES is a
comma-separated list with wildcards. Launches that share a device follow the one that matches.

An attention scope is the deepest module path that holds all launches touching one state buffer, or the path
of an attention kernel; inner scopes win. A layer is the path up to its first number. Launches outside layers
belong to the layer before them, or to the first.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from tessera import ir
from tessera.errors import PlanInfeasible, TesseraError, UnknownName
from tessera.plan.arrays import Bools, Ints, first_launch

ATTENTION_KERNELS = ("scaled_dot_product", "attention", "flash_fwd")
GEMM = re.compile(r"(^|[._])(mm|addmm|bmm|baddbmm|matmul|linear|gemm|gemv)([._]|$)|grouped_mm|scaled_mm")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    pattern: str
    devices: tuple[str, ...]
    is_pin: bool

    def __str__(self) -> str:
        return f"{'--pin' if self.is_pin else '--forbid'} {self.pattern}={','.join(self.devices)}"


def parse_constraint(text: str, is_pin: bool) -> Constraint:
    pattern, equals, devices = (part.strip() for part in text.partition("="))
    names = tuple(name.strip() for name in devices.split(","))
    if not (pattern and equals and all(names)):
        option = "--pin" if is_pin else "--forbid"
        raise TesseraError(f"'{text}' is not PATTERN=DEVICE", "Write it as attention=emu:a100.", option)
    return Constraint(pattern, names, is_pin)


def allowed(
    unit: ir.WorkUnit,
    node_of: tuple[Ints, ...],
    num_nodes: int,
    constraints: tuple[Constraint, ...],
    devices: tuple[ir.Device, ...],
) -> Bools | None:
    """[node, device]; None: everything. CPUs run operators, no compiled kernels."""
    names = tuple(device.name for device in devices)
    free = np.ones((num_nodes, len(names)), dtype=np.bool_)
    hosts = [d for d, device in enumerate(devices) if device.is_cpu]
    for graph, nodes in zip(unit.graphs, node_of, strict=True) if hosts else ():
        free[np.ix_(nodes[compiled_launches(graph.trace)], np.array(hosts))] = False
    if not constraints:
        return None if free.all() else free
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


def compiled_launches(trace: ir.Trace) -> Ints:
    kernels = [kernel.origin is not ir.Origin.ATEN for kernel in trace.kernels]
    return np.flatnonzero([kernels[launch.kernel] for launch in trace.launches])


def check_constraints(unit: ir.WorkUnit, constraints: tuple[Constraint, ...]) -> None:
    for constraint in constraints:
        if not any(marks.any() for marks in _matches(unit, constraint.pattern)):
            kinds = ", ".join(dict.fromkeys(g.trace.step.kind for g in unit.graphs))
            examples = dict.fromkeys(_short(k.name) for g in unit.graphs for k in g.trace.kernels)
            message = f"no launch matches '{constraint.pattern}'"
            some = ", ".join(list(examples)[:6])
            remedy = f"Name a step ({kinds}), a kernel ({some}, ...), a module, attention or gemm."
            raise TesseraError(message, remedy, str(constraint))


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
    stuck = nodes[~free[nodes].any(axis=1)]
    if not len(stuck):
        return
    node = int(stuck[0])
    step, launch = first_launch(node_of, node)
    trace = unit.graphs[step].trace
    where = trace.launches[launch].scope or trace.step.kind
    against = f"contradicts {last[node]}" if node in last else "leaves no device"
    raise PlanInfeasible(
        f"'{constraint}' {against}: launch {launch} of {trace.step.kind} "
        f"({_short(trace.kernel_of(launch).name)} in {where}) could run nowhere",
        "Drop one of them, or name other devices.",
    )


def _matches(unit: ir.WorkUnit, pattern: str) -> tuple[Bools, ...]:
    if pattern == "attention" and (marks := attention_launches(unit)) is not None:
        return marks
    return tuple(
        np.array([_is_match(pattern, g.trace, i) for i in range(len(g.trace.launches))], dtype=np.bool_)
        for g in unit.graphs
    )


def _is_match(pattern: str, trace: ir.Trace, launch: int) -> bool:
    name = trace.kernel_of(launch).name
    if pattern == "gemm" and GEMM.search(name):
        return True
    if pattern == "attention" and any(word in name for word in ATTENTION_KERNELS):
        return True
    parts = trace.launches[launch].scope.split(".")
    paths = (".".join(parts[:n]) for n in range(2, len(parts) + 1))
    names = (trace.step.kind, name, _short(name), *parts, *paths)
    return any(fnmatchcase(x, pattern) for x in names)


def _short(name: str) -> str:
    """ "aten.mm.default" -> "mm"."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "aten" else name


def attention_launches(unit: ir.WorkUnit) -> tuple[npt.NDArray[np.bool_], ...] | None:
    """[step][launch]; None if all or none are."""
    scopes = {path for graph in unit.graphs for path in _attention_scopes(graph.trace)}
    inner = scopes - {path[:n] for path in scopes for n in range(len(path))}
    marks = tuple(
        np.array([not inner.isdisjoint(_parents(x.scope)) for x in g.trace.launches], dtype=np.bool_)
        for g in unit.graphs
    )
    num = sum(int(m.sum()) for m in marks)
    return marks if 0 < num < unit.num_launches else None


def layers_of(unit: ir.WorkUnit) -> tuple[tuple[Ints, ...], int] | None:
    """([step][launch] -> layer, number); None with fewer than two."""
    number: dict[Path, int] = {}
    ranks: list[Ints] = []
    for graph in unit.graphs:
        current = 0
        rank = np.zeros(len(graph.trace.launches), dtype=np.int64)
        for index, launch in enumerate(graph.trace.launches):
            layer = _layer(launch.scope)
            if layer is not None:
                current = number.setdefault(layer, len(number))
            rank[index] = current
        ranks.append(rank)
    return (tuple(ranks), len(number)) if len(number) > 1 else None


def _path(scope: str) -> Path:
    return tuple(scope.split(".")) if scope else ()


def _parents(scope: str) -> list[Path]:
    """With the scope itself."""
    path = _path(scope)
    return [path[:n] for n in range(1, len(path) + 1)]


def _layer(scope: str) -> Path | None:
    path = _path(scope)
    return next((path[: at + 1] for at, part in enumerate(path) if part.isdigit()), None)


def _attention_scopes(trace: ir.Trace) -> set[Path]:
    touching: dict[int, set[str]] = {}
    paths: set[Path] = set()
    for launch in trace.launches:
        for access in launch.accesses:
            if trace.buffers[access.buffer].kind is ir.BufferKind.STATE:
                touching.setdefault(access.buffer, set()).add(launch.scope)
        name = trace.kernels[launch.kernel].name
        if any(word in name for word in ATTENTION_KERNELS):
            paths.add(_path(launch.scope))
    paths |= {_common(scopes) for scopes in touching.values()}
    return paths - {()}


def _common(scopes: Iterable[str]) -> Path:
    """The longest path that all scopes begin with."""
    parts = zip(*map(_path, scopes), strict=False)
    return tuple(one for one, *_ in takewhile(lambda part: len({*part}) == 1, parts))
