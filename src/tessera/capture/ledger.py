"""Ledger: the launches of a step while they are being recorded, and which storage is which buffer.

Tensors are told apart by storage identity, never by what a schema says. A storage that appears for the first
time is memory that the step made, hence a temporary; what existed before was declared, or is a constant.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tessera.capture.refuse import check_tensor, fail
from tessera.capture.rng import size_of
from tessera.capture.schema import (
    MAX_CONSTANT_BYTES,
    Recorded,
    Results,
    argument_accesses,
    byte_region,
    contents,
    symbol_of,
    view_of,
)
from tessera.errors import CaptureError
from tessera.ir import Access, Arg, Buffer, BufferKind, Kernel, Launch, Origin, Region, Step, Trace, View


class Ledger:
    """What has been launched so far."""

    def __init__(self, recorded_on: str = "cpu") -> None:
        self._recorded_on = recorded_on
        # A weak reference keeps the storage's identity from being handed out again, not its memory.
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kernels: dict[Kernel, int] = {}
        self._operators: dict[Any, int] = {}
        self.buffers: list[Buffer] = []
        self.launches: list[Launch] = []
        # Buffers that some launch has written, or that were given.
        self._filled: set[int] = set()

    # Buffers ------------------------------------------------------------------------------------------

    def find(self, tensor: torch.Tensor) -> int | None:
        """The buffer of a tensor, or None if its storage is new."""
        known = self.storages.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def index(self, tensor: torch.Tensor) -> int:
        """The buffer of a tensor that is known to have one."""
        return self.storages[tensor.untyped_storage()._cdata][1]

    def know(self, tensor: torch.Tensor, buffer: int) -> None:
        """From now on the tensor's storage is this buffer."""
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = (StorageWeakRef(storage), buffer)

    def declare(self, kind: BufferKind, tensors: Mapping[str, torch.Tensor]) -> range:
        """Storages that exist before the step, by name; their buffers."""
        first = len(self.buffers)
        for name, tensor in tensors.items():
            if self.find(tensor) is not None:
                raise CaptureError(
                    f"{kind} '{name}' shares its memory with another tensor handed to the step",
                    "Give each its own memory with .clone().",
                )
            self._fill(self._add(tensor, Buffer(name, kind, tensor.untyped_storage().nbytes())))
        return range(first, len(self.buffers))

    def declare_constant(self, tensor: torch.Tensor) -> None:
        """A tensor that is neither weight, input nor state: its contents travel with the trace."""
        if self.find(tensor) is not None:
            return
        size = tensor.untyped_storage().nbytes()
        if size > MAX_CONSTANT_BYTES:
            fail(
                f"a tensor of {size} bytes is neither weight, input nor state",
                "Register it on its module with register_buffer.",
            )
        name = f"constant.{len(self.buffers)}"
        self._fill(self._add(tensor, Buffer(name, BufferKind.WEIGHT, size, contents(tensor))))

    def generator(self, name: str) -> int:
        """The buffer of a generator's state (see `tessera.capture.rng`); one not given is declared now."""
        for index, buffer in enumerate(self.buffers):
            if buffer.name == name:
                return index
        self.buffers.append(Buffer(name, BufferKind.STATE, size_of(name)))
        return self._fill(len(self.buffers) - 1)

    @property
    def empty(self) -> Set[int]:
        """Buffers that hold nothing yet."""
        return set(range(len(self.buffers))) - self._filled

    def view(self, tensor: torch.Tensor) -> View:
        """A tensor as a view of its buffer; a new storage becomes a temporary."""
        buffer = self.find(tensor)
        if buffer is None:
            size = tensor.untyped_storage().nbytes()
            buffer = self._add(tensor, Buffer(f"t{len(self.buffers)}", BufferKind.TEMPORARY, size))
        return view_of(tensor, buffer)

    def _add(self, tensor: torch.Tensor, buffer: Buffer) -> int:
        check_tensor(tensor)
        self.know(tensor, len(self.buffers))
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def _fill(self, buffer: int) -> int:
        self._filled.add(buffer)
        return buffer

    # Launches -----------------------------------------------------------------------------------------

    def arg(self, value: Any, view: Callable[[torch.Tensor], View] | None = None) -> Arg:
        """An argument as the trace holds it; `view` says what a tensor is, if not what `self.view` does."""
        if isinstance(value, torch.Tensor):
            return (view or self.view)(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | list):
            return tuple(self.arg(item, view) for item in value)
        symbol = symbol_of(value)
        if symbol is not None:
            return symbol
        fail(f"an argument of type {type(value).__name__} cannot be recorded", "Pass it as a tensor.")

    def kernel(self, kernel: Kernel) -> int:
        """The number of a kernel in the trace; equal kernels have one."""
        return self._kernels.setdefault(kernel, len(self._kernels))

    def operator(
        self, func: Any, recorded: Recorded, results: Results, generator: str = "", scope: str = ""
    ) -> Launch:
        """An operator that ran, as a launch: what its schema says of arguments, and all new memory written.

        `generator`: from which it drew.
        """
        args, kwargs = recorded
        fresh = {id(t) for t in results if isinstance(t, torch.Tensor) and self.find(t) is None}
        outputs = tuple(self.view(t) if isinstance(t, torch.Tensor) else None for t in results)
        accesses = argument_accesses(func._schema, args, dict(kwargs))
        for tensor, view in zip(results, outputs, strict=True):
            touched = byte_region(view) if view is not None and id(tensor) in fresh else None
            if view is not None and touched is not None:
                accesses.append(Access(view.buffer, touched, write=True))
        if generator:
            state = Region(0, size_of(generator))
            accesses.append(Access(self.generator(generator), state, read=True, write=True))
        if func not in self._operators:
            self._operators[func] = self.kernel(Kernel(str(func), Origin.ATEN, str(func._schema)))
        return Launch(self._operators[func], args, kwargs, outputs, tuple(accesses), scope)

    def launch(self, launch: Launch) -> None:
        """Appends a launch, in program order."""
        self.launches.append(launch)
        self._filled.update(a.buffer for a in launch.accesses if a.write or a.atomic)

    def trace(
        self,
        step: Step,
        outputs: Mapping[str, torch.Tensor],
        num_views: int = 0,
        aliases: tuple[tuple[str, int], ...] = (),
    ) -> Trace:
        """The finished trace; `outputs` are what the step returned."""
        for name, tensor in outputs.items():
            if self.find(tensor) is None:
                fail(f"the step returns '{name}', which no launch made", "Return a result of the step.")
        views = tuple((name, self.view(tensor)) for name, tensor in outputs.items())
        returned = {view.buffer for _, view in views}
        buffers = tuple(
            replace(b, kind=BufferKind.OUTPUT) if i in returned and b.kind is BufferKind.TEMPORARY else b
            for i, b in enumerate(self.buffers)
        )
        kernels, launches = tuple(self._kernels), tuple(self.launches)
        return Trace(step, kernels, buffers, launches, views, num_views, aliases, self._recorded_on)
