"""Placement, Lane, Plan: the planner's decision. Nothing else crosses from plan to execute.

A placement sends every launch of a work unit to a device. A plan is a mix of placements, its lanes: a share
of the requests follows each. Every figure in a plan is modelled.

Lanes may be of unlike batches. Then the plan holds the same steps several times, one variant per batch, and
its rates count work units of the first one: a lane of twice that batch counts double. Steps of all variants
are numbered one after another, the first variant's first.

Program: one lane of a plan lowered to an instruction list per device.

Every list is in trace order. A send follows its producer and a receive precedes its first reader, so every
wait points backwards in the trace and devices cannot deadlock. A value is sent once per destination device.

A send copies the bytes into memory of the transport, so both ends can continue. A buffer is freed after its
last use on a device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import count

import msgspec

from tessera.errors import MismatchError
from tessera.ir.cluster import Cluster, Costs
from tessera.ir.graph import Graph, WorkUnit


class Objective(StrEnum):
    """What a plan was made to be good at."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    COST = "cost"  # work per dollar
    ENERGY = "energy"  # work per joule


@dataclass(frozen=True, slots=True)
class Placement:
    """Launch -> device for every step of a work unit."""

    # devices[step][launch] is an index into the cluster's devices.
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One placement and how much of the work follows it."""

    placement: Placement
    # Work units of its own variant per second through this lane when the system is full.
    rate_per_s: float
    # Which of the plan's variants its requests are of; 0: the plan's own unit.
    variant: int = 0


def lane_sequence(shares: Sequence[float]) -> Iterator[int]:
    """Lane numbers without end, each lane as evenly spread as its share allows."""
    taken, total = [0] * len(shares), sum(shares)
    for turn in count(1):
        # The lane due first among those not ahead of their share; so no lane is ever one ahead.
        due = [i for i, share in enumerate(shares) if taken[i] * total < share * turn]
        lane = min(due or range(len(shares)), key=lambda i: ((taken[i] + 1) / shares[i], i))
        taken[lane] += 1
        yield lane


@dataclass(frozen=True, slots=True)
class Variant:
    """The steps of a work unit at one batch, with their prices."""

    unit: WorkUnit
    # One per step of the unit.
    costs: tuple[Costs, ...]

    @property
    def batch(self) -> int:
        """Rows of one request."""
        return self.unit.batch


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a coarser policy would reach under the same costs."""

    name: str
    # Work units per second; None if the policy does not apply to this work.
    throughput_per_s: float | None
    # One request alone, start to end; None likewise.
    latency_us: float | None
    # Rent of its devices for a thousand work units, and energy of one; None also where it is not known.
    usd_per_1k_units: float | None = None
    joules_per_unit: float | None = None


@dataclass(frozen=True, slots=True)
class Robust:
    """Throughput of the plan over samples of the costs' errors."""

    num_samples: int
    # Work units per second that 90 %, half and 10 % of the samples exceed.
    p10_per_s: float
    p50_per_s: float
    p90_per_s: float
    # Mean share of the rate that the best of all candidates would have given in a sample, had one known.
    regret: float


