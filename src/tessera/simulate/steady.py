"""SteadyRates: the rate of a plan with all slots full, from a short stretch of simulated time.

The same loop as `simulate`, without a timeline. Short programs repeat, and repeated runs are skipped
(`repeated`); of long ones, and in a quick look, samples are simulated (`fluid`). What is looked at is in
`window`.
"""

from tessera.ir import Plan
from tessera.simulate.columns import Scripts
from tessera.simulate.fluid import Fluid
from tessera.simulate.repeated import Repeated
from tessera.simulate.window import WINDOW, extent_of, longest_list

# Lists of more items than this are sampled; in a quick look, those of more than the second.
LONG_LISTS, QUICK_LISTS = 400, 60
# Requests' worth of work that is looked at in long lists, which average out sooner, and in a quick look.
LONG_WINDOW, QUICK_WINDOW = 3.0, 2.0


class SteadyRates:
    """Work units per second of plans with their slots full; plans of one unit share what they can."""

    def __init__(self) -> None:
        self._scripts: Scripts | None = None
        # What was simulated -> its rate per microsecond.
        self._known: dict[object, float] = {}

    def __call__(self, plan: Plan) -> float:
        """The rate of one plan."""
        return 1e6 * self._rate(plan, is_quick=False)

    def glance(self, plan: Plan) -> float:
        """A quick look at it: rougher, for ordering plans that are not near one another."""
        return 1e6 * self._rate(plan, is_quick=True)

    def _rate(self, plan: Plan, is_quick: bool) -> float:
        if self._scripts is None or not self._shares(plan):
            self._scripts = Scripts(plan.unit, plan.costs, plan.cluster)
            self._known.clear()
        # Rates of lanes matter only where no table says which lane comes next.
        shares = (plan.lane_table, () if plan.lane_table else tuple(lane.rate_per_s for lane in plan.lanes))
        key = (tuple(lane.placement for lane in plan.lanes), shares, plan.slots, is_quick)
        rate = self._known.get(key)
        if rate is None:
            lanes = [self._scripts.of(lane.placement) for lane in plan.lanes]
            longest = longest_list(lanes)
            window = QUICK_WINDOW if is_quick else LONG_WINDOW if longest > LONG_LISTS else WINDOW
            extent = extent_of(plan, window)
            kind = Fluid if longest > (QUICK_LISTS if is_quick else LONG_LISTS) else Repeated
            rate = self._known[key] = kind(plan, self._scripts, lanes, extent).rate_per_us()
        return rate

    def _shares(self, plan: Plan) -> bool:
        """Is it of the unit, the costs and the cluster that are known?"""
        known = self._scripts
        return known is not None and (
            known.unit is plan.unit and known.costs is plan.costs and known.cluster is plan.cluster
        )
