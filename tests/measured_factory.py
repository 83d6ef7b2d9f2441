"""A timer that runs nothing, and stores in a temporary folder, for tests of measuring."""

from collections.abc import Callable
from pathlib import Path

from tessera.errors import CannotTime, DeviceGone
from tessera.ir import Device, DeviceKind
from tessera.profile.store import Enough, Machine, Store

H200 = Device("cuda:0", DeviceKind.CUDA, "h200", 141_000_000_000)
CPU = Device("cpu", DeviceKind.CPU, "", 1 << 34)


class FakeTimer:
    """Answers with given times and remembers what it was asked."""

    def __init__(
        self,
        us: Callable[[int], float] = lambda launch: 10.0,
        whole_us: float | None = None,
        mhz: float | None = 1500.0,
        failing: dict[int, str] | None = None,
        lost_at: int | None = None,
        device: str = "Fake GPU",
    ) -> None:
        self.cache_bytes = 1 << 20
        self.remarks: tuple[str, ...] = ()
        self.timed: list[int] = []
        self.ran: list[int] = []
        self.clocks: list[float | None] = []
        self._us, self._whole_us, self._mhz = us, whole_us, mhz
        self._failing, self._lost_at, self._device = failing or {}, lost_at, device

    def identity(self) -> dict[str, str]:
        """A device of some name."""
        return {"device": self._device, "driver": "1", "torch": "2"}

    def clock_mhz(self) -> float | None:
        """The next of `clocks`, else the clock it was made with."""
        return self.clocks.pop(0) if self.clocks else self._mhz

    def time(self, launch: int, cold: frozenset[int], enough: Enough) -> list[float]:
        """Ten equal samples."""
        if launch == self._lost_at:
            raise DeviceGone("cuda:0 stopped answering: CUDA error", "Run again.")
        if launch in self._failing:
            raise CannotTime(self._failing[launch])
        self.timed.append(launch)
        return [self._us(launch)] * 10

    def run(self, launch: int) -> None:
        """Remembers it."""
        self.ran.append(launch)

    def whole(self, enough: Enough) -> list[float]:
        """Ten equal samples."""
        if self._whole_us is None:
            raise CannotTime("the model's own inputs are not there")
        return [self._whole_us] * 10


def opener(path: Path) -> Callable[[Machine], Store]:
    """Opens the store at a path for whatever machine asks."""
    return lambda machine: Store(path, machine)
