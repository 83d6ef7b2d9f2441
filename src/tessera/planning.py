"""Service plans from a model's name: its served step at any size, priced, and groups made of drafts.

The served step, some tokens of some sequences over pages, is recorded without weights at a few sizes
(`ANCHORS`) and interpolated at others: everything is linear in tokens, sequences, pages and expected length.
Anchors do not depend on the load, so outlines serve every load. One more recording checks linearity.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tessera import flow, ir
from tessera.analyze import build_graph
from tessera.capture import build, outlines, place_of, record_sizes
from tessera.capture.divide import divided, experts_of
from tessera.capture.models import another, check_positions, steps_of_model
from tessera.errors import MismatchError, TesseraError
from tessera.execute.lower import homes_of
from tessera.execute.memory import footprints, ready_programs
from tessera.ir.graph import StepFamily, widened
from tessera.kernels import PAGE, is_paged
from tessera.plan import FULL, QUICK, DeviceMemory, SearchConfig, fluid
from tessera.plan.arrays import Floats, Temporaries
from tessera.plan.constraints import attention_launches, compiled_launches
from tessera.plan.lanes import lane_plan, place, steps_alone
from tessera.plan.problem import cluster_of, costs_on
from tessera.plan.search import objectives
from tessera.plan.service import Rehearse, drafted, plan_service
from tessera.profile import works
from tessera.profile.measured import combine
from tessera.simulate import SteadyRates

# Tokens, sequences, positions in pages and expected length. Each recording after the first differs in one of
# them.
ANCHORS = (
    (512, 64, 65_536, 1024),
    (1024, 64, 65_536, 1024),
    (512, 128, 65_536, 1024),
    (512, 64, 131_072, 1024),
    (512, 64, 65_536, 2048),
)
CHECKED = (1536, 96, 98_304, 1536)
# Full steps for one of each smaller size.
FULL_STEPS = 32
# Sets of devices rehearsed under the objectives cost and energy.
MAX_SETS = 4

Sizes = tuple[int, int, int]


def served_step(
    model: str, tokens: int, sequences: int, pool_tokens: int, length: int, is_random: bool
) -> ir.Step:
    return ir.Step(
        model, "tokens", min(tokens, sequences), tokens, 0, pool_tokens, is_random,
        rows=sequences, length=length, joined_products=True,
    )  # fmt: skip


@dataclass(eq=False)
class ServedSteps:
    model: str
    cluster: ir.Cluster
    random_weights: bool = False
    is_compiled: bool = False
    advance: Callable[[str], None] = lambda text: None
    _prices: dict[Sizes, fluid.StepPrice] = field(default_factory=dict)
    _us: dict[Sizes, dict[object, Floats]] = field(default_factory=dict)

    frequencies: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def step(self, tokens: int, sequences: int, pool_tokens: int, length: int) -> ir.Step:
        return replace(self._bare_step((tokens, sequences, pool_tokens, length)), windows=self.windows)

    def _bare_step(self, sizes: tuple[int, int, int, int]) -> ir.Step:
        """Without the model's windows, which a recording adds."""
        return served_step(place_of(self.model), *sizes, self.random_weights)

    def on(self, cluster: ir.Cluster) -> "ServedSteps":
        _ = self._kinds, self._live
        other = copy(self)
        other.cluster, other._prices = cluster, {}
        return other

    @property
    def anchors(self) -> list[ir.Step]:
        return [self._bare_step(sizes) for sizes in ANCHORS]

    @cached_property
    def family(self) -> StepFamily:
        self.advance(f"{'compiling' if self.is_compiled else 'recording'} the served step")
        if self.is_compiled:
            traces = widened(compiled(self.anchors))
        else:
            sizes = [*self.anchors, self._bare_step(CHECKED)]
            text = "recording the served step, {} of {}".format
            traces = record_sizes(sizes, lambda num: self.advance(text(num + 1, len(sizes))))
        traces = divided(self.cluster, traces, self.frequencies)
        family = StepFamily(tuple(map(build_graph, traces[: len(ANCHORS)])))
        if any(family.at(checked.step).trace != checked for checked in traces[len(ANCHORS) :]):
            message = f"the step of {self.model} is not linear in tokens, sequences, pages and length"
            raise MismatchError(message, "Serve it on the devices themselves: tessera serve.")
        return family

    @property
    def windows(self) -> tuple[int, ...]:
        return self.family.recordings[0].trace.step.windows

    @cached_property
    def _attention(self) -> list[bool]:
        """All False if attention is not apart."""
        graph = self.family.recordings[0]
        marks = attention_launches(ir.WorkUnit((graph,), (1,)))
        return [False] * len(graph.trace.launches) if marks is None else marks[0].tolist()

    @cached_property
    def _kinds(self) -> tuple[StepFamily, Floats, tuple[bool, ...]]:
        """One launch of each kind, the size of each kind, and whether it is in attention."""
        traces = [graph.trace for graph in self.family.recordings]
        first: dict[object, int] = {}
        counts: dict[int, int] = {}
        for number, key in enumerate(zip(self._attention, *map(works, traces), strict=True)):
            kept = first.setdefault(key, number)
            counts[kept] = counts.get(kept, 0) + 1
        reduced = (
            replace(trace, launches=tuple(trace.launches[n] for n in counts), buffers=(), outputs=())
            for trace in traces
        )
        family = StepFamily(tuple(ir.Graph(trace, (), (), ()) for trace in reduced))
        inside = tuple(self._attention[n] for n in counts)
        return family, np.array(list(counts.values()), dtype=np.float64), inside

    @cached_property
    def _live(self) -> Floats:
        numbers = [np.arange(len(graph.trace.launches)) for graph in self.family.recordings]
        each = zip(self.family.recordings, numbers, strict=True)
        return np.concatenate([Temporaries(g, n).live_bytes(np.zeros_like(n), 1) for g, n in each])

    @cached_property
    def model_bytes(self) -> fluid.ModelBytes:
        first = self.family.recordings[0].trace
        weights, each = first.bytes_of(ir.BufferKind.WEIGHT), self._state_per(3)
        read = {a.buffer for n, x in enumerate(first.launches) if self._attention[n] for a in x.accesses}
        inside = sum(
            first.buffers[b].size_bytes for b in read if first.buffers[b].kind is ir.BufferKind.WEIGHT
        )
        return fluid.ModelBytes(weights, each, self.windows or (0,), self._kinds[2], inside)

    def _state_per(self, anchor: int) -> float:
        """State bytes per sequence (2) or position (3)."""
        first, more = (self.family.recordings[n].trace for n in (0, anchor))
        grown = more.bytes_of(ir.BufferKind.STATE) - first.bytes_of(ir.BufferKind.STATE)
        return grown / (ANCHORS[anchor][anchor - 1] - ANCHORS[0][anchor - 1])

    def price(self, tokens: int, sequences: int, length: int) -> fluid.StepPrice:
        """State by row counts as temporary."""
        key = tokens, sequences, length
        if key not in self._prices:
            family, counts, _ = self._kinds
            step = self.step(tokens, sequences, ANCHORS[0][2], length)
            kinds = [(d.kind, d.gpu, d.num_sms) for d in self.cluster.devices]
            times = self._us.setdefault(key, {})
            missing = {k: d for k, d in zip(kinds, self.cluster.devices, strict=True) if k not in times}
            if missing:
                costs, _ = combine(family.at(step).trace, tuple(missing.values()), {})
                rows = np.array([[cost.us for cost in row] for row in costs.costs]) * counts[:, None]
                times.update(zip(missing, rows.T, strict=True))
            us = np.stack([times[kind] for kind in kinds], axis=1)
            first, others = np.array(ANCHORS[0]), np.array(ANCHORS[1:])
            parts = (np.array([tokens, sequences, first[2], length]) - first) / (others - first).diagonal()
            live = self._live[0] + parts @ (self._live[1:] - self._live[0])
            by_row = sequences * self._state_per(2)
            self._prices[key] = fluid.StepPrice(us, int(live.max() + by_row))
        return self._prices[key]

    def fluid_model(
        self,
        load: ir.Load,
        search: SearchConfig,
        memory_share: float,
        config: fluid.FluidConfig | None = None,
    ) -> fluid.FluidModel:
        config = config or (fluid.QUICK_FLUID if search is QUICK else fluid.FLUID)
        config = replace(config, memory_share=memory_share)
        runs_on_cpu = not len(compiled_launches(self.family.recordings[0].trace))
        return fluid.FluidModel(
            load, self.cluster, self.price, self.model_bytes, config, runs_on_cpu=runs_on_cpu
        )

    def unit(self, group: fluid.GroupDraft) -> tuple[ir.WorkUnit, tuple[ir.Costs, ...]]:
        sizes = [self.step(size, group.sequences, group.pool_tokens, group.length) for size in group.sizes]
        graphs = tuple(self.family.at(step) for step in sizes)
        unit = ir.WorkUnit(graphs, (1,) * (len(graphs) - 1) + (FULL_STEPS,))
        return unit, flow.price(unit, self.cluster)


