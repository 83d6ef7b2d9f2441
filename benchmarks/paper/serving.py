"""What the two figures about serving share: a latency and a throughput plan, and what each can do.

Policies that a monitor switches between run the same steps, so both are of one batch.

Both plans are for the same devices and costs, as a monitor needs them. What a process has made it keeps.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.paper.compare import sources_of
from benchmarks.paper.library import Library
from benchmarks.paper.records import Shape, Wire, costs_in_words, wired
from benchmarks.row_service.study import Scenario, known_of

from tessera.adapt.capability import Capability
from tessera.flow import price
from tessera.ir import Objective, Plan
from tessera.plan import PlanConfig, solve
from tessera.simulate import SteadyRates
from tessera.simulate.arrivals import make_arrivals

GOALS = (Objective.LATENCY, Objective.THROUGHPUT)


@dataclass(frozen=True, eq=False)
class Served:
    """Two plans of one case, and figures of both."""

    plans: tuple[tuple[str, Plan], ...]
    known: tuple[Capability, ...]
    lengths: str
    source: str

    @property
    def best_per_s(self) -> float:
        """Requests per second of the policy that can do most."""
        return max(x.capacity_per_s for x in self.known)

    def phases(self, share: float) -> str:
        """A stream whose load is twice its mean in long phases and a third of it between them."""
        return f"bursty:{share * self.best_per_s:.5g},2,0.4,100"

    def setting(self, arrivals: str, num: int, seed: int = 0) -> Scenario:
        """A stream of requests with drawn lengths."""
        return Scenario(make_arrivals(arrivals, num, seed, self.lengths))

    def logged(self, path: str, share: float, num: int) -> Scenario:
        """The times of a log, as fast as this share of the capacity, with drawn lengths."""
        asked = make_arrivals(path, num, 0, self.lengths)
        own_per_s = len(asked.times_s) / max(asked.times_s[-1], 1e-9)
        speed = share * self.best_per_s / own_per_s
        return Scenario(replace(asked, times_s=tuple(t / speed for t in asked.times_s)))


@lru_cache(maxsize=1)
def served(library: Library, shape: Shape, gpus: tuple[str, ...], microbatches: int) -> Served:
    """Plans for both objectives; prompts and answers have the load's lengths on average."""
    unit, cluster = library.unit(shape), wired(gpus, Wire.preset("pcie4"))
    costs = price(unit, cluster)
    plans = []
    for goal in GOALS:
        rates = SteadyRates()
        config = PlanConfig(goal, microbatches, is_served=True, shown_microbatches=())
        plans.append((goal.value, solve(unit, costs, cluster, config, rates)))
    lengths = f"geometric:{shape.load.prompt},{shape.load.output}"
    known = known_of(plans, Scenario(make_arrivals("poisson:1", 1000, 0, lengths)))
    words = f"simulated on {costs_in_words(sources_of(costs))} costs"
    return Served(tuple(plans), known, lengths, words)
