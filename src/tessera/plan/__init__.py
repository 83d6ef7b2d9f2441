"""Plan: who runs what. Takes a work unit, its costs and a cluster; gives a plan.

Read `solve` for the decision, `throughput` and `latency` for the mathematics, `policies` for the coarse
policies that every plan is compared with.
"""

from tessera.plan.batches import Batched, Tried, solve_batches
from tessera.plan.explain import Explanation, Room, explain, latency_bound_us
from tessera.plan.load import BATCHES, LoadPlan, Option, Target, plan_load
from tessera.plan.policies import PLANNERS
from tessera.plan.solve import PlanConfig, Simulate, solve
from tessera.plan.wishes import Wish, parse_wish, wishes_of

__all__ = [
    "BATCHES", "PLANNERS", "Batched", "Explanation", "LoadPlan", "Option", "PlanConfig", "Room", "Simulate",
    "Target", "Tried", "Wish", "explain", "latency_bound_us", "parse_wish", "plan_load", "solve",
    "solve_batches", "wishes_of",
]  # fmt: skip