def service_memory(plan: ir.ServicePlan) -> tuple[DeviceMemory, ...]:
    """What workers will hold; state by row, which microbatches have of their own, counts as state."""
    by_device = footprints(plan.plans, [ready_programs(part) for part in plan.plans])
    by_row = [0] * len(by_device)
    for group in plan.groups:
        graph, placement = group.plan.graphs[-1], group.plan.lanes[0].placement.devices[-1]
        for number, device in homes_of(graph, placement):
            buffer = graph.trace.buffers[number]
            by_row[device] += 0 if is_paged(buffer.name) else group.microbatches * buffer.size_bytes
    return tuple(
        DeviceMemory(
            device.name, device.memory_bytes, x.weight_bytes, x.microbatch_bytes,
            x.home_bytes + rows, max(0, x.held_bytes - rows),
        )
        for device, x, rows in zip(plan.cluster.devices, by_device, by_row, strict=True)
    )  # fmt: skip


def experts_by_device(plan: ir.ServicePlan) -> dict[str, dict[str, tuple[int, ...]]]:
    """Device -> module of a mixture -> experts that run there."""
    experts: dict[str, dict[str, set[int]]] = {}
    for graph, devices in zip(plan.plans[0].graphs, plan.plans[0].lanes[0].placement.devices, strict=True):
        for launch, (scope, first, num) in experts_of(graph.trace).items():
            by_scope = experts.setdefault(plan.cluster.names[devices[launch]], {})
            by_scope.setdefault(scope, set()).update(range(first, first + num))
    return {
        device: {scope: tuple(sorted(numbers)) for scope, numbers in scopes.items()}
        for device, scopes in experts.items()
    }


