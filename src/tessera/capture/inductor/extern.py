"""Extern calls: the operators that compiled code dispatches (library matrix products, attention, fallbacks).

An operator is a launch iff it writes an argument (by its schema) or returns storage nobody has seen;
otherwise it is a view. Allocations (`empty` and its kin) are neither: they make a temporary.

A call that draws random numbers reads and writes its device's generator (see `tessera.capture.rng`); compiled
code draws the seeds of its own generators by such a call.

Refused: reading a tensor's value on the host.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.inductor.ledger import Ledger
from tessera.capture.refuse import check_operator
from tessera.capture.rng import generator_of, size_of
from tessera.capture.schema import argument_accesses, byte_region
from tessera.ir import Access, Arg, Kernel, Launch, Origin, Region

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
        recorded = tuple(map(self._ledger.arg, args))
        named = tuple((k, self._ledger.arg(v)) for k, v in kwargs.items())
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        if func._schema.is_mutable or any(self._ledger.find(t) is None for t in tensors):
            self._launch(func, recorded, named, results, generator_of(func, args, kwargs))
        return result

    def _launch(
        self,
        func: Any,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        results: tuple[Any, ...] | list[Any],
        generator: str,
    ) -> None:
        ledger = self._ledger
        fresh = {id(t) for t in results if isinstance(t, torch.Tensor) and ledger.find(t) is None}
        outputs = tuple(ledger.view(t) if isinstance(t, torch.Tensor) else None for t in results)
        accesses = argument_accesses(func._schema, args, dict(kwargs))
        for tensor, view in zip(results, outputs, strict=True):
            touched = byte_region(view) if view is not None and id(tensor) in fresh else None
            if view is not None and touched is not None:
                accesses.append(Access(view.buffer, touched, write=True))
        if generator:
            state = Region(0, size_of(generator))
            accesses.append(Access(ledger.generator(generator), state, read=True, write=True))
        kernel = ledger.kernel(Kernel(str(func), Origin.ATEN, str(func._schema)))
        ledger.launch(Launch(kernel, args, kwargs, outputs, tuple(accesses)))
