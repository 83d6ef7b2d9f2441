"""BatchSearch: the best batch for steps that no service runs.

These are decodes or prefills alone, images, encoders, and models that read one token of each sequence a step.
Batches are planned with little effort until memory is exhausted, then ever nearer to the best, for every
number of microbatches; the best within the limits is planned in full. Each coarse policy gets its own best
point. Times follow Little's law. Equal cells (one H20 and one L40S of eight each) are searched as one, unless
it is too small; the whole is planned at its batch, with copies of the cell's plan as candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.ir.units import total
from tessera.plan.comparison import Comparison, Option, too_slow
from tessera.plan.config import QUICK
from tessera.plan.problem import Cells, build, cluster_of, costs_on, kinds_of, partitions
from tessera.plan.search.task import Simulator
from tessera.plan.solve import PlanConfig, solve, task_of

# First batches, and factors around the best one by round.
BATCHES = tuple(2 * 4**n for n in range(6))
ROUNDS = ((0.5, 2.0), (0.75, 1.5), (0.875, 1.25), (0.9375, 1.125), (0.97, 1.0625))
# Around a coarse policy's best batch.
NEAR = ROUNDS[2:]
# With more microbatches: shares of the best batch with fewer, and rounds around the best.
DEEPER, DEEPER_ROUNDS = (0.5, 0.75), ROUNDS[2:3]
# Microbatches per device.
DEPTHS = (1, 2)
REPLICAS = ("single", "data-parallel")


PricedUnit = tuple[ir.WorkUnit, tuple[ir.Costs, ...]]
# Whether the limits are kept; the objective's figure, or how near the limits are.
Merit = tuple[bool, float]
NOTHING: Merit = (False, float("-inf"))


def best_batch(
    merit: Callable[[int], Merit], batches: Sequence[int], rounds: Sequence[Sequence[float]] = ()
) -> int | None:
    """Up to the first batch that does not fit, then around the best."""
    rated: dict[int, Merit] = {}
    for batch in batches:
        rated[batch] = merit(batch)
        if rated[batch] == NOTHING:
            break
    for factors in rounds:
        best = max(rated, key=rated.__getitem__)
        for batch in sorted({_even(best * factor) for factor in factors} - set(rated)):
            rated[batch] = merit(batch)
    best = max(rated, key=rated.__getitem__)
    return None if rated[best] == NOTHING else best


@dataclass(frozen=True, eq=False)
class BatchSearch:
    unit_at: Callable[[int], PricedUnit]
    cluster: ir.Cluster
    # A unit without decodes counts rows.
    load: ir.Load
    config: PlanConfig
    simulate: Callable[[], Simulator]
    advance: Callable[[str], None] = lambda text: None
    # Plans with little effort and coarse policies, by (batch, microbatches).
    _plans: dict[tuple[int, int], ir.Plan | PlanInfeasible] = field(default_factory=dict)
    _coarse: dict[tuple[int, int], dict[str, Option]] = field(default_factory=dict)
    # By batch and device; None where it does not fit.
    _copies: dict[int, list[Option | None]] = field(default_factory=dict)

    def best(
        self, batches: Sequence[int] = BATCHES, depths: Sequence[int] = ()
    ) -> tuple[ir.Plan, Comparison]:
        """A single batch is not varied."""
        if copied := self._by_cells(batches, depths):
            return copied
        is_free = len(batches) > 1
        first, *others = depths or [depth * len(self.cluster.devices) for depth in DEPTHS]
        start = best_batch(partial(self._plan_merit, first, 0), batches, ROUNDS if is_free else ())
        for depth in others if start else ():
            near = sorted({_even(start * share) for share in DEEPER}) if start and is_free else batches
            best_batch(partial(self._plan_merit, depth, first), near, DEEPER_ROUNDS if is_free else ())
        if not self._feasible:
            raise next(error for error in self._plans.values() if isinstance(error, PlanInfeasible))
        coarse = self._coarse_options(NEAR if is_free else ())
        top = max(self._merit(self.option(plan)) for plan in self._feasible)
        for option in coarse:  # at other batches, maybe better ones
            if self._merit(option) > top:
                self._plan_merit(option.microbatches, 0, max(option.batch.values()))
        plans = self._feasible
        best = max(plans, key=lambda plan: self._merit(self.option(plan)))
        if not self._allows(self.option(best)):
            times = [(option.tpot_ms, option.ttft_ms) for option in map(self.option, plans)]
            raise too_slow("plan", *min(times, key=lambda times: self.load.excess(*times)))
        if self.config.search is not QUICK:
            search = replace(self.config.search, fewer_microbatches=())
            full = self._plan(best.batch, best.microbatches, replace(self.config, search=search))
            best = max(best, full, key=lambda plan: self._merit(self.option(plan)))
        baselines = (*self.copies(batches), *coarse)
        return best, Comparison(best.policy, self.option(best), baselines, self.config.objective)

    @property
    def _feasible(self) -> list[ir.Plan]:
        return [plan for plan in self._plans.values() if isinstance(plan, ir.Plan)]

    def _by_cells(self, batches: Sequence[int], depths: Sequence[int]) -> tuple[ir.Plan, Comparison] | None:
        """None without equal cells, or if they are too small."""
        config = self.config
        kinds = kinds_of(build(*self.unit_at(batches[0]), self.cluster))
        parts = next(partitions(kinds.members), ()) if kinds else ()
        is_free = config.objective is ir.Objective.THROUGHPUT and not config.policy and not config.constraints
        if not is_free or len(parts) != 1 or any(depth % len(parts[0]) for depth in depths):
            return None
        cells: Cells = parts[0]

        def part_at(batch: int) -> PricedUnit:
            unit, costs = self.unit_at(batch)
            return unit, costs_on(costs, cells[0])

        cluster = cluster_of(self.cluster, cells[0])
        part = replace(self, unit_at=part_at, cluster=cluster, _plans={}, _coarse={}, _copies={})
        try:
            plan, comparison = part.best(batches, [depth // len(cells) for depth in depths])
        except PlanInfeasible:
            return None
        copied = self._plan(plan.batch, len(cells) * plan.microbatches, config)  # copies are a candidate
        others = tuple(o if o.policy == "single" else self._copied(o, cells) for o in comparison.baselines)
        return copied, Comparison(copied.policy, self.option(copied), others, config.objective)

    def _copied(self, option: Option, cells: Cells) -> Option:
        names = self.cluster.names
        first = [option.batch.get(names[device]) for device in cells[0]]
        batches = [{names[d]: num for d, num in zip(cell, first, strict=True) if num} for cell in cells]
        return replace(together([replace(option, batch=batch) for batch in batches]), policy=option.policy)

    def _plan_merit(self, depth: int, tried_depth: int, batch: int) -> Merit:
        """Microbatches up to `tried_depth` are tried already."""
        if (batch, depth) not in self._plans:
            self.advance(f"planning batch {batch}")
            fewer = tuple(num for num in QUICK.fewer_microbatches if num > tried_depth)
            quick = replace(QUICK, fewer_microbatches=fewer)
            try:
                plan = self._plan(batch, depth, replace(self.config, search=quick, shown_microbatches=()))
            except PlanInfeasible as error:
                self._plans[batch, depth] = error
                return NOTHING
            self._plans[batch, depth] = plan
            if plan.microbatches == depth:
                self._coarse[batch, depth] = self._options((plan.unit, plan.costs), plan.baselines)
        outcome = self._plans[batch, depth]
        return self._merit(self.option(outcome)) if isinstance(outcome, ir.Plan) else NOTHING

    def _plan(self, batch: int, microbatches: int, config: PlanConfig) -> ir.Plan:
        config = replace(config, microbatches=microbatches)
        return solve(*self.unit_at(batch), self.cluster, config, self.simulate())

    def _merit(self, option: Option | None) -> Merit:
        if option is None:
            return NOTHING
        if self._allows(option):
            return True, option.figure(self.config.objective)
        return False, -self.load.excess(option.tpot_ms, option.ttft_ms)

    def _allows(self, option: Option) -> bool:
        return self.load.excess(option.tpot_ms, option.ttft_ms) <= 1 + 1e-9

    def _coarse_options(self, rounds: Sequence[Sequence[float]]) -> list[Option]:
        for depth in sorted({depth for _, depth in self._plans}):
            self.advance(f"comparing with coarser policies, {depth} microbatches in flight")
            batches = [batch for batch, at in self._plans if at == depth]
            for name in dict.fromkeys(name for batch in batches for name in self._coarse_at(depth, batch)):
                start = max(batches, key=partial(self._coarse_merit, name, depth))
                best_batch(partial(self._coarse_merit, name, depth), (start,), rounds)
        best: dict[str, Option] = {}
        for option in (option for options in self._coarse.values() for option in options.values()):
            if self._allows(option):
                best[option.policy] = max(best.get(option.policy, option), option, key=self._merit)
        return list(best.values())

    def _coarse_merit(self, policy: str, depth: int, batch: int) -> Merit:
        return self._merit(self._coarse_at(depth, batch).get(policy))

    def _coarse_at(self, depth: int, batch: int) -> dict[str, Option]:
        if (batch, depth) not in self._coarse:
            priced, config = self.unit_at(batch), replace(self.config, search=QUICK, microbatches=depth)
            task = task_of(*priced, self.cluster, config, self.simulate())
            self._coarse[batch, depth] = self._options(priced, task.baselines)
        return self._coarse[batch, depth]

    def copies(self, batches: Sequence[int]) -> list[Option]:
        best: list[Option] = []
        for device in range(len(self.cluster.devices)):
            batch = best_batch(partial(self._copy_merit, device), batches, ROUNDS if len(batches) > 1 else ())
            option = batch and self._copies[batch][device]
            if option and self._allows(option):
                best.append(option)
        if not best:
            return []
        alone = max(best, key=self._merit)
        return [alone, *([together(best)] if len(best) > 1 else [])]

    def _copy_merit(self, device: int, batch: int) -> Merit:
        if batch not in self._copies:
            priced = self.unit_at(batch)
            problem = build(*priced, self.cluster, memory_share=self.config.memory_share)
            self._copies[batch] = [
                self._alone(priced, each) if problem.fits((problem.alone(each),), 1) else None
                for each in range(len(self.cluster.devices))
            ]
        return self._merit(self._copies[batch][device])

    def option(self, plan: ir.Plan) -> Option:
        rated = ir.Baseline(
            plan.policy, plan.simulated_per_s, plan.latency_us, plan.usd_per_1k_units,
            plan.joules_per_unit, plan.microbatches,
        )  # fmt: skip
        return self._option((plan.unit, plan.costs), plan.used, rated)

    def _options(self, priced: PricedUnit, baselines: Sequence[ir.Baseline]) -> dict[str, Option]:
        every = range(len(self.cluster.devices))
        rated = (x for x in baselines if x.throughput_per_s and x.name not in REPLICAS)
        return {baseline.name: self._option(priced, every, baseline) for baseline in rated}

    def _alone(self, priced: PricedUnit, device: int) -> Option:
        (unit, costs), card = priced, self.cluster.devices[device]
        us = sum(c.total_us(device) * count for c, count in zip(costs, unit.counts, strict=True))
        usd, joules = (
            card.usd_per_hour and card.usd_per_hour * us / 3.6e6,
            card.tdp_w and card.tdp_w * 1e-6 * us,
        )
        return self._option(priced, (device,), ir.Baseline("single", 1e6 / us, us, usd, joules, 1))

    def _option(self, priced: PricedUnit, devices: Sequence[int], rated: ir.Baseline) -> Option:
        rate_per_s, usd, joules = rated.throughput_per_s, rated.usd_per_1k_units, rated.joules_per_unit
        assert rate_per_s is not None
        assert rated.microbatches is not None
        tokens = priced[0].batch * max(1, self.load.output_tokens)
        return Option(
            rated.name,
            rate_per_s * tokens,
            *self._times_ms(priced, devices, 1e3 * rated.microbatches / rate_per_s),
            {self.cluster.names[device]: priced[0].batch for device in devices},
            rated.microbatches,
            usd and usd * rate_per_s * 3.6,
            joules and joules / tokens,
        )

    def _times_ms(self, priced: PricedUnit, devices: Sequence[int], ms: float) -> tuple[float, float]:
        """(time per token, time to the first token)."""
        unit, costs = priced
        is_decode = [g.trace.step.kind == "decode" for g in unit.graphs]
        runs = max(1, self.load.output_tokens)
        if len(is_decode) == 1 or not any(is_decode):
            return ms / runs, ms
        rows = zip(costs, unit.counts, strict=True)
        steps_us = [count * sum(map(c.total_us, devices)) for c, count in rows]
        before = sum(us for us, is_one in zip(steps_us, is_decode, strict=True) if not is_one)
        first_ms = ms * before / sum(steps_us)
        return (ms - first_ms) / runs, first_ms


def together(options: Sequence[Option]) -> Option:
    """Rates, rents and powers of separate devices add up."""
    watts = total(o.joules_per_token and o.joules_per_token * o.tokens_per_s for o in options)
    tokens_per_s = sum(o.tokens_per_s for o in options)
    return Option(
        "data-parallel",
        tokens_per_s,
        max(o.tpot_ms for o in options),
        max(o.ttft_ms for o in options),
        {name: batch for o in options for name, batch in o.batch.items()},
        sum(o.microbatches for o in options),
        total(o.usd_per_hour for o in options),
        watts and watts / tokens_per_s,
    )


def _even(batch: float) -> int:
    """A multiple of eight from 16 on."""
    return max(1, round(batch / 8) * 8 if batch >= 16 else round(batch))
