"""Which bytes of a buffer an access reaches: an expression now, intervals once the launch is known.

    extent.resolve(LaunchConfig(grid, block, params)) -> Intervals

`Intervals` is a set of half-open byte ranges relative to the pointer; it always covers what the kernel
can touch there, and `exact` says that every byte in it is touched by some thread. An end that nothing
bounds is None: the consumer then takes the buffer's own end.

How: known numbers are put in; a sum whose 32-bit parts cannot wrap is expanded, otherwise it ranges over
the whole type; conditions clamp the sub-sums they compare; a loop is taken apart into its first turn and
the later ones, for which the condition of the turn before held; the rest is a sum of arithmetic
progressions, merged into intervals. Terms that share a variable are bounded as if they did not, which
only widens.
"""

from dataclasses import dataclass
from itertools import product

from tessera_ptx.expression import loops_in
from tessera_ptx.intervals import Intervals, merge
from tessera_ptx.launches import LaunchConfig, Limit, Part
from tessera_ptx.solve import Solver

_MAX_TAKEN_APART = 2


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes one kernel reaches through one pointer."""

    parts: tuple[Part, ...]
    # Conditions on the back edge of each loop that `parts` count, by loop.
    loops: tuple[tuple[int, tuple[Limit, ...]], ...] = ()

    def __str__(self) -> str:
        shown = list(dict.fromkeys(str(p) for p in self.parts))
        if "any" in shown or not shown:
            return "any"
        return " | ".join(shown[:8]) + (f" | ... {len(shown) - 8} more" if len(shown) > 8 else "")

    def resolve(self, launch: LaunchConfig) -> Intervals:
        """The bytes reached in a launch, relative to the pointer."""
        loops = dict(self.loops)
        spans: list[tuple[int | None, int | None]] = []
        exact = True
        for part in self.parts:
            if part.offset is None or part.width == 0:
                return Intervals(((None, None),), False)
            turning = sorted(loops_in([part.offset]) & set(loops))[:_MAX_TAKEN_APART]
            for later in product((False, True), repeat=len(turning)):
                solver = Solver(launch, loops, dict(zip(turning, later, strict=True)))
                found = solver.part(part)
                exact = exact and found.exact
                spans += found.spans
        return merge(spans, exact)


__all__ = ["Extent", "LaunchConfig", "Limit", "Part"]
