"""Batch as a decision: the same steps at several batches in, one plan out, with lanes of unlike batches.

Every batch is planned by itself first. Under the throughput objective mixes over all of them follow, judged
by the same simulation, in work units of the batch whose own plan is best:
  the optimum of one linear program over all batches, with and without limits of depth,
  every device by itself at its best batch, which is data-parallel with batches chosen,
  what the search (`search`) finds from these and from the batches' own plans.
The plan is never below the best one-batch plan, nor below a coarse policy at the best of the batches;
data-parallel may have a batch a device for that. Its bound holds for mixes of all batches. Other objectives,
and other policies than these two, get the best one-batch plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible
from tessera.plan.problem import Column, Mix, by_speed, microbatch_counts
from tessera.plan.search.judge import Judge
from tessera.plan.search.local import throughput_mixes
from tessera.plan.search.task import joined_task
from tessera.plan.solve import PlanConfig, Simulator, Solution, objective_figure, work_out

# The policies that may have lanes of unlike batches.
JOINT_POLICIES = (None, "throughput", "data-parallel")


@dataclass(frozen=True)
class Tried:
    """One batch: its steps and prices, and its own plan or why it has none."""

    variant: ir.Variant
    made: ir.Plan | PlanInfeasible

    def figure(self, goal: ir.Objective) -> float:
        """By the objective and per row of the batch; more is better, and no plan is worst."""
        if isinstance(self.made, PlanInfeasible):
            return -1.0
        figure = objective_figure(self.made, goal)
        return figure if goal is ir.Objective.LATENCY else self.variant.batch * figure


@dataclass(frozen=True)
class Batched:
    """The plan, and what each batch by itself would give."""

    plan: ir.Plan
    tried: tuple[Tried, ...]


def solve_batches(
    variants: Sequence[ir.Variant],
    cluster: ir.Cluster,
    config: PlanConfig,
    make_simulate: Callable[[], Simulator] | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> Batched:
    """The best plan over all batches; `make_simulate` gives a simulator for one batch."""
    if len({v.batch for v in variants}) < len(variants):
        raise MismatchError("a batch was given twice", "Give the steps of every batch once.")
    tried: list[Tried] = []
    solved: list[Solution] = []
    for variant in variants:
        advance(f"planning batch {variant.batch}")
        simulate = None if make_simulate is None else make_simulate()
        try:
            found = work_out(variant.unit, variant.costs, cluster, config, simulate)
            solved.append(found)
            tried.append(Tried(variant, found.plan))
        except PlanInfeasible as error:
            tried.append(Tried(variant, error))
    best = max(tried, key=lambda t: t.figure(config.objective)).made
    if isinstance(best, PlanInfeasible):
        raise _nothing_fits(tried)
    is_joint = config.objective is ir.Objective.THROUGHPUT and config.policy in JOINT_POLICIES
    if len(solved) > 1 and is_joint:
        advance("joining batches")
        first = next(s for s in solved if s.plan is best)
        simulate = None if make_simulate is None else make_simulate()
        ordered = [first, *(s for s in solved if s is not first)]
        best = _Joining(ordered, config, simulate).plan()
    return Batched(best, tuple(tried))


def _nothing_fits(tried: Sequence[Tried]) -> PlanInfeasible:
    smallest = min(tried, key=lambda t: t.variant.batch)
    if len(tried) == 1 and isinstance(smallest.made, PlanInfeasible):
        return smallest.made
    return PlanInfeasible(f"no batch fits; at batch {smallest.variant.batch}: {smallest.made}")


class _Joining:
    """Batches that have a plan each, the best one's first, on the way to one plan."""

    def __init__(self, solved: Sequence[Solution], config: PlanConfig, simulate: Simulator | None) -> None:
        self._solved, self._config = solved, config
        self._task = joined_task([s.task for s in solved], config.microbatches, simulate is not None)
        # Work units in a request of each batch.
        self._weights = [s.plan.batch / solved[0].plan.batch for s in solved]
        self._judge = Judge(self._task, config.objective, config.name, simulate)
        # The batches' own plans as mixes of all, with the rates they were judged at.
        self._own = [
            replace(s.chosen, columns=tuple(self._task.problem.scaled(c, v) for c in s.chosen.columns))
            for v, s in enumerate(solved)
        ]
        for solution, weight, mix in zip(solved, self._weights, self._own, strict=True):
            self._judge.know(mix, solution.plan.simulated_per_s * weight)

    def plan(self) -> ir.Plan:
        """The best of the batches' own plans and of mixes over all."""
        judge, aparts = self._judge, self._aparts()
        apart = judge.lasting(lambda: judge.best(aparts))
        baselines = self._baselines(apart)
        self._task.quick = judge.quick_rate
        is_searched = self._config.policy != "data-parallel"
        found = throughput_mixes(self._task, (*self._own, apart)) if is_searched else ()
        mixes = [mix for mix in found if len({c.variant for c in mix.columns}) > 1]
        chosen = judge.lasting(lambda: judge.simplest([*self._own[1:], *mixes], [self._own[0], apart]))
        bound = self._task.free.bound_per_s
        for variant, mix in enumerate(self._own):
            if chosen is mix:
                weight = self._weights[variant]
                own = self._solved[variant].plan
                kept = replace(own, baselines=tuple(_scaled(b, 1 / weight) for b in baselines))
                return replace(kept, bound_per_s=float(max(bound / weight, own.throughput_per_s)))
        others = [*self._own, apart, *mixes]
        made = _rebased(self._judge.finished(chosen, baselines, others, self._config.shown_microbatches))
        ir.verify(made)
        return made

    def _aparts(self) -> list[Mix]:
        """Every device by itself at its best batch, as data-parallel would; where none can, the best plan.

        Where memory is short, more devices or larger batches take part if fewer requests are in flight.
        """
        found: list[Mix] = []
        for microbatches in range(self._config.microbatches, 0, -1):
            best = self._alone(microbatches)
            if not best or (microbatches < self._config.microbatches and len(best) > microbatches):
                continue
            mix = by_speed(best)
            if not found or mix.rate_per_s > found[-1].rate_per_s * (1 + 1e-9):
                is_full = microbatches == self._config.microbatches
                found.append(
                    mix if is_full else replace(mix, microbatches=microbatch_counts(mix, microbatches))
                )
        known = {_key(m): m for m in self._own}
        return [known.get(_key(m), m) for m in found] or [self._own[0]]

    def _alone(self, microbatches: int) -> list[Column]:
        """One placement a device that can serve alone with so many requests in flight, at its best batch."""
        best: list[Column] = []
        problem = self._task.problem
        for device in range(problem.num_devices):
            columns = [problem.alone(device, variant) for variant in range(len(problem.problems))]
            fitting = [c for c in columns if problem.fits((c,), microbatches)]
            best += sorted(fitting, key=lambda c: float(c.busy_us.max()))[:1]
        return best

    def _baselines(self, apart: Mix) -> tuple[ir.Baseline, ...]:
        """Of every coarse policy the best over the batches; data-parallel may have a batch a device."""
        listed = [
            [_scaled(b, weight) for b in s.plan.baselines]
            for s, weight in zip(self._solved, self._weights, strict=True)
        ]
        if apart is not self._own[0]:
            mixed = self._judge.baseline("data-parallel", apart)
            listed.append([mixed if b.name == mixed.name else b for b in listed[0]])
        return tuple(
            max(column, key=lambda b: b.throughput_per_s or 0.0) for column in zip(*listed, strict=True)
        )


