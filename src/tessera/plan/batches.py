"""Batch size as a decision: one plan whose lanes may have different batches.

Each batch is planned alone first. For throughput, mixes over all batches are candidates too:
  optima of one linear program over all batches, with and without depth limits,
  each device alone at its best batch (data-parallel),
  results of the local search from these and from the single-batch plans.
The plan is never below the best single-batch plan or coarse policy; its bound covers mixes of all batches.
Other objectives and policies get the best single-batch plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible
from tessera.plan.problem import Column, Mix, Problem, by_speed, microbatch_counts
from tessera.plan.search.judge import Judge
from tessera.plan.search.local import throughput_mixes
from tessera.plan.search.task import Simulator, joined_task
from tessera.plan.solve import PlanConfig, Solution, choose, objective_figure, solution

# Policies whose lanes may have different batches.
JOINT_POLICIES = (None, "throughput", "data-parallel")


@dataclass(frozen=True)
class Tried:
    """One batch with its plan, or the reason it has none."""

    variant: ir.Variant
    made: ir.Plan | PlanInfeasible

    def figure(self, goal: ir.Objective) -> float:
        """The objective's figure per row; higher is better, -1 without a plan."""
        if isinstance(self.made, PlanInfeasible):
            return -1.0
        figure = objective_figure(self.made, goal)
        return figure if goal is ir.Objective.LATENCY else self.variant.batch * figure


@dataclass(frozen=True)
class Batched:
    """The plan, and the result of each single batch."""

    plan: ir.Plan
    tried: tuple[Tried, ...]


def solve_batches(
    variants: Sequence[ir.Variant],
    cluster: ir.Cluster,
    config: PlanConfig,
    make_simulate: Callable[[], Simulator] | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> Batched:
    """The best plan over all batches."""
    if len({v.batch for v in variants}) < len(variants):
        raise MismatchError("a batch was given twice", "Give the steps of every batch once.")
    simulator: Callable[[], Simulator | None] = make_simulate or (lambda: None)
    tried: list[Tried] = []
    solved: list[Solution] = []
    for variant in variants:
        advance(f"planning batch {variant.batch}")
        try:
            solved.append(solution(variant.unit, variant.costs, cluster, config, simulator()))
            tried.append(Tried(variant, solved[-1].plan))
        except PlanInfeasible as error:
            tried.append(Tried(variant, error))
    best = max(tried, key=lambda t: t.figure(config.objective)).made
    if isinstance(best, PlanInfeasible):
        smallest = min(tried, key=lambda t: t.variant.batch)
        message = f"no batch fits; at batch {smallest.variant.batch}: {smallest.made}"
        raise best if len(tried) == 1 else PlanInfeasible(message)
    is_joint = config.objective is ir.Objective.THROUGHPUT and config.policy in JOINT_POLICIES
    if len(solved) > 1 and is_joint:
        advance("joining batches")
        best = _joint_plan(sorted(solved, key=lambda s: s.plan is not best), config, simulator())
    return Batched(best, tuple(tried))


def _joint_plan(solved: Sequence[Solution], config: PlanConfig, simulate: Simulator | None) -> ir.Plan:
    """The best of the single-batch plans and mixes over all batches."""
    task = joined_task([s.task for s in solved], config.microbatches, simulate)
    judge = Judge(task)
    weights = [s.plan.batch / solved[0].plan.batch for s in solved]
    own = [
        replace(s.chosen, columns=tuple(task.problem.scaled(c, v) for c in s.chosen.columns))
        for v, s in enumerate(solved)
    ]
    for s, weight, mix in zip(solved, weights, own, strict=True):
        judge.know(mix, s.plan.simulated_per_s * weight)
    replicas = _replicas(task.problem, config.microbatches) or [own[0]]
    apart = judge.lasting(lambda: judge.best(replicas))
    listed = [
        [_scaled(b, weight) for b in s.plan.baselines] for s, weight in zip(solved, weights, strict=True)
    ]
    if apart.key != own[0].key:
        mixed = judge.baseline("data-parallel", apart)
        listed.append([mixed if b.name == mixed.name else b for b in listed[0]])
    baselines = tuple(max(x, key=lambda b: b.throughput_per_s or 0.0) for x in zip(*listed, strict=True))
    if config.policy == "data-parallel":
        mixes: list[Mix] = [*own, apart]
    else:
        searched = throughput_mixes(task, (*own, apart))
        mixes = [*own[1:], *(mix for mix in searched if len({c.variant for c in mix.columns}) > 1)]
    floors = [own[0], apart]
    return _rebased(choose(judge, mixes, floors, lambda: baselines, config.shown_microbatches).plan)


def _replicas(problem: Problem, most: int) -> list[Mix]:
    """Each device alone at its best batch; where memory is short, with fewer requests in flight."""
    mixes: list[Mix] = []
    for microbatches in range(most, 0, -1):
        best: list[Column] = []
        for device in range(problem.num_devices):
            columns = [problem.alone(device, variant) for variant in range(len(problem.problems))]
            fitting = [c for c in columns if problem.fits((c,), microbatches)]
            best += sorted(fitting, key=lambda c: float(c.busy_us.max()))[:1]
        if not best or (microbatches < most and len(best) > microbatches):
            continue
        mix = by_speed(best)
        if not mixes or mix.rate_per_s > mixes[-1].rate_per_s * (1 + 1e-9):
            counts = () if microbatches == most else microbatch_counts(mix, microbatches)
            mixes.append(replace(mix, microbatches=counts))
    return mixes


def _scaled(baseline: ir.Baseline, weight: float) -> ir.Baseline:
    """Plan figures in units of `weight` of its own."""
    return replace(
        baseline,
        throughput_per_s=_times(baseline.throughput_per_s, weight),
        usd_per_1k_units=_times(baseline.usd_per_1k_units, 1 / weight),
        joules_per_unit=_times(baseline.joules_per_unit, 1 / weight),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rebased(plan: ir.Plan) -> ir.Plan:
    """The plan with only the variants its lanes use."""
    used = list(dict.fromkeys(lane.variant for lane in plan.lanes))
    kept = [plan.every_variant[v] for v in used]
    factor = plan.batch / kept[0].batch
    robust = plan.robust
    if robust is not None:
        low, middle, high = (x * factor for x in (robust.p10_per_s, robust.p50_per_s, robust.p90_per_s))
        robust = replace(robust, p10_per_s=low, p50_per_s=middle, p90_per_s=high)
    plan = replace(
        plan,
        unit=kept[0].unit,
        costs=kept[0].costs,
        variants=tuple(kept[1:]),
        lanes=tuple(replace(lane, variant=used.index(lane.variant)) for lane in plan.lanes),
        throughput_per_s=plan.throughput_per_s * factor,
        simulated_per_s=plan.simulated_per_s * factor,
        bound_per_s=plan.bound_per_s * factor,
        baselines=tuple(_scaled(b, factor) for b in plan.baselines),
        by_microbatches=tuple((microbatches, rate * factor) for microbatches, rate in plan.by_microbatches),
        joules_per_unit=_times(plan.joules_per_unit, 1 / factor),
        robust=robust,
    )
    ir.verify(plan)
    return plan