def fetched_by_device(plan: ir.ServicePlan) -> dict[str, tuple[str, ...]]:
    """Device -> weights that it fetches from a host's memory in every step."""
    weights: dict[str, dict[str, None]] = {}
    for part in plan.plans:
        hosts = dict(part.lanes[0].placement.fetched)
        for graph, devices in zip(part.graphs, part.lanes[0].placement.devices, strict=True):
            for launch, device in zip(graph.trace.launches, devices, strict=True):
                for name in (graph.trace.buffers[access.buffer].name for access in launch.accesses):
                    if hosts.get(name, device) != device:
                        weights.setdefault(plan.cluster.names[device], {})[name] = None
    return {device: tuple(names) for device, names in weights.items()}


def read_frequencies(path: Path) -> dict[str, list[float]]:
    """Module -> how often each expert is chosen."""
    try:
        document = msgspec.json.decode(path.read_bytes())
        if isinstance(document, dict) and isinstance(document.get("experts"), dict):  # a service's /v1/state
            document = document["experts"]
        return msgspec.convert(document, dict[str, list[Annotated[float, Meta(ge=0)]]])
    except (OSError, msgspec.MsgspecError) as error:
        remedy = 'Write {"model.layers.0.mlp.experts": [3, 1, ...], ...} or the answer of /v1/state.'
        raise TesseraError(f"cannot be read: {error}", remedy, str(path)) from error


