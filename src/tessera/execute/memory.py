"""Memory: a device's buffers, and tensors as views of them."""

import torch

from tessera.ir import Buffer, View

Storage = torch.UntypedStorage


def tensor_of(storage: Storage, view: View) -> torch.Tensor:
    """The tensor that a view means, over this storage."""
    empty = torch.empty(0, dtype=getattr(torch, view.dtype))
    return empty.set_(storage, view.offset, view.shape, view.stride)


def bytes_of(storage: Storage, start: int, stop: int) -> torch.Tensor:
    """Bytes [start, stop) of a storage as a flat tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, start, (stop - start,), (1,))


def allocate(size_bytes: int) -> Storage:
    """Fresh memory, aligned as torch aligns its own: results can depend on alignment."""
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def constant(buffer: Buffer) -> Storage:
    """The memory of a constant that is carried in the trace."""
    data = bytearray.fromhex(buffer.constant_hex)
    return torch.frombuffer(data, dtype=torch.uint8).clone().untyped_storage()


class Memory:
    """What one device holds for one slot: buffer -> storage, over the weights all slots share."""

    def __init__(self, weights: dict[int, Storage]) -> None:
        self._weights = weights
        self._own: dict[int, Storage] = {}

    def get(self, buffer: int) -> Storage:
        """The storage of a buffer that is here; a KeyError here is a bug in lowering."""
        own = self._own.get(buffer)
        return own if own is not None else self._weights[buffer]

    def put(self, buffer: int, storage: Storage) -> None:
        """A buffer's contents are here now."""
        self._own[buffer] = storage

    def free(self, buffer: int) -> None:
        """A buffer is needed no more."""
        self._own.pop(buffer, None)
