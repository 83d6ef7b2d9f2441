"""Plan: who runs what. Takes a work unit, its costs and a cluster; gives a plan.

In the order of the flow: `arrays`, `constraints` and `problem` (work, costs and devices as arrays), `pricing`
(the linear program over placements), `latency`, `baselines` (the coarse policies that every plan is compared
with), `search` (candidates and their judge), `solve`, `batches` and `load` (what is asked for in, a plan
out), `explain`.
"""

from tessera.plan.batches import Batched, Tried, solve_batches
from tessera.plan.constraints import Constraint, constraints_of, parse_constraint
from tessera.plan.explain import Explanation, Room, explain, latency_bound_us
from tessera.plan.load import BATCHES, NEAR, LoadConfig, PricedLoad
from tessera.plan.load_cells import plan_load
from tessera.plan.load_figures import LoadPlan, Option, Target
from tessera.plan.search.planners import PLANNERS
from tessera.plan.solve import PlanConfig, Simulator, solve

__all__ = [
    "BATCHES", "NEAR", "PLANNERS", "Batched", "Constraint", "Explanation", "LoadConfig", "LoadPlan",
    "Option", "PlanConfig", "PricedLoad", "Room", "Simulator", "Target", "Tried", "constraints_of",
    "explain", "latency_bound_us", "parse_constraint", "plan_load", "solve", "solve_batches",
]  # fmt: skip
