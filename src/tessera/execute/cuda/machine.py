"""Machine: a plan's devices opened on this machine's GPUs.

Several devices may be one card: parts of it, or the card under other GPUs' times. Weights and inputs then
exist once a card; state and everything computed exist once a device, so that what crosses from one device to
another is really copied.

Streams and partitions are kept for the whole process and lent to one machine at a time: libraries keep a
workspace for each stream they have seen, which a new stream for every run would multiply.
"""

from collections.abc import Callable, Hashable, Sequence
from types import TracebackType

import torch

from tessera.errors import WorkerError
from tessera.execute.cuda import driver
from tessera.execute.cuda.partition import Partition, cut
from tessera.execute.cuda.turnstile import Turnstile
from tessera.ir import Device, DeviceKind


class Machine:
    """The devices, their partitions and every stream made for them; use it in a `with` statement."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        check_devices(self.devices, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        # device -> its part of the card, if it is one
        self._partitions = _partitions(self.devices)
        self._borrowed: list[tuple[Hashable, torch.cuda.Stream]] = []
        self._turnstiles: dict[int, Turnstile] = {}

    def __enter__(self) -> "Machine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def ordinals(self) -> tuple[int, ...]:
        """The GPUs that take part."""
        return tuple(sorted({d.ordinal for d in self.devices}))

    def card(self, device: int) -> torch.device:
        """The GPU that a device is, or is a part of."""
        return driver.card(self.devices[device].ordinal)

    def compute_stream(self, device: int, priority: int = 0) -> torch.cuda.Stream:
        """A stream for launches of a device, which nobody else has."""
        partition = self._partitions.get(device)
        if partition is None:
            return self.plain_stream(self.devices[device].ordinal, priority)
        return self._borrow((id(partition), priority), lambda: partition.stream(priority))

    def plain_stream(self, ordinal: int, priority: int = 0) -> torch.cuda.Stream:
        """A stream of a GPU, bound to no part of it, which nobody else has."""
        return self._borrow(("plain", ordinal, priority), lambda: driver.new_stream(ordinal, priority))

    def turnstile(self, ordinal: int) -> Turnstile:
        """The turnstile kernel of a GPU."""
        if ordinal not in self._turnstiles:
            with torch.cuda.device(ordinal):
                self._turnstiles[ordinal] = Turnstile()
        return self._turnstiles[ordinal]

    def synchronize(self) -> None:
        """Waits for all work on all GPUs that take part."""
        for ordinal in self.ordinals:
            torch.cuda.synchronize(ordinal)

    def close(self) -> None:
        """Waits for the GPUs, then gives the streams back."""
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


# Streams that no machine has, by what they are bound to.
_FREE: dict[Hashable, list[torch.cuda.Stream]] = {}
# Parts of cards by (ordinal, sizes).
_PARTS: dict[tuple[int, tuple[int, ...]], list[Partition]] = {}


def _partitions(devices: Sequence[Device]) -> dict[int, Partition]:
    found: dict[int, Partition] = {}
    for ordinal in sorted({d.ordinal for d in devices}):
        here = [i for i, d in enumerate(devices) if d.ordinal == ordinal and d.num_sms]
        sizes = tuple(devices[i].num_sms for i in here)
        if here and (ordinal, sizes) not in _PARTS:
            _PARTS[ordinal, sizes] = cut(ordinal, sizes)
        if here:
            found.update(zip(here, _PARTS[ordinal, sizes], strict=True))
    return found


def check_devices(devices: Sequence[Device], num_gpus: int) -> None:
    """Raises unless every device is a CUDA device whose GPU is here."""
    for device in devices:
        if device.kind is not DeviceKind.CUDA:
            raise WorkerError(
                "a run on GPUs has CUDA devices only", "Plan again with cuda: devices.", device.name
            )
        if device.ordinal >= num_gpus:
            have = f"this machine has {num_gpus} GPUs" if num_gpus else "this machine has no CUDA device"
            raise WorkerError(have, "Run the plan on the machine it was made for.", device.name)
