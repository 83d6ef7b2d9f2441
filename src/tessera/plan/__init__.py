"""Plan: assigns each launch of a work unit to a device, and groups of a service to a load."""

from tessera import make_callable
from tessera.plan.batches import BATCHES
from tessera.plan.comparison import Comparison, Option
from tessera.plan.config import EFFORTS, FULL, QUICK, SearchConfig, search_config
from tessera.plan.constraints import Constraint, parse_constraint
from tessera.plan.explain import DeviceMemory, Explanation, explain, latency_bound_us
from tessera.plan.search.task import Simulator
from tessera.plan.solve import PLANNERS, PlanConfig, solve

__all__ = [
    "BATCHES", "EFFORTS", "FULL", "PLANNERS", "QUICK", "Comparison", "Constraint", "DeviceMemory",
    "Explanation", "Option", "PlanConfig", "SearchConfig", "Simulator", "explain",
    "latency_bound_us", "parse_constraint", "search_config", "solve",
]  # fmt: skip

make_callable(__name__)  # tessera.plan(model, devices)
