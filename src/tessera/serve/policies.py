"""ServicePlanner: a service plan for every policy, over the same captured steps, rehearsed under the load.

    single, data-parallel                        mixed groups on one device each: nothing is searched
    prefill-decode, prefill-decode-fractional    one device reads prompts, the others answer (fractional: and
                                                 read prompts too); every device is tried
    attention-ffn, layer-pipeline, kernel-level  groups over several devices, placed by `plan.solve.place`
    latency                                      as these, for the least time of one request

Searches count steps as often as a rehearsal runs them. `auto` takes the policy whose rehearsal is best within
the load's limits, but data-parallel unless another is better by more than the error of the costs; and
`latency` beside it where that is quicker for one request.

Not handled: splits of models that keep state by row or see pictures.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tessera.adapt.capability import Capability
from tessera.adapt.drift import Factors
from tessera.adapt.replan import LEAST_GAIN
from tessera.errors import DeviceMemoryError, PlanInfeasible, UnknownName
from tessera.execute.lower import homes_of
from tessera.execute.memory import check_fits, footprints, ready_programs
from tessera.ir import (
    Cluster,
    Costs,
    Graph,
    Group,
    Load,
    Placement,
    Rival,
    Role,
    ServicePlan,
    WorkUnit,
)
from tessera.serve.records import COST_ERROR, Shape
from tessera.serve.rehearse import rated, rehearse

AUTO = "auto"
SPLITS = {"prefill-decode": Role.ANSWERS, "prefill-decode-fractional": Role.MIXED}
# Name -> planner of its placement.
SEARCHED = {
    "attention-ffn": "attention-ffn",
    "layer-pipeline": "layer-pipeline",
    "kernel-level": "single-placement",
    "latency": "latency",
}
# Seconds of the search for one placement.
SEARCH_S = 2.0
POLICIES = ("single", "data-parallel", *SPLITS, *SEARCHED)
# Microbatches of a prompts group: one reads while the other is settled.
PROMPT_MICROBATCHES = 2
# Fewest microbatches of a group over several devices: one computes while the other is on its way.
DIVIDED_MICROBATCHES = 2
# Most runs of all steps in a searched unit.
MAX_RUNS = 128


def check_policy(name: str) -> str:
    if name not in (AUTO, *POLICIES):
        raise UnknownName("policy", name, (AUTO, *POLICIES))
    return name


@dataclass(frozen=True)
class ServicePlanner:
    model: str
    # Microbatches, sequences and sizes of the default group.
    shape: Shape
    unit: WorkUnit
    costs: tuple[Costs, ...]
    cluster: Cluster
    load: Load
    # Effort of searches; see `plan.config`.
    effort: str = "full"
    # True if it sees pictures.
    sees: bool = False
    # Policies to plan; see `plans`. Empty: those of a given plan stay.
    names: tuple[str, ...] = (AUTO,)

    def plans(self, names: Sequence[str]) -> tuple[ServicePlan, ...]:
        """A service plan per name, the best of `auto` first; raises PlanInfeasible if one has none."""
        found: list[ServicePlan] = []
        for name in names:
            chosen = self.auto() if name == AUTO else (self.best(name),)
            found += [plan for plan in chosen if plan.policy not in [p.policy for p in found]]
        return tuple(found)

    def auto(self) -> tuple[ServicePlan, ...]:
        if len(self.cluster.devices) == 1:
            return (self.best("single"),)
        rehearsed, why = [], None
        for name in POLICIES:
            try:
                rehearsed.append(self.best(name))
            except (PlanInfeasible, DeviceMemoryError) as error:
                why = error
        if not rehearsed:
            raise why or PlanInfeasible("no policy fits these devices")
        *others, latency = rehearsed if rehearsed[-1].policy == "latency" else (*rehearsed, None)
        chosen = best_of([plan for plan in others if plan is not None] or rehearsed)
        chosen = replace(chosen, rivals=tuple(_rival(plan) for plan in rehearsed if plan is not chosen))
        if latency is None or not self._is_quicker(latency, chosen):
            return (chosen,)
        try:
            self._check((*chosen.groups, *latency.groups))
        except (PlanInfeasible, DeviceMemoryError):
            return (chosen,)
        return (chosen, latency)

    def _is_quicker(self, one: ServicePlan, other: ServicePlan) -> bool:
        alone = [rehearse(plan, self.load, 1, shape=self.shape).tpot_ms for plan in (one, other)]
        return alone[0] * (1.0 + COST_ERROR) < alone[1]

    def best(self, name: str) -> ServicePlan:
        """A policy at its best, with its expected figures."""
        planner = self._counted if name in SEARCHED else self
        rehearsed, why = [], None
        for groups in planner.candidates(name):
            try:
                self._check(groups)
            except (PlanInfeasible, DeviceMemoryError) as error:
                why = error
                continue
            plan = ServicePlan(self.model, name, self.load, groups)
            rehearsed.append(replace(plan, expected=rehearse(plan, self.load, shape=self.shape)))
        if not rehearsed:
            raise why or PlanInfeasible(f"the policy {name} does not apply to {self.model} on these devices")
        if name == "latency":
            return rehearsed[0]
        return max(rehearsed, key=_merit)

    def candidates(self, name: str) -> Iterator[tuple[Group, ...]]:
        devices = range(len(self.cluster.devices))
        each = max(1, self.shape.microbatches // len(devices))
        if name == "single":
            yield from ((self._on(d, Role.MIXED, self.shape.microbatches),) for d in devices)
        elif name == "data-parallel":
            yield tuple(self._on(d, Role.MIXED, each) for d in devices)
        elif name in SPLITS:
            if not self.shape.is_flat or self.sees:
                message = f"{name} needs a model with its state in pages and without pictures"
                raise PlanInfeasible(message, "Choose another --policy.")
            for reader in devices if len(devices) > 1 else ():
                others = (self._on(d, SPLITS[name], each) for d in devices if d != reader)
                yield (self._on(reader, Role.PROMPTS, PROMPT_MICROBATCHES), *others)
        else:
            yield from self._searched(name)

    def _searched(self, name: str) -> Iterator[tuple[Group, ...]]:
        microbatches = max(DIVIDED_MICROBATCHES, self.shape.microbatches)
        placement = searched(name, self.unit, self.costs, self.cluster, microbatches, self.effort)
        yield (self._along(name, placement, microbatches),)

    @cached_property
    def _counted(self) -> "ServicePlanner":
        """With steps counted as a rehearsal runs them."""
        base = self.best("data-parallel" if len(self.cluster.devices) > 1 else "single")
        assert base.expected is not None
        runs = [sum(counts) for counts in zip(*base.expected.steps, strict=True)]
        scale = min(MAX_RUNS, max(len(runs), self.load.output_tokens)) / max(1, sum(runs))
        counts = tuple(max(1, round(num * scale)) for num in runs)
        return replace(self, unit=replace(self.unit, counts=counts))

    def _on(self, device: int, role: Role, microbatches: int) -> Group:
        """A group on one device."""
        return group_on(device, role, self.shape, self.unit, self.costs, self.cluster, microbatches)

    def _along(self, name: str, placement: Placement, microbatches: int) -> Group:
        """A mixed group whose lane has this placement."""
        from tessera.plan.solve import lane_plan

        used = sorted({device for step in placement.devices for device in step})
        if len(used) == 1:
            return self._on(used[0], Role.MIXED, max(1, self.shape.microbatches // len(self.cluster.devices)))
        pages = homes_of(self.unit.graphs[-1], placement.devices[-1])
        digest = hashlib.sha256(repr(pages).encode()).hexdigest()[:12]
        home = f"{name}-{digest}" if self.shape.is_flat else ""
        plan = lane_plan(self.unit, self.costs, self.cluster, placement, microbatches, home)
        return Group(Role.MIXED, plan, self.shape.rows, microbatches)

    def _check(self, groups: Sequence[Group]) -> None:
        """Raises DeviceMemoryError unless these groups fit at once."""
        check_groups(groups)

    # New plans of a running service; see `adapt.controller`.

    def corrected(self, policies: tuple[ServicePlan, ...], factors: Factors) -> tuple[ServicePlan, ...]:
        """Each policy at corrected costs: planned again if that is better by `LEAST_GAIN`, else as it is."""
        planner = replace(self, costs=factors.apply(self.unit, self._costs_in(policies)))
        return tuple(planner.better(recosted(policy, factors)) for policy in policies)

    def learned(self, policies: tuple[ServicePlan, ...], load: Load) -> tuple[ServicePlan, ...]:
        """Policies for a load, if the first is better there by more than the costs' error; else the same."""
        planner = replace(self, load=load, costs=self._costs_in(policies))
        before = tuple(
            replace(policy, load=load, expected=rehearse(policy, load, shape=self.shape))
            for policy in policies
        )
        if not self.names:
            return before
        after = planner.plans(self.names)
        (was_within, rate), (is_within, new_rate) = max(map(_merit, before)), _merit(after[0])
        is_better = new_rate > (1.0 + COST_ERROR) * rate if was_within == is_within else is_within
        return after if is_better else before

    def _costs_in(self, policies: tuple[ServicePlan, ...]) -> tuple[Costs, ...]:
        """Costs of its steps, as policies that run have corrected them."""
        plans = (plan for policy in policies for plan in policy.plans)
        return next((x.costs for x in plans if x.unit.graphs == self.unit.graphs), self.costs)

    def rate(self, policies: tuple[ServicePlan, ...]) -> tuple[Capability, ...]:
        return rated(policies, self.shape)

    def better(self, old: ServicePlan) -> ServicePlan:
        old = replace(old, expected=rehearse(old, self.load, shape=self.shape))
        new = self.best(old.policy)
        clients = 1 if old.policy == "latency" else None
        before, after = (rehearse(plan, self.load, clients, shape=self.shape) for plan in (old, new))
        return new if after.tokens_per_s >= LEAST_GAIN * before.tokens_per_s else old

    def without(self, policies: tuple[ServicePlan, ...], lost: Collection[str]) -> tuple[ServicePlan, ...]:
        """Policies that need a lost device become mixed groups on the others, of the whole cluster."""
        left = [d for d, name in enumerate(self.cluster.names) if name not in lost]
        if not left:
            raise PlanInfeasible("no device is left")
        each = max(1, self.shape.microbatches // len(left))
        groups = tuple(self._on(device, Role.MIXED, each) for device in left)
        self._check(groups)
        around = ServicePlan(self.model, "", self.load, groups)
        around = replace(around, expected=rehearse(around, self.load, shape=self.shape))
        return tuple(
            replace(around, policy=policy.policy)
            if any(name in lost for group in policy.groups for name in group.devices)
            else policy
            for policy in policies
        )


def recosted(policy: ServicePlan, factors: Factors) -> ServicePlan:
    """The same groups at corrected costs."""
    groups = [
        replace(g, plan=replace(g.plan, costs=factors.apply(g.plan.unit, g.plan.costs)))
        for g in policy.groups
    ]
    return replace(policy, groups=tuple(groups))


def searched(
    policy: str,
    unit: WorkUnit,
    costs: tuple[Costs, ...],
    cluster: Cluster,
    microbatches: int,
    effort: str,
) -> Placement:
    """One placement over several devices by a policy; a rehearsal judges it."""
    from tessera.plan import search_config
    from tessera.plan.solve import place
    from tessera.simulate import SteadyRates

    config = replace(search_config(effort), single_limit_s=SEARCH_S)
    return place(unit, costs, cluster, SEARCHED[policy], microbatches, config, SteadyRates())


def group_on(
    device: int,
    role: Role,
    shape: Shape,
    unit: WorkUnit,
    costs: tuple[Costs, ...],
    cluster: Cluster,
    microbatches: int,
) -> Group:
    """A group on one device; its pages are those of all groups on this device with as many."""
    from tessera.plan.solve import lane_plan

    placement = Placement(tuple((device,) * len(graph.trace.launches) for graph in unit.graphs))
    home = f"{cluster.names[device]} {shape.pool_tokens}" if shape.is_flat else ""
    return Group(
        role, lane_plan(unit, costs, cluster, placement, microbatches, home), shape.rows, microbatches
    )


def follow_group(
    group: Group,
    policy: str,
    shape: Shape,
    unit: WorkUnit,
    costs: tuple[Costs, ...],
    cluster: Cluster,
    effort: str,
) -> Group:
    """A planned group over captured steps."""
    used = group.plan.used
    if len(used) == 1:
        return group_on(used[0], group.role, shape, unit, costs, cluster, group.microbatches)
    lanes = group.plan.lanes
    if [_kernels(graph) for graph in group.plan.graphs] != [_kernels(graph) for graph in unit.graphs]:
        placement = searched(policy, unit, costs, cluster, group.microbatches, effort)
        lanes = (replace(lanes[0], placement=placement),)
    return replace(group, plan=replace(group.plan, unit=unit, costs=costs, cluster=cluster, lanes=lanes))


def _kernels(graph: Graph) -> list[str]:
    return [graph.trace.kernel_of(launch).name for launch in range(len(graph.trace.launches))]


def check_groups(groups: Sequence[Group]) -> None:
    plans = list({id(group.plan): group.plan for group in groups}.values())
    check_fits(plans, footprints(plans, [ready_programs(plan) for plan in plans]))


def _merit(plan: ServicePlan) -> tuple[bool, float]:
    assert plan.expected is not None
    return plan.expected.is_within(plan.load), plan.expected.tokens_per_s


def best_of(plans: Sequence[ServicePlan]) -> ServicePlan:
    """The best rehearsed plan; data-parallel unless another is better by more than the costs' error."""
    best = max(plans, key=_merit)
    for plan in plans:
        if plan.policy == "data-parallel":
            within, rate = _merit(plan)
            if within == _merit(best)[0] and _merit(best)[1] <= (1.0 + COST_ERROR) * rate:
                return plan
    return best


def _rival(plan: ServicePlan) -> Rival:
    assert plan.expected is not None
    return Rival(plan.policy, tuple(group.size for group in plan.groups), plan.expected)
