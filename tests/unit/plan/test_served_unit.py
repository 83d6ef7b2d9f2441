"""Steps that a service runs in any order: their state has one home in all of them."""

import pytest

import factories
from tessera.ir import BufferKind, Objective, Source, Trace, WorkUnit
from tessera.ir.cluster import Cost, Costs
from tessera.plan import PlanConfig, solve
from tessera.plan.arrays import contract

STATE, INPUT = BufferKind.STATE, BufferKind.INPUT


def traces(second: str) -> list[Trace]:
    """A step that writes state b1, and another that reads it; each has a launch without state besides."""
    first = [[(0, 0, 64, "r"), (1, 0, 64, "rw")], [(0, 0, 64, "r"), (2, 0, 64, "w")]]
    other = [[(0, 0, 64, "r"), (2, 0, 64, "w")], [(1, 0, 64, "rw")]]
    kinds = {0: INPUT, 1: STATE}
    return [
        factories.make_trace(first, kinds, kind="encode"),
        factories.make_trace(other, kinds, kind=second),
    ]


def unit_of(second: str) -> WorkUnit:
    return factories.make_plan(traces(second), [[[0, 0], [0, 0]]]).unit


def test_a_served_unit_places_its_state_once() -> None:
    """Launches of different steps that share a state are one node; all others stay apart."""
    (first, second), num = contract(unit_of("tokens"))
    assert num == 3
    assert first[0] == second[1]


def test_another_unit_may_move_state_between_its_steps() -> None:
    """Where steps follow one another, each may have the state where it likes."""
    (first, second), num = contract(unit_of("decode"))
    assert num == 4
    assert first[0] != second[1]


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
def test_no_lane_moves_state_though_it_would_pay(objective: Objective) -> None:
    """Each step is ten times as fast on a device of its own; the state still has one home."""
    unit, cluster = unit_of("tokens"), factories.make_cluster(gbps=1e6, latency_us=0.001)
    costs = tuple(
        Costs(
            graph.trace.digest,
            cluster.devices,
            tuple(
                tuple(Cost(100.0 if d == step else 1000.0, Source.FITTED, 0.1) for d in range(2))
                for _ in graph.trace.launches
            ),
        )
        for step, graph in enumerate(unit.graphs)
    )
    plan = solve(unit, costs, cluster, PlanConfig(objective))
    for lane in plan.lanes:
        first, second = lane.placement.devices
        assert first[0] == second[1]
