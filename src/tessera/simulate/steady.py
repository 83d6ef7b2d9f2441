"""SteadyRates: the rate of a plan with all microbatches full, from a short stretch of simulated time.

The same loop as `simulate`, without a timeline (`window`). A verdict simulates every launch, of fewer requests
where programs are long; a quick look, and a verdict that would take seconds, simulates samples (`fluid`).
"""

from collections.abc import Sequence

from tessera.ir import Plan
from tessera.simulate.columns import Script, Scripts
from tessera.simulate.fluid import Fluid
from tessera.simulate.window import Extent, Window, extent_of

# Requests' worth of work before the clock counts, and while it does: microbatches that start spread over their
# requests fall in and out of step over several of them.
FULL, SHORT = Extent(4.0, 10.0), Extent(2.0, 4.0)
# Items of all runs that a verdict simulates at most (a second), and that it takes as long as it can for.
MOST_ITEMS, MANY_ITEMS = 300_000, 60_000
# In a quick look, lanes whose longest list has more items than this are sampled.
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
            is_sampled, wanted = _effort(lanes, is_quick)
            kind = Fluid if is_sampled else Window
            rate = kind(plan, self._scripts[0], lanes, extent_of(plan, wanted)).rate_per_us()
            self._known[key] = rate
        return rate

    def _shares(self, plan: Plan) -> bool:
        """Is it of the unit, the costs and the cluster that are known?"""
        known, wanted = self._scripts, plan.every_variant
        return len(known) == len(wanted) and all(
            one.unit is other.unit and one.costs is other.costs and one.cluster is plan.cluster
            for one, other in zip(known, wanted, strict=True)
        )


def _effort(lanes: Sequence[Sequence[Script]], is_quick: bool) -> tuple[bool, Extent]:
    """Are samples enough, and how much is looked at?"""
    if is_quick:
        longest = max(sum(script.num_items for script in lane) for lane in lanes)
        return longest > QUICK_LISTS, SHORT
    each = max(sum(script.count * script.num_items for script in lane) for lane in lanes)
    is_sampled = SHORT.total * each > MOST_ITEMS
    return is_sampled, FULL if is_sampled or FULL.total * each <= MANY_ITEMS else SHORT
