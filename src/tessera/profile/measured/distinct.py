"""Which launches of a trace are alike, so that each is timed once, and what each finds in the cache.

Two launches are alike iff they run the same code on tensors of the same types, shapes, strides and alignment,
with the same plain arguments, the same sharing of memory among their arguments, and the same of these in the
cache. The values inside tensors, buffer names and the device recorded with the trace do not matter.

A launch finds a buffer in the cache iff earlier launches of the step touched at least half as many of its
bytes as this launch reads, while less than half of the cache's size passed through it since. Weights and
state that the step has not touched before are cold, as they are when one step follows another.
Not handled: what a launch leaves in the cache by accident; replacement that is not by age.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.ir import Arg, Kernel, Launch, Origin, Symbol, Trace, View, arg_views
from tessera.ir.trace import item_bytes
from tessera.profile.counts import work_of

# The part of the cache that still holds what was touched last; the rest is lost to sharing and conflicts.
USEFUL_CACHE = 0.5
# Torch picks other kernels for tensors that do not start at a multiple of this.
ALIGN = 16


@dataclass(frozen=True, slots=True)
class Distinct:
    """Launches that are alike."""

    # Names them in a store.
    key: str
    # The first of them is the one that is timed.
    launches: tuple[int, ...]
    # Buffers of the first that it finds outside the cache.
    cold: frozenset[int]


def distinct(trace: Trace, cache_bytes: int) -> tuple[Distinct, ...]:
    """The launches of a trace, alike ones together, in the order of their first."""
    cold = cold_buffers(trace, cache_bytes)
    names = [_kernel_name(k) for k in trace.kernels]
    groups: dict[str, list[int]] = {}
    for index, launch in enumerate(trace.launches):
        groups.setdefault(_key(names[launch.kernel], launch, cold[index]), []).append(index)
    return tuple(Distinct(key, tuple(rows), cold[rows[0]]) for key, rows in groups.items())


def cold_buffers(trace: Trace, cache_bytes: int) -> list[frozenset[int]]:
    """For every launch, the buffers that it reads and does not find in the cache."""
    window = cache_bytes * USEFUL_CACHE
    touched: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
    passed = 0.0
    found = []
    for launch in trace.launches:
        reads, writes = _bytes(launch, reading=True), _bytes(launch, reading=False)
        found.append(frozenset(b for b, n in reads.items() if _recent(touched[b], passed - window) < n / 2))
        passed += work_of(trace.kernels[launch.kernel], launch).num_bytes
        for buffer in {**reads, **writes}:
            touched[buffer].append((passed, max(reads.get(buffer, 0), writes.get(buffer, 0))))
    return found


def _recent(history: deque[tuple[float, int]], since: float) -> int:
    """Bytes touched since then; what is older is forgotten."""
    while history and history[0][0] <= since:
        history.popleft()
    return sum(n for _, n in history)


def _bytes(launch: Launch, reading: bool) -> dict[int, int]:
    sizes: dict[int, int] = defaultdict(int)
    for buffer, region in {
        (a.buffer, a.region) for a in launch.accesses if a.atomic or (a.read if reading else a.write)
    }:
        sizes[buffer] += region.num_bytes
    return sizes


def _kernel_name(kernel: Kernel) -> str:
    """An operator by its name; PTX by its text, since one name stands for many kernels."""
    if kernel.origin is Origin.ATEN:
        return kernel.name
    return f"{kernel.name}:{hashlib.sha256(kernel.ptx.encode()).hexdigest()}"


def _key(kernel: str, launch: Launch, cold: frozenset[int]) -> str:
    numbers: dict[int, int] = {}
    for view in _views(launch):
        numbers.setdefault(view.buffer, len(numbers))

    def words(arg: Arg) -> Any:
        if isinstance(arg, View):
            start = arg.offset * item_bytes(arg.dtype) % ALIGN
            return [numbers[arg.buffer], arg.dtype, arg.shape, arg.stride, start, arg.buffer in cold]
        if isinstance(arg, Symbol):
            return "device" if arg.kind == "device" else f"{arg.kind} {arg.name}"
        if isinstance(arg, tuple):
            return [words(item) for item in arg]
        return repr(arg)

    parts = [
        kernel,
        [words(a) for a in launch.args],
        [[name, words(a)] for name, a in launch.kwargs],
        [words(v) for v in launch.outputs],
        launch.grid,
        launch.block,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _views(launch: Launch) -> Iterable[View]:
    for arg in _args(launch):
        yield from arg_views(arg)
    yield from (view for view in launch.outputs if view is not None)


def _args(launch: Launch) -> Sequence[Arg]:
    return (*launch.args, *(value for _, value in launch.kwargs))
