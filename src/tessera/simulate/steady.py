"""SteadyRates: the rate of a plan with all slots full, from a short stretch of simulated time.

The same loop as `simulate`, without a timeline. Short programs repeat, and repeated runs are skipped
(`repeated`); of long ones, and in a quick look, samples are simulated (`fluid`). What is looked at is in
`window`.
"""

from tessera.ir import Plan
from tessera.simulate.columns import Scripts
from tessera.simulate.fluid import Fluid
from tessera.simulate.repeated import Repeated
from tessera.simulate.window import Extent, extent_of, longest_list

# Lists of more items than this are sampled; in a quick look, those of more than the second.
LONG_LISTS, QUICK_LISTS = 150, 60
# Requests' worth of work before the clock counts, and while it does: slots that start spread over their
# requests fall in and out of step over several of them. Very long lists average out sooner.
FULL, QUICK, VERY_LONG = Extent(4.0, 10.0), Extent(2.0, 4.0), Extent(3.0, 6.0)
VERY_LONG_LISTS = 1000


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
            longest = longest_list(lanes)
            full = VERY_LONG if longest > VERY_LONG_LISTS else FULL
            extent = extent_of(plan, QUICK if is_quick else full)
            kind = Fluid if longest > (QUICK_LISTS if is_quick else LONG_LISTS) else Repeated
            rate = self._known[key] = kind(plan, self._scripts[0], lanes, extent).rate_per_us()
        return rate

    def _shares(self, plan: Plan) -> bool:
        """Is it of the unit, the costs and the cluster that are known?"""
        known, wanted = self._scripts, plan.every_variant
        return len(known) == len(wanted) and all(
            one.unit is other.unit and one.costs is other.costs and one.cluster is plan.cluster
            for one, other in zip(known, wanted, strict=True)
        )
