"""Pointer tables: tensors whose bytes are addresses of other tensors, for kernels that load pointers.

    read_table(tensor) -> (tensor, 0, tensor, ...), or why it cannot be read

The table is read when the kernel is launched; an entry becomes the tensor whose memory it leads into, from
there on, or stays a number if it is too small for an address. So the recorded launch names buffers, and
whoever runs it writes a table of its own, with the addresses that they have there.

Not read: a table with an address in no tensor's memory. Whether the table and what it leads to may change
from request to request is for the recorder to judge. Memory may be moved after a table was made, as weights
are when they are shared with workers; a list of tensors as the argument has no such trouble.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

# Below this, no tensor has an address.
_FAR = 1 << 40
_ENTRY_BYTES = 8

# Tensors that stand in the place of others for a while: (the other one, the one there now).
_standing: list[tuple[torch.Tensor, torch.Tensor]] = []


@contextlib.contextmanager
def standing_for(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """While entered, an address in the first of a pair means the same place in the second."""
    _standing.extend(pairs)
    try:
        yield
    finally:
        del _standing[len(_standing) - len(pairs) :]


def read_table(table: torch.Tensor) -> tuple[torch.Tensor | int, ...] | str:
    """The entries of a table; why it has none."""
    if isinstance(table, FakeTensor):
        return "it is fake and holds no addresses"
    if table.itemsize != _ENTRY_BYTES or table.storage_offset() or not table.is_contiguous():
        return "it is no whole tensor of int64"
    with no_dispatch():
        memory = _memory()
        entries: list[torch.Tensor | int] = []
        for number, address in enumerate(_bytes_of(table).view(torch.int64).tolist()):
            found = _entry(address, memory)
            if found is None:
                return f"its entry {number} is an address in no tensor's memory"
            entries.append(found)
    return tuple(entries)


def _bytes_of(table: torch.Tensor) -> torch.Tensor:
    size = table.untyped_storage().nbytes() // _ENTRY_BYTES * _ENTRY_BYTES
    raw = torch.empty(0, dtype=torch.uint8, device=table.device)
    return raw.set_(table.untyped_storage(), 0, (size,), (1,)).cpu()


def _entry(address: int, memory: Sequence[tuple[int, int, torch.Tensor]]) -> torch.Tensor | int | None:
    if abs(address) < _FAR:
        return address
    for old, new in _standing:
        start = address - old.data_ptr()
        if 0 <= start < _extent_bytes(old):
            return _from(new.untyped_storage(), int(new.storage_offset()) * new.itemsize + start, new.device)
    for begin, size, tensor in memory:
        if begin <= address < begin + size:
            return _from(tensor.untyped_storage(), address - begin, tensor.device)
    return None


def _from(storage: torch.UntypedStorage, offset: int, device: torch.device) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=device)
    return raw.set_(storage, offset, (storage.nbytes() - offset,), (1,))


def _extent_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _memory() -> list[tuple[int, int, torch.Tensor]]:
    """(address, bytes, tensor) of every storage that some tensor of this process holds."""
    found: dict[int, tuple[int, int, torch.Tensor]] = {}
    kinds = _with_subclasses(torch.Tensor) - _with_subclasses(FakeTensor)
    for item in gc.get_objects():
        if type(item) in kinds:  # of a million objects: as quick as can be
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse tensors have no storage
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.data_ptr(), storage.nbytes(), item
    return list(found.values())


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
