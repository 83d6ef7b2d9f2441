"""solve: work, prices and devices in, a plan out.

Candidates come from the planners by name; one judge compares them. Under the throughput objective the
judge's figure of a mix is
  without a simulator  its rate by busy time
  with one             what the simulator says, at most the rate by busy time (more than that is an
                       artefact of a finite run)
and the plan's `simulated_per_s` and every baseline's `throughput_per_s` are that same figure, while
the plan's `throughput_per_s` and `bound_per_s` always speak of busy time. So
  bound_per_s >= throughput_per_s >= simulated_per_s >= every baseline's throughput_per_s
for plans of the throughput objective. Near ties go to fewer lanes, then to fewer transfers, but never
below a baseline. Under the latency objective candidates are compared by one request's makespan.

`latency_us` is one request alone on an idle system: the mean over lanes, weighted by their shares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan.latency import Clock
from tessera.plan.policies import COARSE, PLANNERS, Task
from tessera.plan.problem import Column, Mix, build

# Requests per second of a plan with plan.slots in flight.
Simulate = Callable[[ir.Plan], float]

# Candidates this close to the best are as good, and the simplest of them is taken.
TIE = 5e-4


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What to plan for."""

    objective: ir.Objective
    # Requests in flight.
    slots: int = 4
    # Name of a policy in PLANNERS; None: the objective's own.
    policy: str | None = None


def solve(
    unit: ir.WorkUnit,
    costs: tuple[ir.Costs, ...],
    cluster: ir.Cluster,
    config: PlanConfig,
    simulate: Simulate | None = None,
) -> ir.Plan:
    """The best plan for the objective, verified, with what every coarse policy would reach."""
    if config.slots < 1:
        raise PlanInfeasible(f"{config.slots} requests in flight do no work", "Give at least one slot.")
    name = config.policy or config.objective.value
    planner = PLANNERS.get(name)
    task = Task(build(unit, costs, cluster), config.slots, simulate is not None)
    judge = _Judge(task, config.objective, name, simulate)
    coarse = {kind: judge.best(mixes) if (mixes := task.coarse[kind]) else None for kind in COARSE}
    mixes = planner(task)
    if not mixes:
        raise PlanInfeasible(f"the policy '{name}' does not apply to this work", _remedy(name))
    if name == config.objective.value == ir.Objective.THROUGHPUT.value:
        chosen = judge.simplest(mixes, [m for m in coarse.values() if m is not None])
    else:
        chosen = judge.best(mixes)
    plan = judge.plan(chosen, tuple(judge.baseline(kind, mix) for kind, mix in coarse.items()))
    ir.verify(plan)
    return plan


def _remedy(name: str) -> str:
    return f"Use one of: {', '.join(sorted(x for x in PLANNERS if x != name))}."


@dataclass(frozen=True, eq=False)
class _Judge:
    """Compares mixes; every figure is computed once."""

    task: Task
    objective: ir.Objective
    policy: str
    simulate: Simulate | None
    _rates: dict[int, tuple[Mix, float]] = field(default_factory=dict)
    _spans: dict[bytes, float] = field(default_factory=dict)

    @cached_property
    def _clock(self) -> Clock:
        return Clock(self.task.problem)

    def rate_per_s(self, mix: Mix) -> float:
        """The figure that throughput is judged by."""
        if self.simulate is None:
            return mix.rate_per_s
        known = self._rates.get(id(mix))  # the mix is kept beside its rate, so its id stays its own
        if known is None:
            known = (mix, min(mix.rate_per_s, self.simulate(self.plan(mix, simulated=mix.rate_per_s))))
            self._rates[id(mix)] = known
        return known[1]

    def latency_us(self, mix: Mix) -> float:
        """One request alone."""
        return sum(s * self._span_us(c) for s, c in zip(mix.shares, mix.columns, strict=True))

    def _span_us(self, column: Column) -> float:
        if column.key not in self._spans:
            self._spans[column.key] = self._clock.makespan_us(column.labels)
        return self._spans[column.key]

    def best(self, mixes: Sequence[Mix]) -> Mix:
        """The best of some mixes by the objective."""
        if self.objective is ir.Objective.LATENCY:
            return min(mixes, key=self.latency_us)
        return self._scored(mixes)[0][1]

    def simplest(self, mixes: Sequence[Mix], baselines: Sequence[Mix]) -> Mix:
        """The simplest of the mixes and baselines that are near the best and not below any baseline."""
        floor = max((self.rate_per_s(m) for m in baselines), default=0.0)
        scored = self._scored([*baselines, *mixes])
        floor = max(floor, scored[0][0] * (1 - TIE))
        near = [(rate, m) for rate, m in scored if rate >= floor]
        return min(near, key=lambda x: (len(x[1].columns), x[1].num_messages, -x[0]))[1]

    def _scored(self, mixes: Sequence[Mix]) -> list[tuple[float, Mix]]:
        """Best first; a mix whose busy time alone puts it below the best so far is not simulated."""
        found: list[tuple[float, Mix]] = []
        best = 0.0
        for mix in sorted(mixes, key=lambda m: -m.rate_per_s):
            if mix.rate_per_s >= best * (1 - TIE):
                found.append((self.rate_per_s(mix), mix))
                best = max(best, found[-1][0])
        return sorted(found, key=lambda x: -x[0])

    def baseline(self, name: str, mix: Mix | None) -> ir.Baseline:
        """What a coarse policy reaches."""
        if mix is None:
            return ir.Baseline(name, None, None)
        return ir.Baseline(name, self.rate_per_s(mix), self.latency_us(mix))

    def plan(
        self, mix: Mix, baselines: tuple[ir.Baseline, ...] = (), simulated: float | None = None
    ) -> ir.Plan:
        """The record of a mix."""
        task, rate = self.task, mix.rate_per_s
        prob = task.problem
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
            slots=task.slots,
            throughput_per_s=rate,
            simulated_per_s=self.rate_per_s(mix) if simulated is None else simulated,
            bound_per_s=max(task.free.bound_per_s, rate),
            latency_us=self.latency_us(mix),
            baselines=baselines,
        )
