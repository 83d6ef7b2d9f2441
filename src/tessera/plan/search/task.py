"""Task: one planning run, with what is found once and used by many."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tessera import ir
from tessera.plan.arrays import Floats, Labels
from tessera.plan.baselines import coarse_mixes
from tessera.plan.pricing import throughput
from tessera.plan.problem import Column, Mix, Problem, microbatch_table
from tessera.plan.search.robust import Sampler

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
        throughput.seed(self.pool, [m for mixes in self.coarse.values() for m in mixes or ()])
        return throughput.generate(self.pool)

    @property
    def variants(self) -> tuple[ir.Variant, ...]:
        """Batches besides the problem's own that columns may be of; see `joint`."""
        return ()

    @cached_property
    def sampler(self) -> Sampler:
        """Costs as wrong as they may be."""
        return Sampler(self.problem)

    @property
    def columns(self) -> list[Column]:
        """Placements known so far, of all batches."""
        return self.pool.columns

    def column(self, variant: int, labels: Labels) -> Column:
        """A placement of one batch with its loads."""
        return self.problem.column(labels)

    def add(self, variant: int, labels: Labels) -> None:
        """A placement of one batch that may be of use."""
        self.pool.add(self.problem.column(labels))

    def fits_with(self, columns: Sequence[Column], microbatches: Sequence[int]) -> bool:
        """Are the constraints kept, and does memory hold so many requests in flight on each column?"""
        return self.pool.fits(columns, microbatches)

    def held_by(self, column: Column) -> Mix | None:
        """One placement with as many requests in flight as memory holds."""
        return self.pool.held_by((column,))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """One a batch, by the columns' numbers of variants."""
        return (self.problem,)

    def weight_of(self, column: Column) -> float:
        """Work units in one request of a column."""
        return 1.0

    def footprints(self, columns: Iterable[Column]) -> tuple[Floats, Floats]:
        """(bytes of weights on each device, [column, device]: bytes of a request in flight there)."""
        return self.problem.footprints(columns)

    def microbatches_that_fit(self, mix: Mix) -> int | None:
        """The most requests in flight that memory allows on a mix's lanes in turn; None: any number."""
        fixed, each = self.footprints(mix.columns)
        table = microbatch_table(mix, self.microbatches)
        left = self.problem.memory_bytes - fixed
        turn = each[list(table)].sum(axis=0)
        if not turn.any():
            return None
        turns = max(0, int((left[turn > 0] // turn[turn > 0]).min()))
        left = left - turns * turn
        for rest, lane in enumerate(table):
            left = left - each[lane]
            if (left < 0).any():
                return turns * len(table) + rest
        return (turns + 1) * len(table)
