"""Plans and policies for tests of serving: one model on two devices, quick alone or quick together."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.row_service.server import SimulatedRun, SimulatedServer, load_of

from factories import make_chain, make_cluster, make_plan
from tessera.ir import Arrivals, Cluster, Objective, Plan
from tessera.simulate.stepper import NO_FAULTS, Faults

# One decode is four launches of 10 us.
LAUNCHES, LAUNCH_US = 4, 10.0
RUN_US = LAUNCHES * LAUNCH_US


def alone_plan(microbatches: int = 4) -> Plan:
    """Everything on d0: 40 us a run, whatever else runs."""
    plan = make_plan(
        [make_chain(LAUNCHES)], [[[0] * LAUNCHES]], cluster=_cluster(), microbatches=microbatches
    )
    return replace(plan, objective=Objective.LATENCY, policy="latency")


def split_plan(microbatches: int = 4) -> Plan:
    """Half on each device: 50 us alone, 20 us a run when full."""
    plan = make_plan([make_chain(LAUNCHES)], [[[0, 0, 1, 1]]], cluster=_cluster(), microbatches=microbatches)
    return replace(plan, policy="throughput")


def both_plans(microbatches: int = 4) -> list[tuple[str, Plan]]:
    """The two to choose among."""
    return [("latency", alone_plan(microbatches)), ("throughput", split_plan(microbatches))]


def _cluster() -> Cluster:
    return make_cluster(latency_us=10.0)


def at_us(*times: float, outputs: Sequence[int] = ()) -> Arrivals:
    """Requests at given microseconds."""
    return Arrivals("made", tuple(t * 1e-6 for t in times), (1,) * len(outputs), tuple(outputs))


def serve(
    plan: Plan,
    arrivals: Arrivals,
    rows: int = 1,
    faults: Faults = NO_FAULTS,
    max_waiting: int | None = None,
) -> SimulatedRun:
    """Arrivals through one plan."""
    requests = load_of(plan.unit, arrivals, rows)
    return SimulatedServer([plan], requests, None, faults, max_waiting).run()
