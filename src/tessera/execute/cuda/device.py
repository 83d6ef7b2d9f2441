"""GpuDevice: one device of a cluster, opened on its GPU by this process.

A device is a whole card, a part of one (`cuda:N/sm=K`), or a card under another GPU's times
(`cuda:N/as=GPU`). Parts of one card are cut alike by every process that opens one of them, so that no two
share an SM.

Streams and partitions are kept for the whole process and lent to one `GpuDevice` at a time: libraries keep a
workspace for each stream they have seen, which a new stream for every run would multiply.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

import torch

from tessera.errors import WorkerError
from tessera.execute.cuda import driver
from tessera.execute.cuda.partition import Partition, cut
from tessera.execute.cuda.turnstile import Turnstile
from tessera.ir import Device, DeviceKind


class GpuDevice:
    """The device, and every stream made for it; `close` gives the streams back."""

    def __init__(self, devices: Sequence[Device], number: int) -> None:
        self.record, self.number = devices[number], number
        check_device(self.record, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        self.ordinal = self.record.ordinal
        self.card = driver.card(self.ordinal)
        self._partition = _part(devices, number)
        self._borrowed: list[tuple[Hashable, torch.cuda.Stream]] = []

    def compute_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A stream for launches, which nobody else has."""
        part = self._partition
        if part is None:
            return self.plain_stream(priority)
        return self._borrow((id(part), priority), lambda: part.stream(priority))

    def plain_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A stream of the card, bound to no part of it, which nobody else has."""
        return self._borrow(
            ("plain", self.ordinal, priority), lambda: driver.new_stream(self.ordinal, priority)
        )

    @cached_property
    def priorities(self) -> tuple[int, int]:
        """(least, greatest) of streams."""
        return driver.priorities(self.ordinal)

    @cached_property
    def turnstile(self) -> Turnstile:
        """The kernel that keeps time."""
        with torch.cuda.device(self.ordinal):
            return Turnstile()

    def synchronize(self) -> None:
        """Waits for all work of this process on the card."""
        torch.cuda.synchronize(self.ordinal)

    def close(self) -> None:
        """Waits for the card, then gives the streams back."""
        try:
            self.synchronize()
        except RuntimeError:  # a GPU that has failed: its work is over, and its error was told already
            self._borrowed = []
        for key, stream in self._borrowed:
            _FREE.setdefault(key, []).append(stream)
        self._borrowed = []

    def _borrow(self, key: Hashable, make: Callable[[], torch.cuda.Stream]) -> torch.cuda.Stream:
        free = _FREE.setdefault(key, [])
        stream = free.pop() if free else make()
        self._borrowed.append((key, stream))
        return stream


# Streams that no device has, by what they are bound to.
_FREE: dict[Hashable, list[torch.cuda.Stream]] = {}
# Parts of cards by (ordinal, sizes).
_PARTS: dict[tuple[int, tuple[int, ...]], list[Partition]] = {}


def _part(devices: Sequence[Device], number: int) -> Partition | None:
    """A device's part of its card; None if it is the whole card."""
    if not devices[number].num_sms:
        return None
    ordinal = devices[number].ordinal
    here = [i for i, d in enumerate(devices) if d.ordinal == ordinal and d.num_sms]
    sizes = tuple(devices[i].num_sms for i in here)
    if (ordinal, sizes) not in _PARTS:
        _PARTS[ordinal, sizes] = cut(ordinal, sizes)
    return _PARTS[ordinal, sizes][here.index(number)]


def check_device(device: Device, num_gpus: int) -> None:
    """Raises unless it is a CUDA device whose GPU is here."""
    if device.kind is not DeviceKind.CUDA:
        raise WorkerError(f"{device.name} is no CUDA device", "Plan again with cuda: devices.", device.name)
    if device.ordinal >= num_gpus:
        have = f"this machine has {num_gpus} GPUs" if num_gpus else "this machine has no CUDA device"
        raise WorkerError(have, "Run the plan on the machine it was made for.", device.name)
