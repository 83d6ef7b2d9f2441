"""Plan: assigns each launch of a work unit to a device.

In order: `config`, `arrays`, `constraints`, `problem` (the inputs as arrays), `pricing` (linear program over
placements), `latency`, `baselines` (coarse policies), `search` (candidates and judge), `solve`, `batches` and
`load` (entry points), `explain`.
"""

from tessera.plan.batches import Batched, Tried, solve_batches
from tessera.plan.config import EFFORTS, FULL, QUICK, SearchConfig, search_config
from tessera.plan.constraints import Constraint, constraints_of, parse_constraint
from tessera.plan.explain import DeviceMemory, Explanation, explain, latency_bound_us
from tessera.plan.load import BATCHES, NEAR, LoadConfig, PricedLoad
from tessera.plan.load_cells import plan_load
from tessera.plan.load_figures import Comparison, LoadPlan, Option, Target
from tessera.plan.search.planners import PLANNERS
from tessera.plan.search.task import Simulator
from tessera.plan.solve import PlanConfig, solve

__all__ = [
    "BATCHES", "EFFORTS", "FULL", "NEAR", "PLANNERS", "QUICK", "Batched", "Comparison", "Constraint",
    "DeviceMemory", "Explanation", "LoadConfig", "LoadPlan", "Option", "PlanConfig", "PricedLoad",
    "SearchConfig", "Simulator", "Target", "Tried", "constraints_of", "explain", "latency_bound_us",
    "parse_constraint", "plan_load", "search_config", "solve", "solve_batches",
]  # fmt: skip
