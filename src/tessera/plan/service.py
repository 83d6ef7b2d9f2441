"""Service: the best configuration of a service for a load, by rehearsal.

Drafts of every policy (`fluid`) become service plans, rehearsed by the service's scheduler on a virtual
clock. Rehearsed times exceed drafted ones: where a limit is missed, the policy is drafted again for a limit
lower by as much; where first tokens are late, rehearsed with fewer requests at once. Data-parallel is the
plan unless another policy is better by more than `ERROR`. Then it is the coarsest policy within `TIE` of the
best, or one within `ERROR` with much less time per token. The others are its rivals.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tessera.errors import DeviceMemoryError, PlanInfeasible
from tessera.ir import Cluster, Expected, GroupSize, Load, Objective, Rival, ServicePlan
from tessera.ir.units import total
from tessera.plan.comparison import Comparison, Option, too_slow
from tessera.plan.fluid import DATA_PARALLEL, DIVIDED, FLUID, POLICIES, SINGLE, FluidModel, ServiceDraft
from tessera.plan.host import FETCH
from tessera.plan.search.objectives import IDLE_SHARE

# Equal rates; error of modelled costs.
TIE, ERROR = 0.005, 0.03
QUICKER = 2.0
# Drafts further behind the best rate are not tried twice.
BEHIND = 0.9
# Share of pages that the next draft may have.
MAX_MISFITS, SMALLER = 6, 0.88
# Rehearsals with fewer requests: by Little's law, later by growing shares, at last one at a time.
MAX_FEWER, SURE = 8, 2
# Drafts that exceed a limit by more are too slow for any number of requests.
FAR = 3.0
# Margin to a limit; a limit undercut by more is aimed at again.
AIM, UNDERCUT = 0.985, 0.92

# Requests at once; None: as many as the plan holds.
Rehearse = Callable[[ServicePlan, Load, int | None], Expected]
MakePlan = Callable[[ServiceDraft], ServicePlan]


def plan_service(
    fluids: Sequence[FluidModel],
    make: MakePlan,
    rehearse: Rehearse,
    advance: Callable[[str], None] = lambda text: None,
    objective: Objective = Objective.THROUGHPUT,
    policies: Sequence[str] = POLICIES,
) -> ServicePlan:
    """`fluids`: drafts on all devices, and on parts of them."""
    load, cluster, is_strict = fluids[0].load, fluids[0].cluster, fluids[0].is_strict
    best: dict[str, ServicePlan] = {}
    tried: list[ServicePlan] = []

    def figure(plan: ServicePlan) -> float:
        return option_of(plan.rival, cluster).figure(objective)

    def consider(plans: Iterable[ServicePlan]) -> None:
        for plan in plans:
            tried.append(plan)
            same = (best.get(plan.policy, plan), plan)
            best[plan.policy] = max(same, key=lambda x: (x.rival.expected.is_within(load), figure(x)))

    for fluid in fluids:
        most = 0.0
        names = list(policies)
        if fluid is not fluids[0]:
            figures = {policy: drafted(fluid, policy, objective) for policy in policies}
            names = [policy for policy in policies if figures[policy] >= BEHIND * max(figures.values())]
        for policy in names:
            advance(f"rehearsing {policy}")
            rehearsals = _rehearsals(fluid, policy, make, rehearse, most)
            most = max(most, _best_rate(rehearsals, fluid.load))
            consider(rehearsals)
    fetching: list[ServicePlan] = []
    # A baseline whatever the limits are, and one more placement by kernels.
    if is_strict and fluids[0].is_short:
        free = replace(fluids[0], load=replace(load, tpot_ms=None, ttft_ms=None))
        fetching = sorted(_rehearsals(free, FETCH, make, rehearse, 0.0), key=figure)[-1:]
        if DIVIDED[-1] in policies:
            consider(replace(plan, policy=DIVIDED[-1]) for plan in fetching)
    within = {policy: plan for policy, plan in best.items() if plan.rival.expected.is_within(load)}
    if not within and (is_strict or not best):
        raise _refusal(fluids[0], tried or _nearest(fluids[0], policies, make, rehearse))
    within = within or best
    figures = {name: figure(plan) for name, plan in within.items()}
    most = max(figures.values())
    if figures.get(DATA_PARALLEL, 0.0) * (1.0 + ERROR) >= most:
        chosen = within[DATA_PARALLEL]
    else:
        chosen = next(within[name] for name, figure in figures.items() if figure >= (1.0 - TIE) * most)
    chosen = _quicker(chosen, [within[name] for name in figures if figures[name] * (1.0 + ERROR) >= most])
    rivals = tuple(plan.rival for plan in (*within.values(), *fetching))
    return replace(chosen, rivals=rivals, bound_per_s=fluids[0].bound_per_s if is_strict else None)


def _quicker(chosen: ServicePlan, near: Sequence[ServicePlan]) -> ServicePlan:
    """`chosen`, or a plan of equal rate with much less time per token and no later first token."""
    expected = chosen.rival.expected
    soon = [plan for plan in near if plan.rival.expected.ttft_ms <= expected.ttft_ms]
    quickest = min(soon, key=lambda plan: plan.rival.expected.tpot_ms, default=chosen)
    return quickest if QUICKER * quickest.rival.expected.tpot_ms < expected.tpot_ms else chosen


def _best_rate(rehearsals: Iterable[ServicePlan], load: Load) -> float:
    expected = (plan.rival.expected for plan in rehearsals)
    return max((x.tokens_per_s for x in expected if x.is_within(load)), default=0.0)


def compared(plan: ServicePlan, objective: Objective = Objective.THROUGHPUT) -> Comparison:
    """One copy per device is always among the policies."""
    chosen = option_of(plan.rival, plan.cluster)
    others = (r for r in plan.rivals if r.policy in (SINGLE, DATA_PARALLEL) or r.policy != plan.policy)
    baselines = tuple(option_of(rival, plan.cluster) for rival in others)
    return Comparison(plan.policy, chosen, baselines, objective)


def drafted(fluid: FluidModel, policy: str, objective: Objective) -> float:
    options = (draft_option(draft, fluid.cluster) for draft in fluid.drafts(policy))
    return max((option.figure(objective) for option in options), default=0.0)


def draft_option(draft: ServiceDraft, cluster: Cluster) -> Option:
    """Figures of a draft, all of its devices busy all the time."""
    names = cluster.names
    sizes = tuple(
        GroupSize(g.role, tuple(names[d] for d in g.devices), g.sequences, g.sizes[-1], g.microbatches)
        for g in draft.groups
    )
    times = (draft.tpot_ms, draft.tpot_ms, draft.ttft_ms, draft.ttft_ms)
    expected = Expected(draft.tokens_per_s, *times, (1.0,) * len(names), (), 0)
    return option_of(Rival(draft.policy, sizes, expected), cluster)


def option_of(rival: Rival, cluster: Cluster) -> Option:
    expected = rival.expected
    used = {name for group in rival.groups for name in group.devices}
    devices = [(d, busy) for d, busy in zip(cluster.devices, expected.busy, strict=True) if d.name in used]
    watts = total(d.tdp_w and d.tdp_w * (IDLE_SHARE + (1.0 - IDLE_SHARE) * busy) for d, busy in devices)
    batch: dict[str, int] = {}
    for group in rival.groups:
        for name in group.devices:
            batch[name] = batch.get(name, 0) + group.sequences * group.microbatches
    return Option(
        rival.policy,
        expected.tokens_per_s,
        expected.tpot_ms,
        expected.ttft_ms,
        batch,
        sum(group.microbatches for group in rival.groups),
        usd_per_hour=total(device.usd_per_hour for device, _ in devices),
        joules_per_token=watts and watts / expected.tokens_per_s,
    )


def _rehearsals(
    fluid: FluidModel, policy: str, make: MakePlan, rehearse: Rehearse, most: float
) -> list[ServicePlan]:
    rehearsals: list[ServicePlan] = []
    drafted_plans = DraftedPlans(fluid, policy, make)
    slack, best = 1.0, 0.0
    # A quick plan tries more while nothing keeps to the limits.
    missing = FLUID if fluid.is_strict else fluid.config
    while True:
        next_draft = None
        if len(rehearsals) < (fluid.config if best or most else missing).num_rehearsed:
            next_draft = drafted_plans.best(slack, max(BEHIND * most, (1.0 + TIE) * best) if best else 0.0)
        if next_draft is None and not (best or most):
            next_draft = drafted_plans.nearest()
        if next_draft is None:
            break
        draft, plan = next_draft
        expected = _rehearsed(plan, fluid.load, rehearse)
        rehearsals.append(replace(plan, expected=expected))
        best = _best_rate(rehearsals, fluid.load)
        slack = _slack(fluid.load, draft, expected, slack)
    return rehearsals


@dataclass(frozen=True, eq=False)
class DraftedPlans:
    fluid: FluidModel
    policy: str
    make: MakePlan
    # None: a device holds more than its part.
    plans: dict[ServiceDraft, ServicePlan | None] = field(default_factory=dict)
    # Drafts that `best` returned.
    tried: set[ServiceDraft] = field(default_factory=set)

    def best(self, slack: float, least: float) -> tuple[ServiceDraft, ServicePlan] | None:
        """The best new draft with its plan, if it promises at least this rate.

        Waits of lanes over several devices are hardly known before a simulation: their plans come first.
        """
        candidates: list[tuple[bool, float, ServiceDraft, ServicePlan]] = []
        limit_ms = slack * (self.fluid.load.tpot_ms or math.inf)
        for depth in self.fluid.depths(self.policy):
            best_rate = max((rate for is_within, rate, *_ in candidates if is_within), default=least)
            fitting = self._fitting(slack, depth, max(least, (1.0 - self.fluid.config.waits) * best_rate))
            if fitting is not None:
                draft, plan = fitting
                ratio = _simulated(draft, plan)
                rate = draft.tokens_per_s / ratio
                if rate >= least:
                    candidates.append((ratio * draft.tpot_ms <= limit_ms, rate, draft, plan))
        if not candidates:
            return None
        *_, draft, plan = max(candidates, key=lambda row: row[:2])
        self.tried.add(draft)
        return draft, plan

    def _fitting(
        self, slack: float, depth: tuple[int, int], least: float
    ) -> tuple[ServiceDraft, ServicePlan] | None:
        """The best draft whose plan fits memory; lanes over several devices have no second one."""
        pool_tokens = math.inf
        skipped = set(() if self.policy in DIVIDED else self.tried)
        while sum(plan is None for plan in self.plans.values()) <= MAX_MISFITS:
            drafts = self.fluid.drafts(self.policy, slack, pool_tokens, depth)
            draft = next((draft for draft in drafts if draft not in skipped), None)
            if draft is None or draft.tokens_per_s < least:
                return None
            plan = self.made(draft)
            if plan is not None:
                return None if draft in self.tried else (draft, plan)
            skipped.add(draft)
            pool_tokens = SMALLER * draft.pool_tokens
        return None

    def made(self, draft: ServiceDraft) -> ServicePlan | None:
        if draft not in self.plans:
            try:
                self.plans[draft] = self.make(draft)
            except (PlanInfeasible, DeviceMemoryError):
                self.plans[draft] = None
        return self.plans[draft]

    def nearest(self) -> tuple[ServiceDraft, ServicePlan] | None:
        """The draft that misses the limits least, once, if fewer requests may keep them."""
        draft = self.fluid.nearest(self.policy)
        if draft is None or draft in self.tried or self.fluid.excess(draft) > FAR:
            return None
        self.tried.add(draft)
        plan = self.made(draft)
        return None if plan is None else (draft, plan)


def _simulated(draft: ServiceDraft, plan: ServicePlan) -> float:
    """Simulated over drafted step time."""
    if len(draft.groups[0].devices) == 1 or not plan.groups:
        return 1.0
    lane = plan.groups[0].plan
    steps_per_s = lane.simulated_per_s * sum(lane.unit.counts)
    return 1e3 * draft.groups[0].microbatches / steps_per_s / draft.tpot_ms


def _rehearsed(plan: ServicePlan, load: Load, rehearse: Rehearse) -> Expected:
    """At full load, or with as many requests at once as wait no longer than allowed."""
    expected = rehearse(plan, load, None)
    for turn in range(MAX_FEWER):
        if load.ttft_ms is None or expected.ttft_ms <= load.ttft_ms or expected.clients == 1:
            break
        late_s = 1e-3 * (expected.ttft_ms - AIM * load.ttft_ms)
        fewer = math.ceil(late_s * expected.tokens_per_s / load.output_tokens)
        fewer = max(fewer, (turn - SURE) * expected.clients // (MAX_FEWER - SURE - 1))
        expected = rehearse(plan, load, max(1, expected.clients - fewer))
    return expected


def _slack(load: Load, draft: ServiceDraft, expected: Expected, slack: float) -> float:
    """Share of the limits that drafts may take."""
    ratios = [
        (AIM * drafted / rehearsed, rehearsed > limit)
        for limit, drafted, rehearsed in (
            (load.tpot_ms, draft.tpot_ms, expected.tpot_ms),
            (load.ttft_ms, draft.ttft_ms, expected.ttft_ms),
        )
        if limit is not None and rehearsed  # no time per token in answers of one
    ]
    missed = [ratio for ratio, is_missed in ratios if is_missed]
    if missed:
        return min(slack, *missed)
    least = min((ratio for ratio, _ in ratios), default=slack)
    return least if least > 1.0 / UNDERCUT else slack


def _nearest(
    fluid: FluidModel, policies: Sequence[str], make: MakePlan, rehearse: Rehearse
) -> list[ServicePlan]:
    """One rehearsed plan: the draft that misses the limits least and fits memory."""
    drafts = [draft for policy in policies if (draft := fluid.nearest(policy)) is not None]
    for draft in sorted(drafts, key=fluid.excess):
        plan = DraftedPlans(fluid, draft.policy, make).made(draft)
        if plan is not None:
            return [replace(plan, expected=_rehearsed(plan, fluid.load, rehearse))]
    return []


def _refusal(fluid: FluidModel, missed: Sequence[ServicePlan]) -> PlanInfeasible:
    if not missed:
        message = f"the model and a few requests need {1.005e-9 * fluid.least_bytes:.3g} GB of one device"
        return PlanInfeasible(message, "Add a device, or plan for shorter requests.")
    times_ms = [(plan.rival.expected.tpot_ms, plan.rival.expected.ttft_ms) for plan in missed]
    return too_slow("service", *min(times_ms, key=lambda times: fluid.load.excess(*times)))
