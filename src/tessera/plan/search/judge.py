"""The judge: compares mixes by one figure an objective, and writes the record of the chosen one.

Under the throughput objective the figure of a mix is
  without a simulator  its rate by busy time
  with one             what the simulator says, at most the rate by busy time (more than that is an
                       artefact of a finite run)
Cost divides it by the rent of the devices in use, energy makes joules of it; latency is one request alone.
Every figure is computed once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.latency import RequestTimer
from tessera.plan.problem import Column, Mix, microbatch_table, restricted
from tessera.plan.search import objectives
from tessera.plan.search.robust import Sampler, robust_of
from tessera.plan.search.task import Task

# Candidates this close to the best are as good, and the simplest of them is taken.
TIE = 5e-4
# Where costs state errors: of candidates this close, the one that keeps best when the costs are wrong.
NEAR = 5e-3
# Candidates this close to the best are compared under wrong costs, at most so many.
RIVAL, MAX_RIVALS = 0.05, 16
# Regrets are told apart in steps of this.
REGRET_STEP = 2e-3
# Requests in flight that a plan is simulated with, to show what more of them would give.
MICROBATCHES_SHOWN = (1, 2, 4, 8, 16)


class Simulator(Protocol):
    """Requests per second of a plan with plan.microbatches in flight."""

    def __call__(self, plan: ir.Plan) -> float:
        """The verdict on it."""

    def quick(self, plan: ir.Plan) -> float:
        """Rougher, to search by."""

    def settled(self, plan: ir.Plan) -> float:
        """In the long run: microbatches that start spread may fall into step, and then hinder one another."""


@dataclass(frozen=True, eq=False)
class Judge:
    """Compares the mixes of one task."""

    task: Task
    objective: ir.Objective
    policy: str
    simulate: Simulator | None
    _rates: dict[int, tuple[Mix, float]] = field(default_factory=dict)
    # Of those, the ones in the long run.
    _settled: set[int] = field(default_factory=set)
    _spans: dict[bytes, float] = field(default_factory=dict)
    _bounds: dict[tuple[int, ...], float] = field(default_factory=dict)

    @cached_property
    def _clocks(self) -> tuple[RequestTimer, ...]:
        """One a batch."""
        return tuple(RequestTimer(problem) for problem in self.task.problem.problems)

    @cached_property
    def _sampler(self) -> Sampler:
        """Costs as wrong as they may be."""
        return Sampler(self.task.problem)

    def know(self, mix: Mix, rate_per_s: float) -> None:
        """The rate of a mix in the long run."""
        self._rates[id(mix)] = (mix, rate_per_s)
        self._settled.add(id(mix))

    def rate_per_s(self, mix: Mix) -> float:
        """The figure that throughput is judged by."""
        if self.simulate is None:
            return mix.rate_per_s
        known = self._rates.get(id(mix))  # the mix is kept beside its rate, so its id stays its own
        if known is None:
            known = (mix, min(self.upper_bound_per_s(mix), self.simulate(self._draft(mix))))
            self._rates[id(mix)] = known
        return known[1]

    def settle(self, mix: Mix) -> bool:
        """Rates a mix by what it gives in the long run; True if that is less than was known."""
        if self.simulate is None or id(mix) in self._settled:
            return False
        before = self.rate_per_s(mix)
        self.know(mix, min(self.upper_bound_per_s(mix), self.simulate.settled(self._draft(mix))))
        return self.rate_per_s(mix) < before * (1 - TIE)

    def lasting(self, choose: Callable[[], Mix]) -> Mix:
        """What a choice comes to when whatever is chosen is rated by the long run."""
        while self.settle(found := choose()):
            pass
        return found

    def _can_reach(self, mix: Mix, figure: float) -> bool:
        """False where no simulation could."""
        if self.simulate is None:
            return True
        return self.figure(mix, self.upper_bound_per_s(mix)) >= figure

    def upper_bound_per_s(self, mix: Mix) -> float:
        """What no run exceeds: by busy time, and by Little's law, as no request is faster than one alone."""
        held = self._microbatches(mix)
        spans = [self.task.problem.weight_of(c) / self._span_us(c) for c in mix.columns]
        return min(mix.rate_per_s, 1e6 * sum(n * x for n, x in zip(held, spans, strict=True)))

    def _microbatches(self, mix: Mix) -> list[int]:
        """Microbatches that follow each column; of more columns than microbatches, some have none."""
        table = microbatch_table(mix, self.task.microbatches)[: self._num_microbatches(mix)]
        return [table.count(n) for n in range(len(mix.columns))]

    def _num_microbatches(self, mix: Mix) -> int:
        """Requests in flight; fewer than were asked for where memory has no room for more."""
        return sum(mix.microbatches) or self.task.microbatches

    def _units(self, mix: Mix) -> float:
        """Work units in an average request."""
        if not self.task.variants:
            return 1.0
        weight_of, parts = self.task.problem.weight_of, zip(mix.shares, mix.columns, strict=True)
        return 1.0 / sum(s / weight_of(c) for s, c in parts)

    @property
    def quick_rate(self) -> Callable[[Mix], float] | None:
        """What a search may ask often: a rougher figure of a mix."""
        if (simulate := self.simulate) is None:
            return None
        return lambda mix: min(self.upper_bound_per_s(mix), simulate.quick(self._draft(mix)))

    def latency_us(self, mix: Mix) -> float:
        """One request alone."""
        if self.task.variants:
            weight_of, parts = self.task.problem.weight_of, zip(mix.shares, mix.columns, strict=True)
            return self._units(mix) * sum(s / weight_of(c) * self._span_us(c) for s, c in parts)
        return sum(s * self._span_us(c) for s, c in zip(mix.shares, mix.columns, strict=True))

    def _span_us(self, column: Column) -> float:
        if column.key not in self._spans:
            self._spans[column.key] = self._clocks[column.variant].makespan_us(column.labels)
        return self._spans[column.key]

    def figure(self, mix: Mix, rate_per_s: float) -> float:
        """What the objective makes of a mix at a rate; more is better."""
        return objectives.figure(self.task.problem, self.objective, mix, rate_per_s)

    def best(self, mixes: Sequence[Mix]) -> Mix:
        """The best of some mixes by the objective."""
        if self.objective is ir.Objective.LATENCY:
            return min(mixes, key=self.latency_us)
        return self._scored(mixes)[0][1]

    def simplest(self, mixes: Sequence[Mix], baselines: Sequence[Mix]) -> Mix:
        """Of the mixes that are near the best and not below any baseline: the one that keeps best when the
        costs are wrong; of several such, the simplest."""
        floor = max((self.figure(m, self.rate_per_s(m)) for m in baselines), default=0.0)
        scored = self._scored([*baselines, *mixes])
        slack = NEAR if self._sampler.has_errors else TIE
        floor = max(floor, scored[0][0] * (1 - slack))
        regrets = dict(zip((id(m) for m in self._rivals(scored)), self._robust(scored), strict=True))
        near = [(value, m) for value, m in scored if value >= floor and id(m) in regrets]

        def badness(item: tuple[float, Mix]) -> tuple[float, float, int, float, float]:
            value, mix = item
            regret = round(regrets[id(mix)].regret / REGRET_STEP)
            behind = max(0, round((scored[0][0] - value) / scored[0][0] / REGRET_STEP))
            return regret + behind, regret, len(mix.columns), mix.num_messages, -value

        return min(near, key=badness)[1]

    def robust(self, chosen: Mix, others: Sequence[Mix]) -> ir.Robust | None:
        """The range of the chosen mix; its regret is against all candidates near it.

        None without errors, and for latency: a makespan is not linear in the costs.
        """
        if not self._sampler.has_errors or self.objective is ir.Objective.LATENCY:
            return None
        scored = self._scored([chosen, *(m for m in others if m is not chosen)])
        rivals = self._rivals(scored)
        if not any(m is chosen for m in rivals):
            rivals = [*rivals, chosen]
        found = robust_of(self._sampler, rivals, [self.rate_per_s(m) for m in rivals])
        return next(r for r, m in zip(found, rivals, strict=True) if m is chosen)

    def _rivals(self, scored: list[tuple[float, Mix]]) -> list[Mix]:
        return [m for value, m in scored[:MAX_RIVALS] if value >= scored[0][0] * (1 - RIVAL)]

    def _robust(self, scored: list[tuple[float, Mix]]) -> list[ir.Robust]:
        rivals = self._rivals(scored)
        return robust_of(self._sampler, rivals, [self.rate_per_s(m) for m in rivals])

    def _scored(self, mixes: Sequence[Mix]) -> list[tuple[float, Mix]]:
        """Best first; a mix that cannot come near the best so far is not simulated."""
        found: list[tuple[float, Mix]] = []
        best = 0.0
        upper_bounds = [(self.figure(m, m.rate_per_s), n, m) for n, m in enumerate(mixes)]
        for upper_bound, _, mix in sorted(upper_bounds, key=lambda x: (-x[0], x[1])):
            least = best * (1 - NEAR)
            if upper_bound >= least and (id(mix) in self._rates or self._can_reach(mix, least)):
                found.append((self.figure(mix, self.rate_per_s(mix)), mix))
                best = max(best, found[-1][0])
        return sorted(found, key=lambda x: -x[0])

    def baseline(self, name: str, mix: Mix | None) -> ir.Baseline:
        """What a coarse policy reaches."""
        if mix is None:
            return ir.Baseline(name, None, None)
        rate = self.rate_per_s(mix)
        return ir.Baseline(name, rate, self.latency_us(mix), self._usd(mix, rate), self._joules(mix))

    def finished(
        self,
        mix: Mix,
        baselines: tuple[ir.Baseline, ...],
        others: Sequence[Mix],
        shown_microbatches: Sequence[int] = MICROBATCHES_SHOWN,
    ) -> ir.Plan:
        """The whole record of the chosen mix."""
        plan = replace(
            self.plan(mix, baselines), robust=self.robust(mix, others), joules_per_unit=self._joules(mix)
        )
        return replace(
            plan,
            by_microbatches=self._by_microbatches(plan, shown_microbatches),
            rounding_loss=self._rounding_loss(plan),
        )

    def _rounding_loss(self, plan: ir.Plan) -> float:
        """What microbatches that follow lanes do less than requests that keep to the lanes' rates."""
        if self.simulate is None or len(plan.lanes) < 2:
            return 0.0
        quick = self.simulate.quick
        return max(0.0, 1.0 - quick(plan) / max(quick(replace(plan, lane_table=())), 1e-12))

    def _usd(self, mix: Mix, rate_per_s: float) -> float | None:
        cluster, devices = self.task.problem.cluster, objectives.used(mix)
        if any(cluster.devices[d].usd_per_hour is None for d in devices):
            return None
        return objectives.usd_per_hour(cluster, devices) / 3.6 / rate_per_s

    def _joules(self, mix: Mix) -> float | None:
        devices = self.task.problem.cluster.devices
        if any(devices[d].tdp_w is None for d in objectives.used(mix)):
            return None
        return objectives.joules(self.task.problem, mix, self.rate_per_s(mix))

    def _by_microbatches(self, plan: ir.Plan, microbatches: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """The same lanes with more or fewer requests in flight, as far as memory goes."""
        if self.simulate is None or not microbatches:
            return ()
        # The more microbatches, the longer it takes; of large units no more than twice the plan's are shown.
        most = 2 * plan.microbatches if self.task.is_large else max(microbatches)
        shown = sorted({*(n for n in microbatches if n <= most), plan.microbatches})
        fitting = [n for n in shown if plan.max_microbatches is None or n <= plan.max_microbatches]
        return tuple((n, self._at(plan, n)) for n in fitting)

    def _at(self, plan: ir.Plan, microbatches: int) -> float:
        if microbatches == plan.microbatches or self.simulate is None:
            return plan.simulated_per_s
        # Shown only, so of large units a rougher figure will do.
        simulate = self.simulate.quick if self.task.is_large else self.simulate
        return min(plan.throughput_per_s, simulate(replace(plan, microbatches=microbatches)))

    def plan(self, mix: Mix, baselines: tuple[ir.Baseline, ...] = ()) -> ir.Plan:
        """The record of a mix."""
        draft = self._draft(mix)
        return replace(
            draft,
            simulated_per_s=self.rate_per_s(mix),
            bound_per_s=float(max(self._bound_per_s(mix), mix.rate_per_s)),
            latency_us=self.latency_us(mix),
            baselines=baselines,
            max_microbatches=self.task.problem.microbatches_that_fit(mix, self.task.microbatches),
        )

    def _draft(self, mix: Mix) -> ir.Plan:
        """The record of a mix as far as a simulation needs it; its figures are those of busy time."""
        task, prob, rate = self.task, self.task.problem, mix.rate_per_s
        lanes = tuple(
            ir.Lane(prob.problems[c.variant].placement(c.labels), s * rate / prob.weight_of(c), c.variant)
            for s, c in zip(mix.shares, mix.columns, strict=True)
        )
        return ir.Plan(
            unit=prob.unit,
            cluster=prob.cluster,
            costs=prob.costs,
            objective=self.objective,
            policy=self.policy,
            lanes=lanes,
            microbatches=self._num_microbatches(mix),
            throughput_per_s=rate,
            simulated_per_s=rate,
            bound_per_s=rate,
            latency_us=0.0,
            lane_table=microbatch_table(mix, task.microbatches),
            constraints=tuple(str(constraint) for constraint in prob.constraints),
            variants=task.variants,
        )

    def _bound_per_s(self, mix: Mix) -> float:
        """Of any mix on the devices of the task; where the objective rents some of them, on those."""
        prob = self.task.problem
        devices = objectives.used(mix)
        whole = tuple(range(prob.num_devices))
        if self.objective in (ir.Objective.THROUGHPUT, ir.Objective.LATENCY) or devices == whole:
            return self.task.free.bound_per_s
        if devices not in self._bounds:
            part = restricted(prob, devices)
            if part is None:
                raise PlanInfeasible("the placement constraints leave a launch nowhere to run")
            self._bounds[devices] = Task(part, self.task.microbatches).free.bound_per_s
        return self._bounds[devices]
