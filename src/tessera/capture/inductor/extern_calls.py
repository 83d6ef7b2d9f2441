"""ExternCalls: the operators that compiled code dispatches (library matrix products, attention, fallbacks).

An operator is a launch iff it writes an argument (by its schema) or returns storage nobody has seen;
otherwise it is a view. Allocations (`empty` and its kin) are neither: they make a temporary. Inductor itself
allocates without going through the dispatcher; such memory is seen when a launch first names it.

A call that draws random numbers reads and writes its device's generator (see `tessera.capture.rng`); compiled
code draws the seeds of its own generators by such a call.

Compiled code has no module calls left to follow, so a launch's scope (`scoped`) is the module of a weight
that only this launch reads; a launch that has no such weight belongs with the one before it.

Refused: reading a tensor's value on the host.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.ledger import Ledger
from tessera.capture.refuse import check_operator
from tessera.capture.rng import generator_of
from tessera.ir import BufferKind, Trace

ALLOCATORS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
)


class ExternCalls(TorchDispatchMode):
    """While active, writes every operator that is dispatched into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo must not take this mode for one of the program's."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a fake tensor about itself
            return func(*args, **kwargs)
        check_operator(func, args, kwargs, lambda value: isinstance(value, torch.Tensor))
        if func._schema.name in ALLOCATORS:
            result = func(*args, **kwargs)
            self._ledger.view(result)
            return result
        named = tuple((name, self._ledger.arg(value)) for name, value in kwargs.items())
        recorded = tuple(map(self._ledger.arg, args)), named
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        if func._schema.is_mutable or any(self._ledger.find(t) is None for t in tensors):
            generator = generator_of(func, args, kwargs)
            self._ledger.launch(self._ledger.operator(func, recorded, results, generator))
        return result


def scoped(trace: Trace) -> Trace:
    """Every launch with the module that it belongs to."""
    readers = Counter(b for launch in trace.launches for b in {a.buffer for a in launch.accesses})
    scope, launches = "", []
    for launch in trace.launches:
        own = [trace.buffers[a.buffer] for a in launch.accesses if readers[a.buffer] == 1]
        names = [b.name for b in own if b.kind is BufferKind.WEIGHT and not b.constant_hex]
        scope = names[0].rpartition(".")[0] if names else scope
        launches.append(replace(launch, scope=scope))
    return replace(trace, launches=tuple(launches))
