"""Plans and programs. A plan is a mix of placements, its lanes, with shares of the requests. All figures are
modelled.

A program is one lane lowered to an instruction list per device, in trace order. A send follows its producer
and a receive precedes its first reader, so devices cannot deadlock. A value is sent once per destination.
Weights that a device does not hold are fetched from a host's memory into one of `SLOTS` places: the first
before the step, others after the launch that used their place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, cycle, islice

import msgspec

from tessera.ir.cluster import Cluster, Costs
from tessera.ir.graph import Graph, WorkUnit
from tessera.ir.units import total

# Launches whose fetched weights a device holds at once.
SLOTS = 3


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"
    COST = "cost"  # work per dollar
    ENERGY = "energy"  # work per joule

    def figure(self, per_s: float, usd_per_hour: float | None, joules: float | None) -> float:
        """Work per dollar or joule, zero if unknown; else work per second."""
        if self is Objective.COST:
            return per_s / usd_per_hour if usd_per_hour else 0.0
        if self is Objective.ENERGY:
            return 1.0 / joules if joules else 0.0
        return per_s


@dataclass(frozen=True, slots=True)
class Placement:
    # devices[step][launch] indexes the cluster's devices.
    devices: tuple[tuple[int, ...], ...]
    # (weight, host that keeps it): launches elsewhere fetch it in every run.
    fetched: tuple[tuple[str, int], ...] = ()

    def renumbered(self, numbers: Sequence[int] | Mapping[int, int]) -> "Placement":
        devices = tuple(tuple([numbers[d] for d in step]) for step in self.devices)
        return Placement(devices, tuple((name, numbers[host]) for name, host in self.fetched))


@dataclass(frozen=True, slots=True)
class Lane:
    placement: Placement
    # Work units per second at full load.
    rate_per_s: float


def lane_sequence(shares: Sequence[float]) -> Iterator[int]:
    """Endless lane numbers, spread evenly by share."""
    turns, total = [0] * len(shares), sum(shares)
    for turn in count(1):
        # Due lanes are not ahead of their share; next is the one that falls due first.
        due = [i for i, share in enumerate(shares) if turns[i] * total < share * turn]
        lane = min(due or range(len(shares)), key=lambda i: ((turns[i] + 1) / shares[i], i))
        turns[lane] += 1
        yield lane


@dataclass(frozen=True, slots=True)
class Baseline:
    """A coarser policy under the same costs; None: not applicable or unknown."""

    name: str
    throughput_per_s: float | None
    latency_us: float | None
    usd_per_1k_units: float | None = None
    joules_per_unit: float | None = None
    microbatches: int | None = None


@dataclass(frozen=True, slots=True)
class Robust:
    """Throughput over samples of the cost errors."""

    num_samples: int
    # Work units per second exceeded by 90 %, half and 10 % of the samples.
    p10_per_s: float
    p50_per_s: float
    p90_per_s: float
    # Mean share of the best candidate's rate.
    regret: float


@dataclass(frozen=True)
class Plan:
    unit: WorkUnit
    cluster: Cluster
    costs: tuple[Costs, ...]
    objective: Objective
    policy: str
    lanes: tuple[Lane, ...]
    # Requests in flight assumed below.
    microbatches: int
    # Work units per second, by busy time and simulated.
    throughput_per_s: float
    simulated_per_s: float
    # Bound of any mix of placements under the same costs.
    bound_per_s: float
    latency_us: float
    baselines: tuple[Baseline, ...] = ()
    # Lane of each microbatch, repeated. Empty: by the lanes' rates.
    lane_table: tuple[int, ...] = ()
    # Share of the simulated rate lost to whole microbatches.
    rounding_loss: float = 0.0
    # (requests in flight, simulated rate).
    by_microbatches: tuple[tuple[int, float], ...] = ()
    # Limit by memory; None: unlimited.
    max_microbatches: int | None = None
    robust: Robust | None = None
    # At the simulated rate, unused devices off.
    joules_per_unit: float | None = None
    # "--pin attention=emu:a100".
    constraints: tuple[str, ...] = ()
    # Pages that its microbatches share; empty: each has its own state.
    home: str = ""

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return self.unit.graphs

    @property
    def batch(self) -> int:
        return self.unit.batch

    @property
    def rows_per_s(self) -> float:
        return self.batch * self.simulated_per_s

    @property
    def used(self) -> tuple[int, ...]:
        return tuple(sorted({d for x in self.lanes for step in x.placement.devices for d in step}))

    @property
    def followers(self) -> tuple[int, ...]:
        """Microbatches of each lane; empty without a table."""
        if not self.lane_table:
            return ()
        order = list(islice(cycle(self.lane_table), self.microbatches))
        return tuple(map(order.count, range(len(self.lanes))))

    @property
    def usd_per_hour(self) -> float | None:
        return total(self.cluster.devices[d].usd_per_hour for d in self.used)

    @property
    def usd_per_1k_units(self) -> float | None:
        rent = self.usd_per_hour
        return None if rent is None or not self.simulated_per_s else rent / 3.6 / self.simulated_per_s

    @property
    def gap(self) -> float:
        """As a fraction of the bound."""
        return max(0.0, 1.0 - self.throughput_per_s / self.bound_per_s) if self.bound_per_s else 0.0


class Run(msgspec.Struct, frozen=True, tag=True):
    launch: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Starts a transfer without waiting."""

    transfer: int


class Recv(msgspec.Struct, frozen=True, tag=True):
    """Waits for a transfer and takes a copy of its bytes."""

    transfer: int


class Free(msgspec.Struct, frozen=True, tag=True):
    buffer: int


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Starts copying weights that the device does not hold; the launch waits for them."""

    launch: int


Instruction = Run | Send | Recv | Free | Fetch


@dataclass(frozen=True, slots=True)
class Transfer:
    value: int
    buffer: int
    start: int
    stop: int
    src: int
    dst: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Program:
    """One run of a step along a lane."""

    lane: int
    # Index into `Plan.graphs`; in a stepper over workers, into the steps of all its plans.
    step: int
    count: int
    instructions: tuple[tuple[Instruction, ...], ...]
    transfers: tuple[Transfer, ...]
    weights: tuple[tuple[int, ...], ...]
    # (state buffer, device at the start of the step).
    homes: tuple[tuple[int, int], ...]
    # (output name, device at the end of the step).
    outputs: tuple[tuple[str, int], ...]
    # Number of the home whose pages it uses; -1: none.
    home: int = -1
