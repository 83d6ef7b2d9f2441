"""Ledger: the launches of a step while they are being recorded, and which storage is which buffer.

Tensors are told apart by storage identity. A storage that appears for the first time while the compiled
code runs is memory that code allocated (Inductor allocates without going through the dispatcher), hence a
temporary; everything that existed before must have been declared.

Compiled code has no module calls left to follow, so a launch's scope is the module of a weight that only
this launch reads; a launch that has no such weight belongs with the one before it.

`ExternCalls` sees the operators that compiled code dispatches (library matrix products, attention,
fallbacks). An operator is a launch iff it writes an argument (by its schema) or returns storage nobody has
seen; otherwise it is a view. Allocations (`empty` and its kin) are neither: they make a temporary.

A call that draws random numbers reads and writes its device's generator (see `tessera.capture.rng`); compiled
code draws the seeds of its own generators by such a call.

Refused: reading a tensor's value on the host.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture.refuse import check_operator, check_tensor
from tessera.capture.rng import generator_of, size_of
from tessera.capture.schema import MAX_CONSTANT_BYTES, argument_accesses, byte_region, symbol_of, view_of
from tessera.errors import CaptureError
from tessera.ir import (
    Access,
    Arg,
    Buffer,
    BufferKind,
    Kernel,
    Launch,
    Origin,
    Region,
    Step,
    Trace,
    View,
)


class Ledger:
    """What has been launched so far."""

    def __init__(self, recorded_on: str = "cpu") -> None:
        self._recorded_on = recorded_on
        # A weak reference keeps the storage's identity from being handed out again, not its memory.
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._numbers: dict[Kernel, int] = {}
        self.buffers: list[Buffer] = []
        self.launches: list[Launch] = []
        # Buffers that some launch has written, or that were given.
        self.filled: set[int] = set()

    # Buffers ------------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> int | None:
        """The buffer of a tensor, or None if its storage is new."""
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def declare(self, kind: BufferKind, tensors: Mapping[str, torch.Tensor]) -> None:
        """Storages that exist before the step, by name."""
        for name, tensor in tensors.items():
            if self.find(tensor) is not None:
                raise CaptureError(
                    f"{kind} '{name}' shares its memory with another tensor handed to the step",
                    "Give each its own memory with .clone().",
                )
            self._add(tensor, Buffer(name, kind, tensor.untyped_storage().nbytes()))
            self.filled.add(len(self.buffers) - 1)

    def declare_constant(self, tensor: torch.Tensor) -> None:
        """A tensor of the compiled code that is neither weight, input nor state."""
        if self.find(tensor) is not None:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() > MAX_CONSTANT_BYTES:
            raise CaptureError(
                f"a tensor of {storage.nbytes()} bytes is neither weight, input nor state",
                "Register it on its module with register_buffer.",
            )
        contents = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        name = f"constant.{len(self.buffers)}"
        data = bytes(contents.tolist()).hex()
        self._add(tensor, Buffer(name, BufferKind.WEIGHT, storage.nbytes(), data))
        self.filled.add(len(self.buffers) - 1)

    def generator(self, name: str) -> int:
        """The buffer of a generator's state; see `tessera.capture.rng`."""
        for index, buffer in enumerate(self.buffers):
            if buffer.name == name:
                return index
        self.buffers.append(Buffer(name, BufferKind.STATE, size_of(name)))
        self.filled.add(len(self.buffers) - 1)
        return len(self.buffers) - 1

    def view(self, tensor: torch.Tensor) -> View:
        """A tensor as a view of its buffer; a new storage becomes a temporary."""
        if self.find(tensor) is None:
            size = tensor.untyped_storage().nbytes()
            self._add(tensor, Buffer(f"t{len(self.buffers)}", BufferKind.TEMPORARY, size))
        buffer = self.find(tensor)
        assert buffer is not None
        return view_of(tensor, buffer)

    def _add(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        check_tensor(tensor)
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = (StorageWeakRef(storage), len(self.buffers))
        self.buffers.append(buffer)

    # Launches -----------------------------------------------------------------------------------------

    def arg(self, value: Any) -> Arg:
        """An argument as the trace holds it."""
        if isinstance(value, torch.Tensor):
            return self.view(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple(self.arg(item) for item in value)
        symbol = symbol_of(value)
        if symbol is not None:
            return symbol
        raise CaptureError(
            f"an argument of type {type(value).__name__} cannot be recorded", "Pass it as a tensor."
        )

    def kernel(self, kernel: Kernel) -> int:
        """The number of a kernel in the trace; equal kernels have one."""
        return self._numbers.setdefault(kernel, len(self._numbers))

    def launch(self, launch: Launch) -> None:
        """Appends a launch, in program order."""
        self.launches.append(launch)
        self.filled |= {a.buffer for a in launch.accesses if a.write or a.atomic}

    @property
    def empty(self) -> Set[int]:
        """Buffers that hold nothing yet."""
        return set(range(len(self.buffers))) - self.filled

    def trace(self, step: Step, outputs: Mapping[str, torch.Tensor]) -> Trace:
        """The finished trace; `outputs` are what the step returned."""
        for name, tensor in outputs.items():
            if self.find(tensor) is None:
                raise CaptureError(
                    f"the step returns '{name}', which no launch made", "Return a result of the step."
                )
        views = tuple((name, self.view(tensor)) for name, tensor in outputs.items())
        returned = {view.buffer for _, view in views}
        buffers = tuple(
            replace(b, kind=BufferKind.OUTPUT) if i in returned and b.kind is BufferKind.TEMPORARY else b
            for i, b in enumerate(self.buffers)
        )
        kernels = tuple(self._numbers)
        return Trace(step, kernels, buffers, self._scoped(), views, recorded_on=self._recorded_on)

    def _scoped(self) -> tuple[Launch, ...]:
        readers = Counter(b for launch in self.launches for b in {a.buffer for a in launch.accesses})
        scope, scoped = "", []
        for launch in self.launches:
            own = [self.buffers[a.buffer] for a in launch.accesses if readers[a.buffer] == 1]
            names = [b.name for b in own if b.kind is BufferKind.WEIGHT and not b.constant_hex]
            scope = names[0].rpartition(".")[0] if names else scope
            scoped.append(replace(launch, scope=scope))
        return tuple(scoped)


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
