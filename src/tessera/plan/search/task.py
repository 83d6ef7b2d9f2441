"""Task: one planning run, with its problem, pool of placements and estimates."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tessera import ir
from tessera.plan.baselines import coarse_mixes
from tessera.plan.config import FULL, SearchConfig
from tessera.plan.latency import RequestTimer
from tessera.plan.pricing import throughput
from tessera.plan.problem import Column, Mix, Problem, microbatch_table
from tessera.plan.search import objectives


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
    # None: rates by busy time.
    simulate: Simulator | None = None
    is_served: bool = False
    objective: ir.Objective = ir.Objective.THROUGHPUT
    policy: str = ir.Objective.THROUGHPUT.value
    config: SearchConfig = FULL
    fewest: int = 1
    _spans: dict[bytes, float] = field(default_factory=dict)

    @property
    def is_large(self) -> bool:
        return self.problem.unit.num_launches > self.config.large_launches

    @cached_property
    def pool(self) -> throughput.Pool:
        return throughput.Pool(self.problem, self.microbatches, self.config, self.fewest)

    @cached_property
    def coarse(self) -> dict[str, tuple[Mix, ...] | None]:
        return coarse_mixes(self.pool)

    @property
    def coarse_mixes(self) -> list[Mix]:
        return [mix for mixes in self.coarse.values() for mix in mixes or ()]

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
        if column.key not in self._spans:
            self._spans[column.key] = self._clock.makespan_us(column.labels)
        return self._spans[column.key]

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
