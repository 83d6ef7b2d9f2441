"""Device, Link, Cluster: what there is to run on."""

from dataclasses import dataclass
from enum import StrEnum


class DeviceKind(StrEnum):
    """How a device computes and how it keeps time."""

    CPU = "cpu"  # computes on this machine's CPU, in real time
    EMU = "emu"  # computes on this machine's CPU, on another GPU's virtual clock
    CUDA = "cuda"  # a GPU of this machine


@dataclass(frozen=True, slots=True)
class Device:
    """One place where launches run, one at a time."""

    # Unique in its cluster: "cpu", "emu:a100", "cuda:0"; a second of a kind gets "#1".
    name: str
    kind: DeviceKind
    # Name of the GPU whose times it keeps ("a100"); empty for a CPU.
    gpu: str
    memory_bytes: int
    # Rent; None where no price is known.
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A directed wire between two devices. One message takes latency_us + bytes / gbps."""

    src: str
    dst: str
    # What joins them: "pcie4", "nvlink", ...
    name: str
    latency_us: float
    # Gigabytes (1e9 bytes) per second that arrive.
    gbps: float

    def wire_us(self, num_bytes: int) -> float:
        """How long the wire itself is busy with one message."""
        return num_bytes / (self.gbps * 1e3)

    def transfer_us(self, num_bytes: int) -> float:
        """From the start of the send to the arrival of the last byte."""
        return self.latency_us + self.wire_us(num_bytes)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the links between them."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]

    def link(self, src: int, dst: int) -> Link | None:
        """The link from device number `src` to device number `dst`, if there is one."""
        ends = (self.devices[src].name, self.devices[dst].name)
        return next((x for x in self.links if (x.src, x.dst) == ends), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Device names in order."""
        return tuple(d.name for d in self.devices)
