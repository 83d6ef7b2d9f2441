"""Memory: a device's buffers, and tensors as views of them.

`Memory` is what a launcher runs on. `PlacedMemory` is that of a worker: every buffer has a place which stays,
so that launches can be bound to it, and what an operator returns is copied there, because operators make
memory of their own.
"""

from collections.abc import Callable, Mapping

import torch

from tessera.ir import Buffer, View

Storage = torch.UntypedStorage


def tensor_of(storage: Storage, view: View) -> torch.Tensor:
    """The tensor that a view means, over this storage."""
    empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
    return empty.set_(storage, view.offset, view.shape, view.stride)


def bytes_of(storage: Storage, start: int, stop: int) -> torch.Tensor:
    """Bytes [start, stop) of a storage as a flat tensor that shares its memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def allocate(size_bytes: int) -> Storage:
    """Fresh memory, aligned as torch aligns its own: results can depend on alignment."""
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def constant(buffer: Buffer, device: torch.device | None = None) -> Storage:
    """The memory of a constant that is carried in the trace; on the CPU unless told."""
    data = torch.frombuffer(bytearray.fromhex(buffer.constant_hex), dtype=torch.uint8)
    return data.to(device or torch.device("cpu"), copy=True).untyped_storage()


class Memory:
    """What one device holds for one microbatch: buffer -> storage, over the weights that all share."""

    def __init__(self, weights: dict[int, Storage]) -> None:
        self._weights = weights
        self._own: dict[int, Storage] = {}
        # Launch -> its call on this memory, where that can stay; see `bound`.
        self.calls: dict[int, Callable[[], None]] = {}

    def get(self, buffer: int) -> Storage:
        """The storage of a buffer that is here; a KeyError here is a bug in lowering."""
        own = self._own.get(buffer)
        return own if own is not None else self._weights[buffer]

    def is_fixed(self, buffer: int) -> bool:
        """True if the buffer is in the same place whenever it is here."""
        return False

    def put(self, buffer: int, storage: Storage) -> None:
        """A buffer's contents are here now."""
        self._own[buffer] = storage

    def free(self, buffer: int) -> None:
        """A buffer is needed no more."""
        self._own.pop(buffer, None)


class PlacedMemory(Memory):
    """What one device holds for the runs of one program in one microbatch: each buffer where it stays."""

    def __init__(self, weights: dict[int, Storage], places: Mapping[int, Storage]) -> None:
        super().__init__(weights)
        self._own.update(places)

    def is_fixed(self, buffer: int) -> bool:
        """True of all that is here."""
        return buffer in self._own or buffer in self._weights

    def put(self, buffer: int, storage: Storage) -> None:
        """Copies what an operator returned to its place."""
        place = self._own[buffer]
        if place.data_ptr() != storage.data_ptr():
            size = place.nbytes()
            bytes_of(place, 0, size).copy_(bytes_of(storage, 0, size))