def compiled(steps: Sequence[ir.Step]) -> list[ir.Trace]:
    first = cache(lambda: build(steps[0]))
    record = partial(flow.record_compiled, make=lambda step: another(first(), step))
    return [outlines.find_or_make(step, record) for step in steps]


def is_served(model: str) -> bool:
    return "decode" in steps_of_model(model)


def make_group(
    steps: ServedSteps,
    draft: fluid.GroupDraft,
    policy: str,
    search: SearchConfig = FULL,
    memory_share: float = ir.MEMORY_SHARE,
    placement: ir.Placement | None = None,
) -> ir.Group:
    unit, costs = steps.unit(draft)
    if len(draft.devices) == 1:
        devices = tuple(draft.devices * len(graph.trace.launches) for graph in unit.graphs)
        placement = ir.Placement(devices)
    elif placement is None:
        # Microbatches share pages: each is planned with its part.
        part = replace(draft, pool_tokens=draft.pool_tokens // draft.microbatches // PAGE * PAGE)
        cluster = cluster_of(steps.cluster, draft.devices)
        work, prices = steps.unit(part)
        prices = costs_on(prices, draft.devices)
        placed = place(work, prices, cluster, policy, draft.microbatches, search, SteadyRates(), memory_share)
        placement = placed.renumbered(draft.devices)
    home = "+".join(steps.cluster.names[device] for device in draft.devices)
    plan = lane_plan(unit, costs, steps.cluster, placement, draft.microbatches, home)
    if len(draft.devices) > 1:
        times = [
            num / SteadyRates()(alone) for num, alone in zip(unit.counts, steps_alone(plan), strict=True)
        ]
        plan = replace(plan, simulated_per_s=min(plan.simulated_per_s, 1.0 / sum(times)))
    return ir.Group(draft.role, plan, draft.sequences, draft.microbatches)


def make_service_plan(
    steps: ServedSteps,
    load: ir.Load,
    rehearse: Rehearse,
    search: SearchConfig = FULL,
    objective: ir.Objective = ir.Objective.THROUGHPUT,
    memory_share: float = ir.MEMORY_SHARE,
    policies: Sequence[str] = fluid.POLICIES,
    config: fluid.FluidConfig | None = None,
) -> ir.ServicePlan:
    flow.check_modelled(steps.cluster)
    check_positions(steps.model, load.prompt_tokens + load.output_tokens)
    whole = steps.fluid_model(load, search, memory_share, config)
    fluids = [whole] if objective is ir.Objective.THROUGHPUT else _worthwhile(whole, objective, policies)

    def make(draft: fluid.ServiceDraft) -> ir.ServicePlan:
        first, *cells = draft.groups
        groups = [make_group(steps, first, draft.policy, search, memory_share)]
        for cell in cells:
            numbers = dict(zip(first.devices, cell.devices, strict=True))
            placed = groups[0].plan.lanes[0].placement.renumbered(numbers) if len(numbers) > 1 else None
            groups.append(make_group(steps, cell, draft.policy, search, memory_share, placed))
        return ir.ServicePlan(steps.model, draft.policy, load, tuple(groups))

    return plan_service(fluids, make, rehearse, steps.advance, objective, policies)


def _worthwhile(
    whole: fluid.FluidModel, objective: ir.Objective, policies: Sequence[str]
) -> list[fluid.FluidModel]:
    """All devices, and the sets of devices with the best drafts."""
    devices = tuple(range(len(whole.cluster.devices)))
    if objective is ir.Objective.COST:
        objectives.usd_per_hour(whole.cluster, devices)
    else:
        objectives.watts(whole.cluster, devices)
    sets = (chosen for chosen in objectives.sets_of(whole.alike) if len(chosen) < len(devices))
    parts = [replace(whole, devices=chosen) for chosen in sets]
    rated = [(max((drafted(part, x, objective) for x in policies), default=0.0), part) for part in parts]
    ranked = sorted((row for row in rated if row[0] > 0.0), key=lambda row: -row[0])
    return [whole, *(part for _, part in ranked[:MAX_SETS])]
