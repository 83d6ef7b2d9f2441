"""Devices, links, and the cost of each launch on each device."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

AWAY = -1
# Share of memory for weights and pages.
MEMORY_SHARE = 0.9
MAX_COST_US = 24 * 3600 * 1e6


class DeviceKind(StrEnum):
    CPU = "cpu"  # a NUMA node of this machine, real time
    EMU = "emu"  # this machine's CPU, virtual clock of a GPU or another CPU
    CUDA = "cuda"  # GPU of this machine: whole, a part, or dilated


@dataclass(frozen=True, slots=True)
class Device:
    """Runs one launch at a time."""

    # Unique: "cpu", "cpu/node=1", "emu:a100", "cuda:0", "cuda:0/sm=32", "cuda:0/as=l40s", "away:a100".
    # Repeats get "#1".
    name: str
    kind: DeviceKind
    # GPU or CPU whose times it keeps ("a100", "cpu-xeon-8480"); empty if unknown.
    gpu: str
    memory_bytes: int
    usd_per_hour: float | None = None
    tdp_w: float | None = None
    # CUDA ordinal or NUMA node; AWAY: first GPU of a worker on another machine.
    ordinal: int = 0
    # 0: all.
    num_sms: int = 0
    # Launches run on the card, dilated to the times of `gpu`.
    is_dilated: bool = False
    # 0: one.
    num_cores: int = 0

    @property
    def is_cpu(self) -> bool:
        return self.kind is DeviceKind.CPU or self.gpu.startswith("cpu-")


@dataclass(frozen=True, slots=True)
class Link:
    """Directed link. A message takes latency_us + bytes / gbps."""

    src: str
    dst: str
    name: str
    latency_us: float
    # 1e9 bytes per second.
    gbps: float
    # Links of one group carry one message at a time.
    group: str = ""
    # GB/s of weights fetched from page-locked memory; 0: `gbps`.
    fetch_gbps: float = 0.0
    # Slowdown of the source's launches while weights are fetched from its memory.
    fetch_slowdown: float = 1.0

    def fetch_us(self, num_bytes: float) -> float:
        return num_bytes / ((self.fetch_gbps or self.gbps) * 1e3)

    def wire_us(self, num_bytes: int) -> float:
        return num_bytes / (self.gbps * 1e3)


@dataclass(frozen=True, slots=True)
class Cluster:
    devices: tuple[Device, ...]
    links: tuple[Link, ...]

    def link(self, src: int, dst: int) -> Link | None:
        ends = (self.devices[src].name, self.devices[dst].name)
        return next((x for x in self.links if (x.src, x.dst) == ends), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.devices)


class Source(StrEnum):
    """Source of a cost, best first."""

    MEASURED = "measured"  # timed on that device
    TABLE = "table"  # interpolated in a public table
    FITTED = "fitted"  # model fitted to that GPU
    CLASS = "class"  # model fitted to other GPUs, with this data sheet


@dataclass(frozen=True, slots=True)
class Cost:
    us: float
    source: Source
    rel_error: float
    # Table, distance to its nearest point, corrections.
    detail: str = ""

    @property
    def is_sane(self) -> bool:
        return 0 <= self.us <= MAX_COST_US


@dataclass(frozen=True)
class Costs:
    trace_digest: str
    devices: tuple[Device, ...]
    costs: tuple[tuple[Cost, ...], ...]

    def us(self, launch: int, device: int) -> float:
        return self.costs[launch][device].us

    def busy_us(self, devices: Sequence[int]) -> list[float]:
        busy = [0.0] * len(self.devices)
        for launch, device in enumerate(devices):
            busy[device] += self.us(launch, device)
        return busy

    def total_us(self, device: int) -> float:
        return sum(row[device].us for row in self.costs)
