"""prepare: a model and devices in, plans for serving out: captured, priced, planned and checked, not started.

Only the process that workers are forked from is started, so that it has imported torch when they are wanted.
What captures and plans is imported where it is needed: a start by plans that were kept needs none of it.

The work unit of serving is what a microbatch does for `rows` average requests: the largest step as often as
their prompts need it, and the step that holds one token of each as often as an answer has tokens; every other
size once. To a model that sees, every request brings a picture. The unit is a served one
(`WorkUnit.is_served`), so every state has one home in all steps.

There is a plan for every policy wanted, over the same unit and costs; on one device, where nothing is to be
decided, there is the first one's only. Devices that keep their own time are measured, from the store where
they were measured before; a store that cannot be used is done without. Devices that compute on this
machine's CPU need the model to fit in it.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.adapt.drift import without_devices
from tessera.capture import place_of, record
from tessera.capture.models.checkpoint import blamed_for_run
from tessera.errors import DeviceMemoryError, PlanInfeasible, UnknownName
from tessera.execute.memory import check_fits, footprints, ready_programs
from tessera.execute.pipes import FORKSERVER, warm_up
from tessera.execute.setups import interprets
from tessera.execute.worker_stepper import MakeHub, WorkerStepper
from tessera.ir import Cluster, Costs, Objective, Plan, Trace, WorkUnit
from tessera.serve.kept_plans import KeptModel, KeptPlans, ServableModel, find, keep, key_of
from tessera.serve.pages import modest_bytes
from tessera.serve.records import MICROBATCHES, ROWS, Shape, step_name

if TYPE_CHECKING:
    from tessera.serve.steps import ServedModel

# Hears one line.
Told = Callable[[str], None]
# Weights of a model that is computed on this machine's CPU.
MAX_BYTES = 4 << 30
# A step that takes longer than this will never end.
STEP_TIMEOUT_S = 60.0
POLICIES = (Objective.THROUGHPUT, Objective.LATENCY)
# Policy that a service can be told to follow -> what it is planned for; auto has both, the monitor decides.
OBJECTIVES = {"auto": POLICIES, "throughput": POLICIES[:1], "latency": POLICIES[1:]}


@dataclass(frozen=True, slots=True)
class Average:
    """An average request, in tokens: what the plans are made for."""

    prompt: int = 128
    output: int = 64


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """What a service is planned for; None: a size that suits the model."""

    microbatches: int = MICROBATCHES
    rows: int = ROWS
    capacity: int | None = None
    max_batch_tokens: int | None = None
    # Of a microbatch's pages.
    pool_tokens: int | None = None
    # Of a device's memory, for weights and pages together; the rest is for temporaries.
    memory_share: float = 0.9
    average: Average = Average()
    # One plan each.
    policies: tuple[Objective, ...] = POLICIES
    # Of random weights; those of a folder are taken only if they are asked for.
    seed: int = 0
    random_weights: bool = False
    # Products of the same input are one.
    joined: bool = True

    def build(self, model: str, **limits: Any) -> "ServedModel":
        """The model in these sizes, within the limits of `served`."""
        from tessera.serve.steps import served

        return served(
            model,
            microbatches=self.microbatches,
            rows=self.rows,
            capacity=self.capacity,
            max_batch_tokens=self.max_batch_tokens,
            pool_tokens=self.pool_tokens,
            expected_length=self.average.prompt + self.average.output // 2,
            seed=self.seed,
            random_weights=self.random_weights,
            joined=self.joined,
            **limits,
        )


def objectives_of(policy: str) -> tuple[Objective, ...]:
    """What a service that follows this policy is planned for."""
    if policy not in OBJECTIVES:
        raise UnknownName("policy", policy, OBJECTIVES)
    return OBJECTIVES[policy]


@dataclass(frozen=True)
class Prepared:
    """A model with the plans to serve it by."""

    model: ServableModel
    cluster: Cluster
    unit: WorkUnit
    costs: tuple[Costs, ...]
    plans: tuple[Plan, ...]
    # Measured time = modelled time x scale; 1 where no device is dilated.
    scale: float = 1.0
    # Policy -> tokens a second when served, modelled, where that was looked at.
    rehearsed: Mapping[str, float] = field(default_factory=dict)
    # What it took to capture the steps.
    capture_s: float = 0.0

    @property
    def kept(self) -> KeptPlans:
        """What another start needs of it."""
        return KeptPlans(self.plans, self.scale, self.rehearsed, KeptModel.of(self.model))

    def workers(self, transport: str = "auto", hub: MakeHub | None = None) -> WorkerStepper:
        """A worker for every device, of this machine or as `hub` has them; not started yet."""
        return WorkerStepper(
            self.plans,
            self.model.weights(),
            microbatches=self.model.shape.microbatches,
            transport=transport,
            timeout_s=STEP_TIMEOUT_S,
            method=FORKSERVER,
            hub=hub,
            scale=self.scale,
        )

    def without(self, lost: Sequence[str]) -> "Prepared":
        """The same service on the other devices, planned anew."""
        cluster, costs = without_devices(self.cluster, self.costs, lost)
        return self._planned_anew(cluster, costs)

    def at(self, costs: tuple[Costs, ...]) -> "Prepared":
        """The same service planned anew at other costs."""
        return self._planned_anew(self.cluster, costs)

    def _planned_anew(self, cluster: Cluster, costs: tuple[Costs, ...]) -> "Prepared":
        policies = tuple(plan.objective for plan in self.plans)
        made = _planned(self.model, cluster, self.unit, costs, policies)
        return replace(made, scale=self.scale, capture_s=self.capture_s)


def prepare(
    model: str,
    cluster: Cluster,
    spec: ServeSpec,
    *,
    store: Path | None = None,
    kept: Path | None = None,
    advance: Told = lambda what: None,
) -> Prepared:
    """Plans a service; `advance` hears what is done next, `store` keeps measurements, `kept` plans."""
    warm_up()  # beside the capture and the planning
    pool_bytes = modest_bytes(spec.microbatches)
    key = key_of(place_of(model), spec, cluster, pool_bytes)
    found = find(key, kept) if kept is not None else None
    if found is not None and found.model is not None:
        return prepared_from(found.model, cluster, found)
    from tessera import flow
    from tessera.profile.measured import default_store
    from tessera.serve.steps import for_cpu

    advance(f"building {model}")
    with blamed_for_run(model):
        room_bytes = [spec.memory_share * device.memory_bytes for device in cluster.devices]
        made = spec.build(model, max_bytes=MAX_BYTES, room_bytes=room_bytes, pool_bytes=pool_bytes)
        for_cpu(made)
        if found is not None:
            return prepared_from(made, cluster, found)
        advance(f"capturing {len(made.workloads)} steps")
        begun_s = time.perf_counter()
        traces = [record(workload) for workload in made.workloads]
        capture_s = time.perf_counter() - begun_s
    unit = flow.make_unit(traces, counts_of(made.shape, spec.average, made.encode is not None))
    advance("pricing its launches")

    @cache
    def warn(what: str) -> None:
        print(f"warning: {what}; measurements are not kept for the next start", file=sys.stderr)

    costs = tuple(_price(trace, cluster, store or default_store(), advance, warn) for trace in traces)
    advance("planning")
    planned = replace(_planned(made, cluster, unit, costs, spec.policies), capture_s=capture_s)
    if kept is not None:
        keep(key, planned.kept, kept, warn_kept)
    return planned


def warn_kept(what: str) -> None:
    print(f"warning: {what}; plans are not kept for the next start", file=sys.stderr)


def prepared_from(model: ServableModel, cluster: Cluster, found: KeptPlans) -> Prepared:
    plans = found.plans
    traces = [graph.trace for graph in plans[0].graphs]
    if any(interprets(device, traces) for device in cluster.devices):
        import_module("tessera.flow")  # hands in the interpreter
    return Prepared(model, cluster, plans[0].unit, plans[0].costs, plans, found.scale, found.rehearsed)


def counts_of(shape: Shape, average: Average, sees: bool = False) -> tuple[int, ...]:
    """How often each step runs for `rows` average requests."""
    counts = dict.fromkeys(shape.sizes, 1)
    answers = next(size for size in shape.sizes if size >= shape.rows)
    counts[answers] = max(1, average.output - 1)
    prompt = min(average.prompt, shape.capacity)
    if shape.is_flat:
        counts[shape.sizes[-1]] = -(-shape.rows * prompt // shape.sizes[-1])
    else:
        for size in reversed(shape.part_sizes):
            num = min(1, prompt // size) if shape.is_first_only else prompt // size
            counts[size] = max(1, shape.rows * num)
            prompt -= num * size
            if num and shape.is_first_only:
                break
        counts[answers] += prompt
    return (*([shape.rows] if sees else []), *counts.values())


def _price(trace: Trace, cluster: Cluster, store: Path, advance: Told, warn: Told) -> Costs:
    from tessera import flow
    from tessera.profile.measured import Clocks, Store, combine, measure, needs_measuring

    found = {}
    for device in cluster.devices:
        if needs_measuring(device):
            advance(f"measuring {step_name(trace.step)} on {device.name}")
            timer = flow.make_timer(trace, device)
            kept = partial(Store, store, clocks=Clocks.ANY, spare=warn)
            found[device.name] = measure(trace, device, timer, kept, lambda what: None)
    return combine(trace, cluster.devices, found)[0]


def _planned(
    model: ServableModel,
    cluster: Cluster,
    unit: WorkUnit,
    costs: tuple[Costs, ...],
    policies: tuple[Objective, ...],
) -> Prepared:
    from tessera import flow

    policies = policies if len(cluster.devices) > 1 else policies[:1]
    try:
        plans = tuple(flow.make_plan(unit, costs, cluster, x, model.shape.microbatches) for x in policies)
        check_fits(plans, footprints(plans, [ready_programs(plan) for plan in plans]))
    except (PlanInfeasible, DeviceMemoryError) as error:
        shape = model.shape
        now = f"now {shape.microbatches}, {shape.rows}, {shape.capacity} and {shape.sizes[-1]}"
        remedy = (
            f"Lower --microbatches, --seqs, --max-model-len or --max-batch-tokens ({now}), or add a device."
        )
        raise type(error)(error.message, remedy, error.place) from error
    return Prepared(model, cluster, unit, costs, plans)
