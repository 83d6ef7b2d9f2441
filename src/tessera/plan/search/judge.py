"""Judge: compares mixes by the objective's figure, and writes the plan.

The rate of a mix is simulated and at most its upper bound; without a simulator, by busy time. Cost divides it
by the rent, energy converts it to joules; latency is one request alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera import ir
from tessera.plan.problem import Mix, MixKey, restricted
from tessera.plan.search import objectives
from tessera.plan.search.robust import Sampler, robust_of
from tessera.plan.search.task import Task

Scored = list[tuple[float, Mix]]


@dataclass(frozen=True, eq=False)
class Judge:
    task: Task
    _rates: dict[MixKey, float] = field(default_factory=dict)
    _settled: set[MixKey] = field(default_factory=set)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.task.problem, self.task.config.num_samples)

    def know(self, mix: Mix, rate_per_s: float) -> None:
        self._rates[mix.key] = rate_per_s
        self._settled.add(mix.key)

    def rate_per_s(self, mix: Mix) -> float:
        task = self.task
        if task.simulate is None:
            return mix.rate_per_s
        if mix.key not in self._rates:
            self._rates[mix.key] = min(task.upper_bound_per_s(mix), task.simulate(task.draft(mix)))
        return self._rates[mix.key]

    def settle(self, mix: Mix) -> bool:
        """True if the rate of the long run is lower."""
        task = self.task
        if task.simulate is None or mix.key in self._settled:
            return False
        before = self.rate_per_s(mix)
        self.know(mix, min(task.upper_bound_per_s(mix), task.simulate.settled(task.draft(mix))))
        return self.rate_per_s(mix) < before * (1 - task.config.tie)

    def lasting(self, choose: Callable[[], Mix]) -> Mix:
        while self.settle(chosen := choose()):
            pass
        return chosen

    def best(self, mixes: Sequence[Mix]) -> Mix:
        if self.task.objective is ir.Objective.LATENCY:
            return min(mixes, key=self.task.latency_us)
        return self._scored(mixes)[0][1]

    def simplest(self, mixes: Sequence[Mix], floors: Sequence[Mix]) -> Mix:
        """Near the best and above all floors."""
        config = self.task.config
        scored = self._scored([*floors, *mixes])
        best = scored[0][0]
        slack = config.near_tie if self._sampler.has_errors else config.tie
        floor = max((self._figure(m) for m in floors), default=0.0)
        floor = max(floor, best * (1 - slack))
        rivals = self._rivals(scored)
        regrets = {m.key: r.regret for m, r in zip(rivals, self._robust(rivals), strict=True)}

        def badness(item: tuple[float, Mix]) -> tuple[float, float, int, float, float]:
            value, mix = item
            regret = round(regrets[mix.key] / config.regret_step)
            behind = max(0, round((best - value) / best / config.regret_step))
            return regret + behind, regret, len(mix.columns), mix.num_messages, -value

        return min(((x, m) for x, m in scored if x >= floor and m.key in regrets), key=badness)[1]

    def _rivals(self, scored: Scored) -> list[Mix]:
        config = self.task.config
        return [m for x, m in scored[: config.max_rivals] if x >= scored[0][0] * (1 - config.rival)]

    def _robust(self, mixes: Sequence[Mix]) -> list[ir.Robust]:
        return robust_of(self._sampler, mixes, [self.rate_per_s(m) for m in mixes])

    def _figure(self, mix: Mix) -> float:
        return self.task.figure(mix, self.rate_per_s(mix))

    def _scored(self, mixes: Sequence[Mix]) -> Scored:
        """Skips mixes whose upper bound is below the best."""
        task, scored, best = self.task, [], 0.0
        bounds = [(task.figure(m, m.rate_per_s), n, m) for n, m in enumerate(mixes)]
        for bound, _, mix in sorted(bounds, key=lambda x: (-x[0], x[1])):
            least = best * (1 - task.config.near_tie)
            if bound < least:
                continue
            is_open = task.simulate is None or mix.key in self._rates
            if is_open or task.figure(mix, task.upper_bound_per_s(mix)) >= least:
                scored.append((self._figure(mix), mix))
                best = max(best, scored[-1][0])
        return sorted(scored, key=lambda x: -x[0])

    def baseline(self, name: str, mix: Mix | None) -> ir.Baseline:
        if mix is None:
            return ir.Baseline(name, None, None)
        plan = replace(self.task.draft(mix), simulated_per_s=self.rate_per_s(mix))
        latency_us, joules = self.task.latency_us(mix), self._joules(mix)
        return ir.Baseline(
            name, plan.simulated_per_s, latency_us, plan.usd_per_1k_units, joules, plan.microbatches
        )

    def finished(
        self,
        mix: Mix,
        baselines: tuple[ir.Baseline, ...] = (),
        rivals: Sequence[Mix] = (),
        shown_microbatches: Sequence[int] = (),
    ) -> ir.Plan:
        task = self.task
        plan = replace(
            task.draft(mix),
            simulated_per_s=self.rate_per_s(mix),
            bound_per_s=float(max(self._bound_per_s(mix), mix.rate_per_s)),
            latency_us=task.latency_us(mix),
            baselines=baselines,
            max_microbatches=task.problem.microbatches_that_fit(mix, task.microbatches),
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
        if not self._sampler.has_errors or self.task.objective is ir.Objective.LATENCY:
            return None
        scored = self._scored([chosen, *(m for m in others if m.key != chosen.key)])
        rivals = [m for m in self._rivals(scored) if m.key != chosen.key]
        return self._robust([chosen, *rivals])[0]

    def _rounding_loss(self, plan: ir.Plan) -> float:
        if self.task.simulate is None or len(plan.lanes) < 2:
            return 0.0
        quick = self.task.simulate.quick
        return max(0.0, 1.0 - quick(plan) / max(quick(replace(plan, lane_table=())), 1e-12))

    def _joules(self, mix: Mix) -> float | None:
        devices = self.task.problem.cluster.devices
        if any(devices[d].tdp_w is None for d in mix.devices):
            return None
        return objectives.joules(self.task.problem, mix, self.rate_per_s(mix))

    def _by_microbatches(self, plan: ir.Plan, microbatches: Sequence[int]) -> tuple[tuple[int, float], ...]:
        simulate, is_large = self.task.simulate, self.task.is_large
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
        task, problem = self.task, self.task.problem
        is_all = task.objective in (ir.Objective.THROUGHPUT, ir.Objective.LATENCY)
        if is_all or len(mix.devices) == problem.num_devices:
            return task.free.bound_per_s
        part = restricted(problem, mix.devices)
        assert part is not None, "the mix places every launch on them"
        return Task(part, task.microbatches, config=task.config).free.bound_per_s
