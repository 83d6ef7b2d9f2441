"""Extern calls: the operators that compiled code dispatches (library matrix products, attention, fallbacks).

An operator is a launch iff it writes an argument (by its schema) or returns storage nobody has seen;
otherwise it is a view. Allocations (`empty` and its kin) are neither: they make a temporary.

Refused: reading a tensor's value on the host, and drawing random numbers.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.inductor.ledger import Ledger, byte_region
from tessera.errors import CaptureError
from tessera.ir import Access, Arg, Kernel, Launch, Origin, arg_views

# These write their first argument, or `out`, without looking at it. All others that write, also read.
OVERWRITERS = frozenset({"aten::copy_", "aten::zero_", "aten::fill_"})
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
        if _draws(func, args, kwargs):
            raise CaptureError(
                f"{func} draws random numbers", "Draw them outside the step and pass them as an input."
            )
        if func._schema.name in ALLOCATORS:
            result = func(*args, **kwargs)
            self._ledger.view(result)
            return result
        given = any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values()))
        recorded = tuple(map(self._ledger.arg, args))
        named = tuple((k, self._ledger.arg(v)) for k, v in kwargs.items())
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        if given and not tensors and any(r is not None for r in results):
            raise CaptureError(
                f"{func} reads a tensor's value on the host", "Keep the decision on the device."
            )
        if func._schema.is_mutable or any(self._ledger.find(t) is None for t in tensors):
            self._launch(func, recorded, named, results)
        return result

    def _launch(
        self,
        func: Any,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        results: tuple[Any, ...] | list[Any],
    ) -> None:
        ledger = self._ledger
        fresh = {id(t) for t in results if isinstance(t, torch.Tensor) and ledger.find(t) is None}
        outputs = tuple(ledger.view(t) if isinstance(t, torch.Tensor) else None for t in results)
        accesses = _argument_accesses(func._schema, args, dict(kwargs))
        for tensor, view in zip(results, outputs, strict=True):
            touched = byte_region(view) if view is not None and id(tensor) in fresh else None
            if view is not None and touched is not None:
                accesses.append(Access(view.buffer, touched, write=True))
        kernel = ledger.kernel(Kernel(str(func), Origin.ATEN, str(func._schema)))
        ledger.launch(Launch(kernel, args, kwargs, outputs, tuple(accesses)))


def _argument_accesses(schema: Any, args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> list[Access]:
    """Reads and writes of the arguments, from the schema's alias annotations."""
    accesses = []
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and (schema.name in OVERWRITERS or argument.is_out))
        for view in arg_views(value):
            touched = byte_region(view)
            if touched is not None:
                accesses.append(Access(view.buffer, touched, read=reads, write=writes))
    return accesses


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call draws random numbers; an attention kernel whose dropout is zero does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value != 0.0)
    return True
