"""ServicePlanner: a service plan for every policy, over the same captured steps, rehearsed under the load.

Groups over several devices are placed by `plan.lanes.place`, which counts steps as often as a rehearsal runs
them. A policy is planned even if it misses the load's limits. `latency` is for the least time of one request.

Not handled: splits of models that see pictures, or read one token of each sequence a step.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tessera import ir
from tessera.adapt.controller import Change, Replanned
from tessera.adapt.drift import Factors
from tessera.errors import DeviceMemoryError, PlanInfeasible
from tessera.execute.lower import homes_of
from tessera.execute.memory import check_fits, footprints, ready_programs
from tessera.plan import fluid, search_config
from tessera.plan.captured import CapturedModel
from tessera.plan.fluid import POLICIES as DRAFTED
from tessera.plan.lanes import lane_plan, place
from tessera.plan.service import plan_service
from tessera.serve.groups import Policies
from tessera.serve.records import AUTO, COST_ERROR, Shape
from tessera.serve.rehearse import rated, rehearse
from tessera.simulate import SteadyRates

LATENCY = "latency"
SPLITS = (fluid.PREFILL_DECODE, fluid.FRACTIONAL)
POLICIES = (*DRAFTED, LATENCY)
# A change of plans has a price, and rehearsals of one plan differ by up to a percent.
LEAST_GAIN = 1.02
MAX_REHEARSED, MAX_DRAFTS = 8, 1024
MAX_RUNS = 128


@dataclass(frozen=True)
class ServicePlanner:
    model: str
    # The default group's.
    shape: Shape
    unit: ir.WorkUnit
    costs: tuple[ir.Costs, ...]
    cluster: ir.Cluster
    load: ir.Load
    effort: str = "full"
    # Empty: the policies of a plan from a file stay.
    names: tuple[str, ...] = (AUTO,)

    def plans(self, names: Sequence[str]) -> Policies:
        """The best of `auto` first; raises PlanInfeasible if a name has no plan."""
        plans: dict[str, ir.ServicePlan] = {}
        for name in names:
            for plan in self.auto() if name == AUTO else (self.best(name),):
                plans.setdefault(plan.policy, plan)
        return tuple(plans.values())

    def auto(self) -> Policies:
        if len(self.cluster.devices) == 1:
            return (self.best(fluid.SINGLE),)
        chosen = self._planned(DRAFTED)
        try:
            latency = self.best(LATENCY)
            rivals = (*(rival for rival in chosen.rivals if rival.policy != chosen.policy), latency.rival)
            chosen = replace(chosen, rivals=rivals)
            check_groups((*chosen.groups, *latency.groups))
        except (PlanInfeasible, DeviceMemoryError):
            return (chosen,)
        return (chosen, latency) if self._is_quicker(latency, chosen) else (chosen,)

    def _is_quicker(self, one: ir.ServicePlan, other: ir.ServicePlan) -> bool:
        alone = [self._rehearse(plan, self.load, 1).tpot_ms for plan in (one, other)]
        return alone[0] * (1.0 + COST_ERROR) < alone[1]

    def _rehearse(self, plan: ir.ServicePlan, load: ir.Load, clients: int | None = None) -> ir.Expected:
        return rehearse(plan, load, clients, shape=self.shape)

    def _rehearsed(self, plan: ir.ServicePlan) -> ir.ServicePlan:
        return replace(plan, expected=self._rehearse(plan, self.load))

    def best(self, name: str) -> ir.ServicePlan:
        if name in SPLITS and not self._drafts.can_move:
            message = f"{name} needs a model without pictures that reads several tokens a step"
            raise PlanInfeasible(message, "Choose another --policy.")
        return replace(self._planned((name,)), rivals=())

    def _planned(self, names: Sequence[str]) -> ir.ServicePlan:
        """All of these policies are rivals of the best."""
        errors: list[PlanInfeasible | DeviceMemoryError] = []

        def make(draft: fluid.ServiceDraft) -> ir.ServicePlan:
            try:
                groups = tuple(self._group(draft.policy, group) for group in draft.groups)
                check_groups(groups)
            except (PlanInfeasible, DeviceMemoryError) as error:
                errors.append(error)
                raise
            return ir.ServicePlan(self.model, draft.policy, self.load, groups)

        if not any(self._drafts.drafts(name) for name in names):
            raise PlanInfeasible(f"no policy of {', '.join(names)} applies to {self.model} on these devices")
        try:
            return plan_service([self._drafts], make, self._rehearse, policies=names)
        except PlanInfeasible as error:
            short = [x for x in errors if isinstance(x, DeviceMemoryError)]  # says what is short where
            raise (short or errors or [error])[-1] from error

    @cached_property
    def _drafts(self) -> CapturedModel:
        shape = self.shape

        def price(tokens: int, sequences: int, length: int) -> fluid.StepPrice:
            costs = self.costs[-len(shape.sizes) :]  # after encode
            step = min(bisect_left(shape.sizes, tokens), len(costs) - 1)
            us = [costs[step].total_us(device) for device in range(len(self.cluster.devices))]
            return fluid.StepPrice(np.array([us]), 0)

        has_pictures = any(graph.trace.step.kind == "encode" for graph in self.unit.graphs)
        config = fluid.FluidConfig(num_rehearsed=MAX_REHEARSED, num_drafts=MAX_DRAFTS)
        return CapturedModel(
            self.load, self.cluster, price, fluid.ModelBytes(0, 0.0), config, not has_pictures,
            is_strict=False, microbatches=shape.microbatches, sequences=shape.rows, sizes=shape.sizes,
        )  # fmt: skip

    def _group(self, policy: str, draft: fluid.GroupDraft) -> ir.Group:
        if len(draft.devices) == 1:
            return self._on(draft.devices[0], draft.role, draft.microbatches)
        placement = self._searched(policy, self._counted, draft.microbatches)
        used = sorted({device for step in placement.devices for device in step})
        if len(used) == 1 and not placement.fetched:
            each = max(1, self.shape.microbatches // len(self.cluster.devices))
            return self._on(used[0], ir.Role.MIXED, each)
        pages = homes_of(self.unit.graphs[-1], placement.devices[-1])
        digest = hashlib.sha256(repr(pages).encode()).hexdigest()[:12]
        return self._group_along(placement, ir.Role.MIXED, draft.microbatches, f"{policy}-{digest}")

    def _searched(self, policy: str, unit: ir.WorkUnit, microbatches: int) -> ir.Placement:
        search = search_config(self.effort)
        return place(unit, self.costs, self.cluster, policy, microbatches, search, SteadyRates())

    def follow(self, group: ir.Group, policy: str) -> ir.Group:
        """Placed as planned if the launches are the same, else searched."""
        used, plan = group.plan.used, group.plan
        if len(used) == 1:
            return self._on(used[0], group.role, group.microbatches)
        lanes = plan.lanes
        if [_kernels(graph) for graph in plan.graphs] != [_kernels(graph) for graph in self.unit.graphs]:
            placement = self._searched(policy, self.unit, group.microbatches)
            lanes = (replace(lanes[0], placement=placement),)
        plan = replace(plan, unit=self.unit, costs=self.costs, cluster=self.cluster, lanes=lanes)
        return replace(group, plan=plan)

    @cached_property
    def _counted(self) -> ir.WorkUnit:
        try:
            base = self.best(fluid.DATA_PARALLEL if len(self.cluster.devices) > 1 else fluid.SINGLE)
        except (PlanInfeasible, DeviceMemoryError):  # a device cannot hold the model: by its times alone
            group = self._on(0, ir.Role.MIXED, self.shape.microbatches)
            base = self._rehearsed(ir.ServicePlan(self.model, fluid.SINGLE, self.load, (group,)))
        assert base.expected is not None
        runs = [sum(counts) for counts in zip(*base.expected.steps, strict=True)]
        scale = min(MAX_RUNS, max(len(runs), self.load.output_tokens)) / max(1, sum(runs))
        return replace(self.unit, counts=tuple(max(1, round(num * scale)) for num in runs))

    def _on(self, device: int, role: ir.Role, microbatches: int) -> ir.Group:
        """Groups on one device that have as many pages share them."""
        placement = ir.Placement(tuple((device,) * len(graph.trace.launches) for graph in self.unit.graphs))
        home = f"{self.cluster.names[device]} {self.shape.pool_tokens}"
        return self._group_along(placement, role, microbatches, home)

    def _group_along(self, placement: ir.Placement, role: ir.Role, microbatches: int, home: str) -> ir.Group:
        plan = lane_plan(self.unit, self.costs, self.cluster, placement, microbatches, home)
        return ir.Group(role, plan, self.shape.rows, microbatches)

    def replan(self, policies: Policies, change: Change) -> Replanned[ir.ServicePlan]:
        planner = replace(self, load=policies[0].load)  # the one learned last
        if isinstance(change, Factors):
            plans = planner.corrected(policies, change)
        elif isinstance(change, ir.Load):
            plans = planner.learned(policies, change)
        else:
            plans = planner.without(policies, change)
        return Replanned(plans, rated(plans, self.shape))

    def corrected(self, policies: Policies, factors: Factors) -> Policies:
        """A policy is planned again if that is better by `LEAST_GAIN`."""
        planner = replace(self, costs=factors.apply(self.unit, self._costs_in(policies)))
        return tuple(planner.better(recosted(policy, factors)) for policy in policies)

    def learned(self, policies: Policies, load: ir.Load) -> Policies:
        """New policies if the first is better by more than the costs' error."""
        planner = replace(self, load=load, costs=self._costs_in(policies))
        before = tuple(planner._rehearsed(replace(policy, load=load)) for policy in policies)
        if not self.names or self.is_beside_host:
            return before
        after = planner.plans(self.names)
        (was_within, rate), (is_within, new_rate) = max(map(_merit, before)), _merit(after[0])
        is_better = new_rate > (1.0 + COST_ERROR) * rate if was_within == is_within else is_within
        return after if is_better else before

    @property
    def is_beside_host(self) -> bool:
        """GPUs beside their host have no room for the weights of a second placement."""
        return len({device.is_cpu for device in self.cluster.devices}) > 1

    def _costs_in(self, policies: Policies) -> tuple[ir.Costs, ...]:
        plans = (plan for policy in policies for plan in policy.plans)
        return next((x.costs for x in plans if x.unit.graphs == self.unit.graphs), self.costs)

    def better(self, old: ir.ServicePlan) -> ir.ServicePlan:
        old = self._rehearsed(old)
        if self.is_beside_host:
            return old
        new = self.best(old.policy)
        clients = 1 if old.policy == LATENCY else None
        before, after = (self._rehearse(plan, self.load, clients) for plan in (old, new))
        return new if after.tokens_per_s >= LEAST_GAIN * before.tokens_per_s else old

    def without(self, policies: Policies, lost: Collection[str]) -> Policies:
        """Policies that need a lost device become mixed groups on all others."""
        left = [d for d, name in enumerate(self.cluster.names) if name not in lost]
        if not left:
            raise PlanInfeasible("no device is left")
        each = max(1, self.shape.microbatches // len(left))
        groups = tuple(self._on(device, ir.Role.MIXED, each) for device in left)
        check_groups(groups)
        around = self._rehearsed(ir.ServicePlan(self.model, "", self.load, groups))
        return tuple(
            replace(around, policy=policy.policy)
            if any(name in lost for group in policy.groups for name in group.devices)
            else policy
            for policy in policies
        )


def recosted(policy: ir.ServicePlan, factors: Factors) -> ir.ServicePlan:
    groups = [
        replace(g, plan=replace(g.plan, costs=factors.apply(g.plan.unit, g.plan.costs)))
        for g in policy.groups
    ]
    return replace(policy, groups=tuple(groups))


def _kernels(graph: ir.Graph) -> list[str]:
    return [graph.trace.kernel_of(launch).name for launch in range(len(graph.trace.launches))]


def check_groups(groups: Sequence[ir.Group]) -> None:
    plans = list({id(group.plan): group.plan for group in groups}.values())
    check_fits(plans, footprints(plans, [ready_programs(plan) for plan in plans]))


def _merit(plan: ir.ServicePlan) -> tuple[bool, float]:
    expected = plan.rival.expected
    return expected.is_within(plan.load), expected.tokens_per_s
