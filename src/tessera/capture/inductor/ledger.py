"""Ledger: the launches of a step while they are being recorded, and which storage is which buffer.

Tensors are told apart by storage identity. A storage that appears for the first time while the compiled
code runs is memory that code allocated (Inductor allocates without going through the dispatcher), hence a
temporary; everything that existed before must have been declared.

Compiled code has no module calls left to follow, so a launch's scope is the module of a weight that only
this launch reads; a launch that has no such weight belongs with the one before it.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tessera.capture.refuse import check_tensor
from tessera.capture.rng import size_of
from tessera.capture.schema import MAX_CONSTANT_BYTES, symbol_of, view_of
from tessera.errors import CaptureError
from tessera.ir import (
    Arg,
    Buffer,
    BufferKind,
    Kernel,
    Launch,
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
