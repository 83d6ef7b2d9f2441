"""gain_of: is a new plan better than the one that runs, at costs corrected by what was measured?

Both are simulated at the corrected costs, each by what it is for: a latency plan by one request alone, any
other by what it can sustain. Busy time alone misleads where few requests are in flight, so a plan or a change
of shares that is better by a linear program may be worse when it runs. What is not better is not adopted.
"""

from dataclasses import replace

from tessera.adapt import Factors
from tessera.ir import Costs, Objective, Plan
from tessera.simulate.capability import alone, capacity_per_s
from tessera.simulate.policy import Policy, Truth, Workshop
from tessera.simulate.seats import Demand

# A new plan must do so many times as much. Capacities of one plan, measured with other requests of the same
# kind, differ by up to one percent, so less might be a loss; and a change of plans has a price.
LEAST_GAIN = 1.02


def corrected_costs(plan: Plan, factors: Factors) -> tuple[Costs, ...]:
    """The price lists of a plan that ran, by what was measured meanwhile."""
    return factors.apply(plan.unit, plan.costs)


def gain_of(old: Plan, new: Plan, costs: tuple[Costs, ...], demand: Demand) -> float:
    """How many times as good a new plan is, simulated at the same costs."""
    shop = Workshop(Truth(replace(old, costs=costs)))
    before, after = (Policy(plan.policy, plan, shop) for plan in (old, new))
    if old.objective is Objective.LATENCY:
        return alone(before, demand)["latency"] / alone(after, demand)["latency"]
    return capacity_per_s(after, demand) / capacity_per_s(before, demand)
