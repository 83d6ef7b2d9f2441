"""prepare: a model and devices in, plans for serving out: captured, priced, planned and checked, not started.

Only the process that workers are forked from is started, so that it has imported torch when they are wanted.

The work unit of serving is what a slot does for `rows` average requests: rows x ceil(prompt / chunk) chunks,
rows inserts and as many decodes as an answer has tokens. Without chunks, a prompt is read by decodes too; to
a model that sees, every request brings a picture. The unit is a served one (`WorkUnit.is_served`), so every
state has one home in all steps.

There is a plan for every policy wanted, over the same unit and costs; on one device, where nothing is to be
decided, there is the first one's only. Devices that keep their own time are measured, from the store where
they were measured before; a store that cannot be used is done without. Devices that compute on this
machine's CPU need the model to fit in it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tessera import flow
from tessera.adapt.avoid import without_devices
from tessera.capture import record
from tessera.capture.models.checkpoint import blamed_for_run
from tessera.errors import DeviceMemoryError, PlanInfeasible
from tessera.execute.footprint import Footprint, check_fits, footprints, ready_programs
from tessera.execute.hub import warm_up
from tessera.ir import Cluster, Costs, Objective, Plan, Trace, WorkUnit
from tessera.profile.measured import Clocks, Store, combine, default_store, measure, needs_measuring
from tessera.serve.steps import ROWS, SLOTS, Served, for_cpu, served

# Weights of a model that is computed on this machine's CPU.
MAX_BYTES = 4 << 30
# Share of a device's memory for weights and state; the rest is for temporaries.
ROOM = 0.8
POLICIES = (Objective.THROUGHPUT, Objective.LATENCY)


@dataclass(frozen=True, slots=True)
class Average:
    """An average request, in tokens: what the plans are made for."""

    prompt: int = 128
    output: int = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a service is planned for; None: a size that suits the model."""

    slots: int = SLOTS
    rows: int = ROWS
    capacity: int | None = None
    chunk: int | None = None
    average: Average = Average()
    # One plan each.
    policies: tuple[Objective, ...] = POLICIES
    # Of random weights; those of a folder are taken only if they are asked for.
    seed: int = 0
    random_weights: bool = False


@dataclass(frozen=True)
class Prepared:
    """A model with the plans to serve it by."""

    model: Served
    cluster: Cluster
    unit: WorkUnit
    costs: tuple[Costs, ...]
    plans: tuple[Plan, ...]
    footprints: tuple[Footprint, ...]
    # Measured time = modelled time x scale; 1 where no device is stretched.
    scale: float = 1.0
    # Policy -> tokens a second when served, modelled, where that was looked at.
    rehearsed: Mapping[str, float] = field(default_factory=dict)

    def without(self, lost: Sequence[str]) -> "Prepared":
        """The same service on the other devices, planned anew."""
        cluster, costs = without_devices(self.cluster, self.costs, lost)
        return replace(_planned(self.model, cluster, self.unit, costs, self.policies), scale=self.scale)

    def at(self, costs: tuple[Costs, ...]) -> "Prepared":
        """The same service planned anew at other costs."""
        return replace(_planned(self.model, self.cluster, self.unit, costs, self.policies), scale=self.scale)

    @property
    def policies(self) -> tuple[Objective, ...]:
        """What its plans are for."""
        return tuple(plan.objective for plan in self.plans)


def prepare(
    model: str,
    cluster: Cluster,
    wanted: Wanted,
    *,
    store: Path | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> Prepared:
    """Plans a service; `advance` hears what is done next, `store` keeps measurements."""
    warm_up()  # beside the capture and the planning
    advance(f"building {model}")
    with blamed_for_run(model):
        made = served(
            model,
            slots=wanted.slots,
            rows=wanted.rows,
            capacity=wanted.capacity,
            chunk=wanted.chunk,
            seed=wanted.seed,
            random_weights=wanted.random_weights,
            max_bytes=MAX_BYTES,
            room_bytes=ROOM * min(device.memory_bytes for device in cluster.devices),
        )
        for_cpu(made)
        advance("capturing its steps")
        traces = [record(workload) for workload in made.workloads.values()]
    unit = flow.make_unit(traces, counts_of(made, wanted.average))
    advance("pricing its launches")
    warn = _warning()
    costs = tuple(_price(trace, cluster, store or default_store(), advance, warn) for trace in traces)
    advance("planning")
    return _planned(made, cluster, unit, costs, wanted.policies)


def counts_of(model: Served, average: Average) -> tuple[int, ...]:
    """How often each step runs for `rows` average requests."""
    shape = model.shape
    if not shape.chunk:
        return shape.rows, max(1, average.prompt + average.output - 1)
    prompt = min(average.prompt, shape.capacity)
    counts = shape.rows * -(-prompt // shape.chunk), shape.rows, max(1, average.output - 1)
    return (shape.rows, *counts) if "encode" in model.workloads else counts


def _price(
    trace: Trace,
    cluster: Cluster,
    store: Path,
    advance: Callable[[str], None],
    warn: Callable[[str], None],
) -> Costs:
    found = {}
    for device in cluster.devices:
        if needs_measuring(device):
            advance(f"measuring {trace.step.kind} on {device.name}")
            timer = flow.make_timer(trace, device)
            found[device.name] = measure(
                trace,
                device,
                timer,
                lambda machine: Store(store, machine, Clocks.ANY, warn),
                lambda what: None,
            )
    return combine(trace, cluster.devices, found)[0]


def _warning() -> Callable[[str], None]:
    """Says what it hears first, and nothing after that."""
    said: list[str] = []

    def warn(what: str) -> None:
        if not said:
            print(f"warning: {what}; measurements are not kept for the next start", file=sys.stderr)
        said.append(what)

    return warn


def _planned(
    model: Served,
    cluster: Cluster,
    unit: WorkUnit,
    costs: tuple[Costs, ...],
    policies: tuple[Objective, ...],
) -> Prepared:
    wanted = policies if len(cluster.devices) > 1 else policies[:1]
    try:
        plans = tuple(flow.make_plan(unit, costs, cluster, x, model.shape.slots) for x in wanted)
        found = footprints(plans, [ready_programs(plan) for plan in plans])
        check_fits(plans, found)
    except (PlanInfeasible, DeviceMemoryError) as error:
        raise type(error)(error.message, _lower(model), error.place) from error
    return Prepared(model, cluster, unit, costs, plans, found)


def _lower(model: Served) -> str:
    """What to lower, in the words of serving, with what it is now."""
    shape = model.shape
    return (
        f"Lower --slots, --rows or --max-len (now {shape.slots}, {shape.rows} and {shape.capacity}), "
        "or add a device."
    )
