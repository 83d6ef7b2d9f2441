"""Task: one planning run. It has the problem and the pool of placements, compares mixes by the objective's
figure, and writes the plan.

The rate of a mix is simulated and at most its upper bound; without a simulator, by busy time. Cost divides it
by the rent, energy converts it to joules; latency is one request alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from tessera import ir
from tessera.plan.baselines import coarse_mixes
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.latency import RequestTimer
from tessera.plan.pricing import throughput
from tessera.plan.problem import Column, Mix, Problem, microbatch_table, restricted
from tessera.plan.search import objectives
from tessera.plan.search.robust import Sampler, robust_of

Scored = list[tuple[float, Mix]]


class Simulator(Protocol):
    """Requests per second."""

    def __call__(self, plan: ir.Plan) -> float: ...

    def quick(self, plan: ir.Plan) -> float:
        """A rougher estimate, for search."""

    def settled(self, plan: ir.Plan) -> float:
        """Over a long run, in which microbatches may fall into step."""


@dataclass(frozen=True, eq=False)
class Task:
    problem: Problem
    microbatches: int
    simulate: Simulator | None = None
    is_served: bool = False
    objective: ir.Objective = ir.Objective.THROUGHPUT
    policy: str = ir.Objective.THROUGHPUT.value
    config: SearchConfig = FULL
    fewest: int = 1
    _spans: dict[Column, float] = field(default_factory=dict, init=False)
    _rates: dict[Mix, float] = field(default_factory=dict, init=False)
    _settled: set[Mix] = field(default_factory=set, init=False)

    @property
    def is_large(self) -> bool:
        return self.problem.unit.num_launches > self.config.large_launches

    @cached_property
    def pool(self) -> throughput.Pool:
        return throughput.Pool(self.problem, self.microbatches, self.config, self.fewest)

    @cached_property
    def coarse(self) -> dict[str, tuple[Mix, ...] | None]:
        return coarse_mixes(self.pool)

    @cached_property
    def best_coarse(self) -> dict[str, Mix | None]:
        return {kind: self.best(mixes) if mixes else None for kind, mixes in self.coarse.items()}

    @property
    def baselines(self) -> tuple[ir.Baseline, ...]:
        return tuple(self._baseline(kind, mix) for kind, mix in self.best_coarse.items())

    @cached_property
    def free(self) -> throughput.Solved:
        """The optimum by busy time alone."""
        return throughput.generate(self.seeded)

    @cached_property
    def seeded(self) -> throughput.Pool:
        """With columns of the coarse policies, and some that fit memory."""
        _ = self.coarse
        throughput.seed(self.pool)
        return self.pool

    def figure(self, mix: Mix, rate_per_s: float) -> float:
        return objectives.figure(self.problem, self.objective, mix, rate_per_s)

    def num_microbatches(self, mix: Mix) -> int:
        return sum(mix.microbatches) or self.microbatches

    def followers(self, mix: Mix) -> list[int]:
        """Microbatches of each lane."""
        table = microbatch_table(mix, self.microbatches)[: self.num_microbatches(mix)]
        return [table.count(lane) for lane in range(len(mix.columns))]

    def upper_bound_per_s(self, mix: Mix) -> float:
        """By busy time and Little's law."""
        pairs = zip(self.followers(mix), mix.columns, strict=True)
        return min(mix.rate_per_s, 1e6 * sum(num / self._span_us(column) for num, column in pairs))

    def quick_per_s(self, mix: Mix) -> float:
        if self.simulate is None:
            return mix.rate_per_s
        return min(self.upper_bound_per_s(mix), self.simulate.quick(self.draft(mix)))

    def latency_us(self, mix: Mix) -> float:
        spans = (self._span_us(column) for column in mix.columns)
        return sum(share * span for share, span in zip(mix.shares, spans, strict=True)) / sum(mix.shares)

    @cached_property
    def _clock(self) -> RequestTimer:
        return RequestTimer(self.problem)

    def _span_us(self, column: Column) -> float:
        if column not in self._spans:
            self._spans[column] = self._clock.makespan_us(column.labels)
        return self._spans[column]

    def draft(self, mix: Mix) -> ir.Plan:
        prob, rate = self.problem, mix.rate_per_s
        lanes = tuple(
            ir.Lane(prob.placement(c.labels), s * rate) for s, c in zip(mix.shares, mix.columns, strict=True)
        )
        return ir.Plan(
            unit=prob.unit,
            cluster=prob.cluster,
            costs=prob.costs,
            objective=self.objective,
            policy=self.policy,
            lanes=lanes,
            microbatches=self.num_microbatches(mix),
            throughput_per_s=rate,
            simulated_per_s=rate,
            bound_per_s=rate,
            latency_us=0.0,
            lane_table=microbatch_table(mix, self.microbatches),
            constraints=tuple(str(constraint) for constraint in prob.constraints),
        )

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.problem, self.config.num_samples)

    def know(self, mix: Mix, rate_per_s: float) -> None:
        self._rates[mix] = rate_per_s
        self._settled.add(mix)

    def rate_per_s(self, mix: Mix) -> float:
        if self.simulate is None:
            return mix.rate_per_s
        if mix not in self._rates:
            self._rates[mix] = min(self.upper_bound_per_s(mix), self.simulate(self.draft(mix)))
        return self._rates[mix]

    def lasting(self, choose: Callable[[], Mix]) -> Mix:
        """Chooses again if the rate of the long run is lower."""
        while True:
            mix = choose()
            if self.simulate is None or mix in self._settled:
                return mix
            before = self.rate_per_s(mix)
            self.know(mix, min(self.upper_bound_per_s(mix), self.simulate.settled(self.draft(mix))))
            if self.rate_per_s(mix) >= before * (1 - self.config.tie):
                return mix

    def best(self, mixes: Sequence[Mix]) -> Mix:
        if self.objective is ir.Objective.LATENCY:
            return min(mixes, key=self.latency_us)
        return self._scored(mixes)[0][1]

    def simplest(self, mixes: Sequence[Mix], floors: Sequence[Mix]) -> Mix:
        """Near the best and above all floors."""
        config = self.config
        scored = self._scored([*floors, *mixes])
        best = scored[0][0]
        slack = config.near_tie if self._sampler.has_errors else config.tie
        floor = max((self._figure(m) for m in floors), default=0.0)
        floor = max(floor, best * (1 - slack))
        rivals = self._rivals(scored)
        regrets = {m: r.regret for m, r in zip(rivals, self._robust(rivals), strict=True)}

        def badness(item: tuple[float, Mix]) -> tuple[float, float, int, float, float]:
            value, mix = item
            regret = round(regrets[mix] / config.regret_step)
            behind = max(0, round((best - value) / best / config.regret_step))
            return regret + behind, regret, len(mix.columns), mix.num_messages, -value

        return min(((x, m) for x, m in scored if x >= floor and m in regrets), key=badness)[1]

    def _rivals(self, scored: Scored) -> list[Mix]:
        config = self.config
        return [m for x, m in scored[: config.max_rivals] if x >= scored[0][0] * (1 - config.rival)]

    def _robust(self, mixes: Sequence[Mix]) -> list[ir.Robust]:
        return robust_of(self._sampler, mixes, [self.rate_per_s(m) for m in mixes])

    def _figure(self, mix: Mix) -> float:
        return self.figure(mix, self.rate_per_s(mix))

    def _scored(self, mixes: Sequence[Mix]) -> Scored:
        """Skips mixes whose upper bound is below the best."""
        scored: Scored = []
        best = 0.0
        bounds = [(self.figure(m, m.rate_per_s), n, m) for n, m in enumerate(mixes)]
        for bound, _, mix in sorted(bounds, key=lambda x: (-x[0], x[1])):
            least = best * (1 - self.config.near_tie)
            if bound < least:
                continue
            is_open = self.simulate is None or mix in self._rates
            if is_open or self.figure(mix, self.upper_bound_per_s(mix)) >= least:
                scored.append((self._figure(mix), mix))
                best = max(best, scored[-1][0])
        return sorted(scored, key=lambda x: -x[0])

    def _baseline(self, name: str, mix: Mix | None) -> ir.Baseline:
        if mix is None:
            return ir.Baseline(name, None, None)
        plan = replace(self.draft(mix), simulated_per_s=self.rate_per_s(mix))
        latency_us, joules = self.latency_us(mix), self._joules(mix)
        return ir.Baseline(
            name, plan.simulated_per_s, latency_us, plan.usd_per_1k_units, joules, plan.microbatches
        )

    def finished(self, mix: Mix, rivals: Sequence[Mix], shown_microbatches: Sequence[int]) -> ir.Plan:
        """The plan of a mix; `rivals` are others that it is compared with under sampled costs."""
        plan = replace(
            self.draft(mix),
            simulated_per_s=self.rate_per_s(mix),
            bound_per_s=float(max(self._bound_per_s(mix), mix.rate_per_s)),
            latency_us=self.latency_us(mix),
            baselines=self.baselines,
            max_microbatches=self.problem.microbatches_that_fit(mix, self.microbatches),
            robust=self._robust_range(mix, rivals),
            joules_per_unit=self._joules(mix),
        )
        return replace(
            plan,
            by_microbatches=self._by_microbatches(plan, shown_microbatches),
            rounding_loss=self._rounding_loss(plan),
        )

    def _robust_range(self, chosen: Mix, others: Sequence[Mix]) -> ir.Robust | None:
        """None without cost errors, and for latency (not linear in costs)."""
        if not self._sampler.has_errors or self.objective is ir.Objective.LATENCY:
            return None
        scored = self._scored([chosen, *(m for m in others if m != chosen)])
        rivals = [m for m in self._rivals(scored) if m != chosen]
        return self._robust([chosen, *rivals])[0]

    def _rounding_loss(self, plan: ir.Plan) -> float:
        if self.simulate is None or len(plan.lanes) < 2:
            return 0.0
        quick = self.simulate.quick
        return max(0.0, 1.0 - quick(plan) / max(quick(replace(plan, lane_table=())), 1e-12))

    def _joules(self, mix: Mix) -> float | None:
        devices = self.problem.cluster.devices
        if any(devices[d].tdp_w is None for d in mix.devices):
            return None
        return objectives.joules(self.problem, mix, self.rate_per_s(mix))

    def _by_microbatches(self, plan: ir.Plan, microbatches: Sequence[int]) -> tuple[tuple[int, float], ...]:
        simulate, is_large = self.simulate, self.is_large
        if simulate is None or not microbatches:
            return ()
        # Large units: at most twice the plan's, by quick estimate.
        most = min(2 * plan.microbatches if is_large else max(microbatches), plan.max_microbatches or 1 << 30)
        rate = simulate.quick if is_large else simulate
        others = sorted({n for n in microbatches if n <= most and n != plan.microbatches})
        rated = [(n, min(plan.throughput_per_s, rate(replace(plan, microbatches=n)))) for n in others]
        return tuple(sorted([*rated, (plan.microbatches, plan.simulated_per_s)]))

    def _bound_per_s(self, mix: Mix) -> float:
        """For cost and energy, of the devices in use."""
        problem = self.problem
        is_all = self.objective in (ir.Objective.THROUGHPUT, ir.Objective.LATENCY)
        if is_all or len(mix.devices) == problem.num_devices:
            return self.free.bound_per_s
        part = restricted(problem, mix.devices)
        assert part is not None, "the mix places every launch on them"
        return Task(part, self.microbatches, config=self.config).free.bound_per_s
