"""SteadyRates: the rate of a plan with all microbatches full, from a short stretch of simulated time.

The same loop as `simulate`, without a timeline (`window`). A verdict simulates every launch, of fewer
requests where programs are long; a quick look at long programs, and a verdict on very long ones that would
take a second, simulates samples (`fluid`).
"""

from tessera.ir import Plan
from tessera.simulate.columns import Script, Scripts
from tessera.simulate.fluid import Fluid
from tessera.simulate.window import Window, WindowExtent, extent_of

# Requests' worth of work before the clock counts, and while it does: microbatches that start spread over
# their requests fall in and out of step over several of them.
FULL, SHORT = WindowExtent(4.0, 10.0), WindowExtent(2.0, 4.0)
# Items of all runs of a request: with more than this fewer requests are simulated, and then samples.
LONG_REQUESTS, VERY_LONG_REQUESTS = 3000, 10_000
# In a quick look, lanes with more items than this are sampled.
QUICK_LISTS = 60


class SteadyRates:
    """Work units per second of plans with their slots full; plans of one unit share what they can."""

    def __init__(self) -> None:
        # One a variant.
        self._scripts: tuple[Scripts, ...] = ()
        # What was simulated -> its rate per microsecond.
        self._known: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        """The rate of one plan."""
        return 1e6 * self._rate(plan, is_quick=False)

    def glance(self, plan: Plan) -> float:
        """A quick look at it: rougher, for ordering plans that are not near one another."""
        return 1e6 * self._rate(plan, is_quick=True)

    def _rate(self, plan: Plan, is_quick: bool) -> float:
        if not self._shares(plan):
            self._scripts = tuple(Scripts(v.unit, v.costs, plan.cluster) for v in plan.every_variant)
            self._known.clear()
        # Rates of lanes matter only where no table says which lane comes next.
        shares = (plan.lane_table, () if plan.lane_table else tuple(lane.rate_per_s for lane in plan.lanes))
        followed = tuple((lane.variant, lane.placement) for lane in plan.lanes)
        key = (followed, shares, plan.slots, is_quick)
        rate = self._known.get(key)
        if rate is None:
            lanes = [self._scripts[lane.variant].of(lane.placement) for lane in plan.lanes]
            kind, wanted = _effort(lanes, is_quick)
            extent = extent_of(plan, wanted)
            rate = self._known[key] = kind(plan, self._scripts[0], lanes, extent).rate_per_us()
        return rate

    def _shares(self, plan: Plan) -> bool:
        """Is it of the unit, the costs and the cluster that are known?"""
        known, wanted = self._scripts, plan.every_variant
        return len(known) == len(wanted) and all(
            one.unit is other.unit and one.costs is other.costs and one.cluster is plan.cluster
            for one, other in zip(known, wanted, strict=True)
        )


def _effort(lanes: list[tuple[Script, ...]], is_quick: bool) -> tuple[type[Window], WindowExtent]:
    """Are samples enough, and how much is looked at?"""
    if is_quick:
        longest = max(sum(script.num_items for script in lane) for lane in lanes)
        return Fluid if longest > QUICK_LISTS else Window, SHORT
    each = max(sum(script.count * script.num_items for script in lane) for lane in lanes)
    if each > VERY_LONG_REQUESTS:
        return Fluid, FULL
    return Window, SHORT if each > LONG_REQUESTS else FULL
