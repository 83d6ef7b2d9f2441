"""plan_batches: the best batch for steps that no service runs.

These are decodes or prefills alone, images, encoders, and models whose state is kept by row. A work unit is
the steps of a batch of requests. Points (batch, microbatches in flight) are planned with little effort until
memory is exhausted, then batches next to the best one; the best point within the limits is planned in full.
Each coarse policy gets its own best point. Copies of the model (`single`, `data-parallel`) get a batch of
their own on every device.

Times follow Little's law: n microbatches at r work units per second take n / r each. Steps before the decodes
are the time to the first token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.comparison import Comparison, Option
from tessera.plan.config import QUICK
from tessera.plan.problem import build
from tessera.plan.search.task import Simulator
from tessera.plan.solve import PlanConfig, solve

# First batches, and factors around the best.
BATCHES = tuple(2 * 4**n for n in range(6))
NEAR = (0.5, 0.75, 1.5, 2.0)
# Microbatches in flight per device.
DEPTHS = (1, 2)
REPLICAS = ("single", "data-parallel")


@dataclass(frozen=True, slots=True)
class Target:
    """Answer length and latency limits."""

    # Answer tokens per request; a unit without decodes counts rows.
    output_tokens: int
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def excess(self, option: Option) -> float:
        """The larger of both times relative to its limit; above 1: missed."""
        pairs = ((self.tpot_ms, option.tpot_ms), (self.ttft_ms, option.ttft_ms))
        return max((ms / limit for limit, ms in pairs if limit is not None), default=0.0)

    def allows(self, option: Option) -> bool:
        return self.excess(option) <= 1 + 1e-9


# A batch of requests, priced.
PricedUnit = tuple[ir.WorkUnit, tuple[ir.Costs, ...]]


@dataclass(frozen=True, eq=False)
class BatchSearch:
    unit_at: Callable[[int], PricedUnit]
    cluster: ir.Cluster
    target: Target
    # Objective, effort, and most microbatches in flight.
    config: PlanConfig
    simulate: Callable[[], Simulator]
    advance: Callable[[str], None] = lambda text: None

    def best(
        self, batches: Sequence[int] = BATCHES, depths: Sequence[int] = ()
    ) -> tuple[ir.Plan, Comparison]:
        """The plan of the best point, beside coarse policies at theirs; `depths`: microbatches in flight."""
        depths = depths or [depth * len(self.cluster.devices) for depth in DEPTHS]
        quick, why = self._grown(batches, depths)
        if not quick:
            raise why or PlanInfeasible("no batch was given", "Give at least one.")
        best = max(quick, key=self._merit)
        if len(batches) > 1:
            near = sorted({_even(best.batch * factor) for factor in NEAR} - {plan.batch for plan in quick})
            quick += self._grown(near, depths)[0]
            best = max(quick, key=self._merit)
        if not self.target.allows(self.option(best)):
            raise self._refusal(quick)
        if self.config.search is not QUICK:
            best = max(best, self._plan(best.batch, best.microbatches, self.config), key=self._merit)
        return best, self._compared(best, quick)

    def _grown(
        self, batches: Sequence[int], depths: Sequence[int]
    ) -> tuple[list[ir.Plan], PlanInfeasible | None]:
        """Plans of the batches that fit; or why the first does not."""
        quick = replace(self.config, search=QUICK, shown_microbatches=())
        plans: list[ir.Plan] = []
        for batch in batches:
            self.advance(f"planning batch {batch}")
            try:
                plans += [self._plan(batch, depth, quick) for depth in depths]
            except PlanInfeasible as error:
                return plans, error
        return plans, None

    def _plan(self, batch: int, microbatches: int, config: PlanConfig) -> ir.Plan:
        config = replace(config, microbatches=microbatches)
        return solve(*self.unit_at(batch), self.cluster, config, self.simulate())

    def _merit(self, plan: ir.Plan) -> tuple[bool, float]:
        """The objective's figure within the limits, else how near they are."""
        option = self.option(plan)
        if self.target.allows(option):
            return True, option.figure(self.config.objective)
        return False, -self.target.excess(option)

    def _refusal(self, plans: Sequence[ir.Plan]) -> PlanInfeasible:
        fastest = min(map(self.option, plans), key=lambda o: (o.tpot_ms, o.ttft_ms))
        return PlanInfeasible(
            f"no plan keeps to the limits: the fastest takes {fastest.tpot_ms:.3g} ms a token and "
            f"{fastest.ttft_ms:.3g} ms to the first",
            "Allow more time, or add a faster device.",
        )

    def _compared(self, best: ir.Plan, plans: Sequence[ir.Plan]) -> Comparison:
        listed = list(self.copies(sorted({plan.batch for plan in plans})))
        for plan in plans:
            rated = (b for b in plan.baselines if b.throughput_per_s and b.name not in REPLICAS)
            listed += [self._baseline(plan, baseline) for baseline in rated]
        goal, kept = self.config.objective, [o for o in listed if self.target.allows(o)]
        names = dict.fromkeys(o.policy for o in kept)
        baselines = (
            max((o for o in kept if o.policy == name), key=lambda o: o.figure(goal)) for name in names
        )
        return Comparison(best.policy, self.option(best), tuple(baselines), goal)

    # Figures.

    def option(self, plan: ir.Plan) -> Option:
        joules = plan.joules_per_unit and plan.joules_per_unit / self._tokens(plan.batch)
        used = [self.cluster.names[d] for d in plan.used]
        return Option(
            plan.policy,
            plan.simulated_per_s * self._tokens(plan.batch),
            *self._times_ms(plan, plan.simulated_per_s),
            dict.fromkeys(used, plan.batch),
            plan.microbatches,
            plan.usd_per_hour,
            joules,
        )

    def _baseline(self, plan: ir.Plan, baseline: ir.Baseline) -> Option:
        rate, each, tokens = baseline.throughput_per_s, baseline.usd_per_1k_units, self._tokens(plan.batch)
        assert rate is not None, "it applies"
        return Option(
            baseline.name,
            rate * tokens,
            *self._times_ms(plan, rate),
            dict.fromkeys(self.cluster.names, plan.batch),
            plan.microbatches,
            each and each * rate * 3.6,
            baseline.joules_per_unit and baseline.joules_per_unit / tokens,
        )

    def copies(self, batches: Sequence[int]) -> list[Option]:
        """The best device alone, and a copy of the model on every device, each at its best batch."""
        best: dict[int, Option] = {}
        goal = self.config.objective
        for batch in batches:
            unit, costs = self.unit_at(batch)
            problem = build(unit, costs, self.cluster)
            for device in range(len(self.cluster.devices)):
                if not problem.fits((problem.alone(device),), 1):
                    continue
                option = self._alone(unit, costs, device)
                known = best.get(device, option)
                if self.target.allows(option) and option.figure(goal) >= known.figure(goal):
                    best[device] = option
        if not best:
            return []
        alone = max(best.values(), key=lambda o: o.figure(goal))
        return [alone, *([together(list(best.values()))] if len(best) > 1 else [])]

    def _alone(self, unit: ir.WorkUnit, costs: Sequence[ir.Costs], device: int) -> Option:
        steps_us = [c.total_us(device) * count for c, count in zip(costs, unit.counts, strict=True)]
        card, ms, tokens = self.cluster.devices[device], 1e-3 * sum(steps_us), self._tokens(unit.batch)
        times = self._split_ms(unit, steps_us, ms)
        joules = card.tdp_w and card.tdp_w * 1e-3 * ms / tokens
        return Option(
            "single", 1e3 * tokens / ms, *times, {card.name: unit.batch}, 1, card.usd_per_hour, joules
        )

    def _tokens(self, batch: int) -> int:
        return batch * max(1, self.target.output_tokens)

    def _times_ms(self, plan: ir.Plan, rate_per_s: float) -> tuple[float, float]:
        rows = zip(plan.costs, plan.unit.counts, strict=True)
        steps_us = [count * sum(map(c.total_us, plan.used)) for c, count in rows]
        return self._split_ms(plan.unit, steps_us, 1e3 * plan.microbatches / rate_per_s)

    def _split_ms(self, unit: ir.WorkUnit, steps_us: Sequence[float], ms: float) -> tuple[float, float]:
        """(time per token, time to the first token) of a request that takes so long."""
        is_decode = [g.trace.step.kind == "decode" for g in unit.graphs]
        runs = max(1, self.target.output_tokens)
        if len(is_decode) == 1 or not any(is_decode):
            return ms / runs, ms
        before = sum(us for us, is_one in zip(steps_us, is_decode, strict=True) if not is_one)
        first_ms = ms * before / sum(steps_us)
        return (ms - first_ms) / runs, first_ms


def together(listed: Sequence[Option]) -> Option:
    """Options of separate devices side by side: rates, rents and powers add up."""
    rents = [o.usd_per_hour for o in listed if o.usd_per_hour is not None]
    watts = [o.joules_per_token * o.tokens_per_s for o in listed if o.joules_per_token is not None]
    tokens_per_s = sum(o.tokens_per_s for o in listed)
    return Option(
        "data-parallel",
        tokens_per_s,
        max(o.tpot_ms for o in listed),
        max(o.ttft_ms for o in listed),
        {name: batch for o in listed for name, batch in o.batch.items()},
        sum(o.microbatches for o in listed),
        sum(rents) if len(rents) == len(listed) else None,
        sum(watts) / tokens_per_s if len(watts) == len(listed) else None,
    )


def _even(batch: float) -> int:
    """Rounded to a multiple of eight from 16 on."""
    return max(1, round(batch / 8) * 8 if batch >= 16 else round(batch))
