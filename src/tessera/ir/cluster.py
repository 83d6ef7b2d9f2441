"""Device, Link, Cluster: what there is to run on.

Cost, Costs: what each launch costs on each device, and where the number came from.
"""

from dataclasses import dataclass
from enum import StrEnum

# Ordinal of a GPU of another machine.
AWAY = -1
# A launch that takes longer than a day is a mistake.
MAX_COST_US = 24 * 3600 * 1e6


class DeviceKind(StrEnum):
    """How a device computes and how it keeps time."""

    CPU = "cpu"  # computes on this machine's CPU, in real time
    EMU = "emu"  # computes on this machine's CPU, on another GPU's virtual clock
    CUDA = "cuda"  # a GPU of this machine, a part of one, or one dilated to another GPU's times


@dataclass(frozen=True, slots=True)
class Device:
    """One place where launches run, one at a time."""

    # Unique in its cluster: "cpu", "emu:a100", "cuda:0", "cuda:0/sm=32", "cuda:0/as=l40s",
    # "away:a100"; a second of a kind gets "#1".
    name: str
    kind: DeviceKind
    # Name of the GPU whose times it keeps ("a100"); empty for a CPU and for a card that no table knows.
    gpu: str
    # This device's share, where several are on one card.
    memory_bytes: int
    # Rent; None where no price is known.
    usd_per_hour: float | None = None
    # Board power by the data sheet; None where it is not known.
    tdp_w: float | None = None
    # Number of the CUDA GPU in this machine; AWAY: the first GPU that a worker on another machine sees.
    ordinal: int = 0
    # Number of SMs, where a CUDA device is a part of its card; 0: all.
    num_sms: int = 0
    # True iff launches run on the card and are dilated to the times of `gpu`, which is another one.
    is_dilated: bool = False


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
    # Links of one group share a bus: only one of them carries bytes at a time. Empty: a wire of its own.
    group: str = ""

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
        return tuple(d.name for d in self.devices)


class Source(StrEnum):
    """Where a number came from, best first."""

    MEASURED = "measured"  # timed on that device
    TABLE = "table"  # interpolated in a public measured table
    FITTED = "fitted"  # a model fitted to measurements of that GPU
    CLASS = "class"  # a model fitted to other GPUs, applied to this one's data sheet


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one launch on one device."""

    us: float
    source: Source
    # Expected relative error: 0.1 means that one should count on 10 %.
    rel_error: float
    # Table and distance to its nearest point; corrections that were applied, and where they were measured.
    detail: str = ""

    @property
    def is_sane(self) -> bool:
        """Finite, not negative, and at most a day."""
        return 0 <= self.us <= MAX_COST_US


@dataclass(frozen=True)
class Costs:
    """The price list of one trace."""

    # Digest of the trace that was priced; a plan made with another trace refuses these costs.
    trace_digest: str
    devices: tuple[Device, ...]
    # costs[launch][device]
    costs: tuple[tuple[Cost, ...], ...]

    def us(self, launch: int, device: int) -> float:
        return self.costs[launch][device].us

    def total_us(self, device: int) -> float:
        return sum(row[device].us for row in self.costs)