@dataclass(frozen=True)
class Plan:
    """Which device runs which launch, what that should give, and what it was compared with."""

    unit: WorkUnit
    cluster: Cluster
    # One per step of the unit.
    costs: tuple[Costs, ...]
    objective: Objective
    # Name of the policy that made it: "throughput", "latency", "data-parallel", ...
    policy: str
    lanes: tuple[Lane, ...]
    # Requests in flight that the figures below assume.
    microbatches: int
    # Work units per second by busy time, and as simulated with `microbatches` in flight.
    throughput_per_s: float
    simulated_per_s: float
    # No mix of placements can exceed this under the same costs.
    bound_per_s: float
    # One request alone, start to end.
    latency_us: float
    baselines: tuple[Baseline, ...] = ()
    # The lane that each microbatch follows; with more microbatches it begins again. Empty: by the lanes'
    # rates.
    lane_table: tuple[int, ...] = ()
    # Share of the simulated rate that whole microbatches cost, against requests that keep to the lanes'
    # rates.
    rounding_loss: float = 0.0
    # (requests in flight, work units per second as simulated) of these same lanes.
    by_microbatches: tuple[tuple[int, float], ...] = ()
    # The most requests in flight that memory allows; None: any number.
    max_microbatches: int | None = None
    robust: Robust | None = None
    # Energy of one work unit at the simulated rate, devices without a lane switched off; None: not known.
    joules_per_unit: float | None = None
    # What the user asked for: "--pin attention=emu:a100".
    constraints: tuple[str, ...] = ()
    # The same steps at other batches, for the lanes that say so; variant 0 is `unit` and `costs`.
    variants: tuple[Variant, ...] = ()

    @cached_property
    def every_variant(self) -> tuple[Variant, ...]:
        """Variants by the number that lanes refer to."""
        return (Variant(self.unit, self.costs), *self.variants)

    @cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The steps of all variants, one variant after the other: what `Program.step` counts."""
        return tuple(graph for variant in self.every_variant for graph in variant.unit.graphs)

    @cached_property
    def prices(self) -> tuple[Costs, ...]:
        """Costs of every step of `graphs`."""
        return tuple(costs for variant in self.every_variant for costs in variant.costs)

    @property
    def batch(self) -> int:
        """Rows of a work unit as rates count it."""
        return self.every_variant[0].batch

    @property
    def rows_per_s(self) -> float:
        """Rows of all batches per second, as simulated."""
        return self.batch * self.simulated_per_s

    def unit_of(self, lane: Lane) -> WorkUnit:
        return self.every_variant[lane.variant].unit

    def costs_of(self, lane: Lane) -> tuple[Costs, ...]:
        return self.every_variant[lane.variant].costs

    def batch_of(self, lane: Lane) -> int:
        return self.every_variant[lane.variant].batch

    def weight_of(self, lane: Lane) -> float:
        """Work units, as rates count them, in one request of a lane."""
        return self.batch_of(lane) / self.batch

    def first_step(self, lane: Lane) -> int:
        """Number of a lane's first step among the steps of all variants."""
        return lane.variant * len(self.unit.graphs)

    @property
    def used(self) -> tuple[int, ...]:
        """Devices that some lane uses, ascending: what has to be rented."""
        return tuple(sorted({d for x in self.lanes for step in x.placement.devices for d in step}))

    @property
    def usd_per_hour(self) -> float | None:
        """Rent of the devices in use; None if one has no price."""
        prices = [self.cluster.devices[d].usd_per_hour for d in self.used]
        known = [p for p in prices if p is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def usd_per_1k_units(self) -> float | None:
        rent = self.usd_per_hour
        return None if rent is None or not self.simulated_per_s else rent / 3.6 / self.simulated_per_s

    @property
    def gap(self) -> float:
        """How far below the bound the plan is, as a fraction of the bound."""
        return max(0.0, 1.0 - self.throughput_per_s / self.bound_per_s) if self.bound_per_s else 0.0


def need_one_batch(plan: Plan, what: str, place: str = "") -> None:
    """Raises MismatchError if lanes or steps of the plan are of unlike batches, which `what` cannot take."""
    need_whole_prefills(plan, what, place)
    if plan.variants:
        batches = ", ".join(str(variant.batch) for variant in plan.every_variant)
        remedy = "Plan without --batch-choices, from the traces of one batch."
        raise MismatchError(f"the plan has lanes of batch {batches}; {what} takes one batch", remedy, place)


def need_whole_prefills(plan: Plan, what: str, place: str = "") -> None:
    """Raises MismatchError if a prefill takes some of a request's rows only, which `what` cannot take."""
    for unit in (variant.unit for variant in plan.every_variant):
        if unit.is_in_parts:
            message = f"the plan prefills {unit.prefill_batch} of {unit.batch} rows at a time; {what} cannot"
            remedy = f"Plan with --batch {unit.batch} --prefill-batch {unit.batch}."
            raise MismatchError(message, remedy, place)


class Run(msgspec.Struct, frozen=True, tag=True):
    launch: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Start transfer number `transfer`; nothing behind it waits."""

    transfer: int


class Recv(msgspec.Struct, frozen=True, tag=True):
    """Wait until transfer number `transfer` has arrived, then own a copy of its bytes."""

    transfer: int


class Free(msgspec.Struct, frozen=True, tag=True):
    """This device needs the buffer no more."""

    buffer: int


Instruction = Run | Send | Recv | Free


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes [start, stop) of one version of one buffer, from one device to another."""

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
    """What every device does for one run of one step along one lane."""

    lane: int
    # Number of its step among those of all the plan's variants; see `Plan.graphs`.
    step: int
    # Number of runs of this step in one request.
    count: int
    # instructions[device]
    instructions: tuple[tuple[Instruction, ...], ...]
    transfers: tuple[Transfer, ...]
    # weights[device]: weight buffers that the device must hold.
    weights: tuple[tuple[int, ...], ...]
    # homes: (state buffer, device it lives on when the step starts).
    homes: tuple[tuple[int, int], ...]
    # outputs: (output name, device that holds it when the step ends).
    outputs: tuple[tuple[str, int], ...]