def _key(mix: Mix) -> frozenset[tuple[bytes, int, float]]:
    microbatches = mix.microbatches or (0,) * len(mix.columns)
    return frozenset(
        (c.key, n, round(s, 6)) for c, n, s in zip(mix.columns, microbatches, mix.shares, strict=True)
    )


def _scaled(baseline: ir.Baseline, weight: float) -> ir.Baseline:
    """In work units of which its own hold `weight`."""
    return replace(
        baseline,
        throughput_per_s=_times(baseline.throughput_per_s, weight),
        usd_per_1k_units=_times(baseline.usd_per_1k_units, 1 / weight),
        joules_per_unit=_times(baseline.joules_per_unit, 1 / weight),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rebased(plan: ir.Plan) -> ir.Plan:
    """The plan with the variants that its lanes use only; rates count the first lane's."""
    used = list(dict.fromkeys(lane.variant for lane in plan.lanes))
    kept = [plan.every_variant[v] for v in used]
    factor = plan.batch / kept[0].batch
    robust = plan.robust
    if robust is not None:
        low, middle, high = (x * factor for x in (robust.p10_per_s, robust.p50_per_s, robust.p90_per_s))
        robust = replace(robust, p10_per_s=low, p50_per_s=middle, p90_per_s=high)
    return replace(
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
