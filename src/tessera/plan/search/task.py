"""Task: one planning run, with what is found once and used by many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tessera import ir
from tessera.plan.baselines import coarse_mixes
from tessera.plan.pricing import throughput
from tessera.plan.problem import Mix, Problem, joined

# Units of more launches than this are large: few candidates are looked at, those in full.
MANY_LAUNCHES = 4_500


@dataclass(eq=False)
class Task:
    """One planning run: the problem, and what is found once and used by many."""

    problem: Problem
    microbatches: int
    # Whether a simulation will judge; if not, busy time does, and no other candidate can win.
    is_judged: bool = False
    # Whether microbatches decode for ever; see `PlanConfig`.
    is_served: bool = False
    # A quick figure of a mix, in requests per second, to search by; set once the judge is there.
    quick: Callable[[Mix], float] | None = None

    @property
    def is_large(self) -> bool:
        """Does planning take so long that less is tried?"""
        return self.problem.unit.num_launches > MANY_LAUNCHES

    @cached_property
    def pool(self) -> throughput.Pool:
        """Columns known so far."""
        return throughput.Pool(self.problem, self.microbatches)

    @cached_property
    def coarse(self) -> dict[str, tuple[Mix, ...] | None]:
        """The candidates of every coarse policy."""
        return coarse_mixes(self.pool)

    @cached_property
    def free(self) -> throughput.Solved:
        """The optimum by busy time alone, and its bound."""
        self.seed()
        return throughput.generate(self.pool)

    @property
    def coarse_mixes(self) -> list[Mix]:
        """Those of all policies."""
        return [mix for mixes in self.coarse.values() for mix in mixes or ()]

    def seed(self) -> None:
        """Sees to it that the pool has columns; PlanInfeasible if nothing is found that fits."""
        if not self.pool.is_seeded:
            throughput.seed(self.pool, self.coarse_mixes)

    @cached_property
    def variants(self) -> tuple[ir.Variant, ...]:
        """Batches besides the problem's own that columns may be of."""
        return tuple(ir.Variant(p.unit, p.costs) for p in self.problem.others)


def joined_task(parts: Sequence[Task], microbatches: int, is_judged: bool) -> Task:
    """The tasks of several batches as one, with the placements that they know."""
    task = Task(joined([part.problem for part in parts]), microbatches, is_judged)
    for variant, part in enumerate(parts):
        task.pool.add(*(task.problem.scaled(column, variant) for column in part.pool.columns))
    task.pool.is_seeded = True
    return task
