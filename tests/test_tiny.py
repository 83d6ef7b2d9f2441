"""A six-launch trace from graph to simulated timeline: the whole flow in a moment, on every commit."""

from factories import make_chain, make_cluster, make_plan
from tessera.analyze import build_graph
from tessera.execute import lower
from tessera.ir import Cost, Costs, Objective, Source, Trace, WorkUnit
from tessera.plan import PlanConfig, solve
from tessera.simulate import simulate, throughput_per_s

TRACE = make_chain(6)
# The first three launches are quick on one device, the last three on the other.
UNLIKE_US = [(10.0, 40.0)] * 3 + [(40.0, 10.0)] * 3


def price(trace: Trace) -> Costs:
    """Two unlike devices."""
    rows = tuple(tuple(Cost(us, Source.FITTED, 0.05) for us in row) for row in UNLIKE_US)
    return Costs(trace.digest, make_cluster().devices, rows)


def test_the_graph_is_a_chain() -> None:
    """Each launch waits for the one before."""
    assert [(i, i + 1) for i in range(5)] == [(e.src, e.dst) for e in build_graph(TRACE).edges]


def test_the_plan_puts_each_launch_where_it_is_quick() -> None:
    """Opposite strengths are used: one cut, in the middle."""
    unit = WorkUnit((build_graph(TRACE),), (1,))
    plan = solve(unit, (price(TRACE),), make_cluster(), PlanConfig(Objective.THROUGHPUT))
    (lane,) = plan.lanes

    assert ((0, 0, 0, 1, 1, 1),) == lane.placement.devices


def test_the_plan_beats_data_parallel() -> None:
    """30 us a request on each device, against 150 us shared by two."""
    unit = WorkUnit((build_graph(TRACE),), (1,))
    plan = solve(unit, (price(TRACE),), make_cluster(), PlanConfig(Objective.THROUGHPUT))
    parallel = next(b.throughput_per_s for b in plan.baselines if b.name == "data-parallel")

    assert parallel is not None
    assert plan.throughput_per_s / parallel > 2.4


def test_the_program_moves_one_value() -> None:
    """One cut of a chain is one transfer."""
    assert 1 == len(lower(make_plan([TRACE], [[[0, 0, 0, 1, 1, 1]]]))[0][0].transfers)


def test_the_simulation_reaches_the_pipelines_rate() -> None:
    """Two stages of 30 us with two requests in flight: a little under one request per 30 us."""
    timeline = simulate(make_plan([TRACE], [[[0, 0, 0, 1, 1, 1]]], microbatches=3), 40)

    assert 0.95 * 1e6 / 30 < throughput_per_s(timeline) <= 1e6 / 30 * 1.001
