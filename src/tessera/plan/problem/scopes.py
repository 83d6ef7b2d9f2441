"""What module scopes say about launches: which belong to attention, which to which layer.

A scope is a dotted module path ("model.layers.0.self_attn.q_proj"). Attention scopes are found without
knowing the model: the deepest scope that holds all launches touching one state buffer, and the scope of
every attention kernel; of two scopes inside one another the inner one counts. A layer is named by the
path up to its first number ("model.layers.0"). Launches outside any layer go with the layer before them
in trace order, or with the first.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tessera import ir
from tessera.plan.problem.arrays import Ints

ATTENTION_KERNELS = ("scaled_dot_product", "attention", "flash_fwd")

Path = tuple[str, ...]


def attention(unit: ir.WorkUnit) -> tuple[npt.NDArray[np.bool_], ...] | None:
    """[step][launch]: inside an attention scope? None if there is no such scope, or nothing outside."""
    found: set[Path] = set()
    for graph in unit.graphs:
        found |= _attention_scopes(graph.trace)
    outer = {path[:n] for path in found for n in range(len(path))}
    inner = found - outer
    marks = tuple(
        np.array([_inside(_path(x.scope), inner) for x in g.trace.launches], dtype=np.bool_)
        for g in unit.graphs
    )
    num = sum(int(m.sum()) for m in marks)
    return marks if 0 < num < unit.num_launches else None


def layers(unit: ir.WorkUnit) -> tuple[tuple[Ints, ...], int] | None:
    """([step][launch]: number of its layer in order of appearance, layers); None with fewer than two."""
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


def _inside(path: Path, scopes: set[Path]) -> bool:
    return any(path[:n] in scopes for n in range(1, len(path) + 1))


def _layer(scope: str) -> Path | None:
    path = _path(scope)
    at = next((i for i, part in enumerate(path) if part.isdigit()), None)
    return None if at is None else path[: at + 1]


def _attention_scopes(trace: ir.Trace) -> set[Path]:
    touching: dict[int, set[str]] = {}
    found: set[Path] = set()
    for launch in trace.launches:
        for access in launch.accesses:
            if trace.buffers[access.buffer].kind is ir.BufferKind.STATE:
                touching.setdefault(access.buffer, set()).add(launch.scope)
        name = trace.kernels[launch.kernel].name
        if any(word in name for word in ATTENTION_KERNELS):
            found.add(_path(launch.scope))
    found |= {_common(scopes) for scopes in touching.values()}
    return {path for path in found if path}


def _common(scopes: Iterable[str]) -> Path:
    paths = sorted(_path(s) for s in scopes)
    first, last = paths[0], paths[-1]  # of sorted paths, what the extremes share all share
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same]
