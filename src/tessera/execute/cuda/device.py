"""GpuDevice: one device of a cluster, opened on its GPU by this process.

A device is a whole card, a part (`cuda:N/sm=K`), or a card with another GPU's times (`cuda:N/as=GPU`). Every
process cuts a card alike: the driver splits it once into groups of a fixed size (say 15 of 8 SMs) and a rest
(12). A part is groups, and one part may take the rest; other sizes are refused with the possible ones. Parts
share memory, caches and bandwidth.

Streams and partitions are kept for the process and lent to one `GpuDevice` at a time, because libraries keep
a workspace per stream.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tessera.errors import WorkerError
from tessera.execute import driver
from tessera.execute.cuda.pace import PaceKernel
from tessera.ir import Device, DeviceKind


@dataclass(frozen=True, slots=True)
class Partition:
    ordinal: int
    num_sms: int
    context: ctypes.c_void_p

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Its kernels, also in graphs, run on these SMs only."""
        return driver.green_stream(self.ordinal, self.context, priority)


class GpuDevice:
    def __init__(self, devices: Sequence[Device], number: int) -> None:
        self.record, self.number = devices[number], number
        check_device(self.record, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        self.ordinal = self.record.ordinal
        self.card = driver.card(self.ordinal)
        self._partition = _part(devices, number)
        self._borrowed: list[tuple[Hashable, torch.cuda.Stream]] = []

    def compute_stream(self, priority: int = 0) -> torch.cuda.Stream:
        part = self._partition
        if part is None:
            return self.plain_stream(priority)
        return self._borrow((id(part), priority), lambda: part.stream(priority))

    def plain_stream(self, priority: int = 0) -> torch.cuda.Stream:
        key = "plain", self.ordinal, priority
        return self._borrow(key, lambda: driver.new_stream(self.ordinal, priority))

    @cached_property
    def priorities(self) -> tuple[int, int]:
        return driver.priorities(self.ordinal)

    @cached_property
    def pace_kernel(self) -> PaceKernel:
        with torch.cuda.device(self.ordinal):
            return PaceKernel()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.ordinal)

    def close(self) -> None:
        try:
            self.synchronize()
        except RuntimeError:  # the GPU has failed and reported it
            self._borrowed = []
        for key, stream in self._borrowed:
            _FREE.setdefault(key, []).append(stream)
        self._borrowed = []

    def _borrow(self, key: Hashable, make: Callable[[], torch.cuda.Stream]) -> torch.cuda.Stream:
        free = _FREE.setdefault(key, [])
        stream = free.pop() if free else make()
        self._borrowed.append((key, stream))
        return stream


_FREE: dict[Hashable, list[torch.cuda.Stream]] = {}
_PARTS: dict[tuple[int, tuple[int, ...]], list[Partition]] = {}


def _part(devices: Sequence[Device], number: int) -> Partition | None:
    if not devices[number].num_sms:
        return None
    ordinal = devices[number].ordinal
    sharing = [i for i, d in enumerate(devices) if d.ordinal == ordinal and d.num_sms]
    sizes = tuple(devices[i].num_sms for i in sharing)
    if (ordinal, sizes) not in _PARTS:
        _PARTS[ordinal, sizes] = cut(ordinal, sizes)
    return _PARTS[ordinal, sizes][sharing.index(number)]


def check_device(device: Device, num_gpus: int) -> None:
    if device.kind is not DeviceKind.CUDA:
        raise WorkerError(f"{device.name} is no CUDA device", "Plan again with cuda: devices.", device.name)
    if device.ordinal >= num_gpus:
        have = f"this machine has {num_gpus} GPUs" if num_gpus else "this machine has no CUDA device"
        raise WorkerError(have, "Run the plan on the machine it was made for.", device.name)


def cut(ordinal: int, sizes: Sequence[int]) -> list[Partition]:
    """Partitions that share no SM, in the order of the sizes."""
    groups, rest = driver.split_sms(driver.all_sms(ordinal))
    pieces = [*groups, *([rest] if rest.num_sms else [])]
    chosen = divide([g.num_sms for g in groups], rest.num_sms, sizes, f"cuda:{ordinal}")
    return [
        Partition(ordinal, size, driver.green_context(ordinal, [pieces[i] for i in part]))
        for size, part in zip(sizes, chosen, strict=True)
    ]


def divide(groups: Sequence[int], rest: int, sizes: Sequence[int], place: str) -> list[tuple[int, ...]]:
    """Indices of groups, and `len(groups)` for the rest."""
    if not groups:
        raise WorkerError("the driver offers no groups of SMs", "Use the whole card, without /sm=.", place)
    whole, each = sum(groups) + rest, groups[0]
    if sum(sizes) > whole:
        message = f"parts of {', '.join(map(str, sizes))} SMs do not fit the {whole} of the card"
        raise WorkerError(message, "Give smaller parts.", place)
    odd = [i for i, size in enumerate(sizes) if size % each]
    if not odd and sum(sizes) > sum(groups) and rest % each == 0:  # the rest is groups too
        odd = [max(range(len(sizes)), key=lambda i: sizes[i])]
    takes_rest = odd[0] if odd else None
    chosen, used = [], 0
    for index, size in enumerate(sizes):
        needed = size - rest if index == takes_rest else size
        if needed < 0 or needed % each or used + needed // each > len(groups):
            raise WorkerError(
                f"the driver cannot cut parts of {', '.join(map(str, sizes))} SMs: it offers {len(groups)} "
                f"groups of {each} and {rest} more",
                f"Use multiples of {each}; one part may have {rest} more.",
                place,
            )
        indices = range(used, used + needed // each)
        used += needed // each
        chosen.append((*indices, *([len(groups)] if index == takes_rest else [])))
    return chosen
