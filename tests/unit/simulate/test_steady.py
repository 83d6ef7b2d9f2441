"""The steady rate and the scripts behind it, held against the full simulation and the lowered programs."""

import pytest

from factories import make_chain, make_cluster, make_plan, make_trace
from tessera.execute.lower import lower
from tessera.ir import BufferKind, Plan
from tessera.simulate import SteadyRates, simulate, throughput_per_s
from tessera.simulate.columns import Column, Scripts, Stretch, Wires, script_of

CROSSING = [0, 1, 0, 0, 1, 1]


def fan_plan() -> Plan:
    """One value read on both devices, several transfers in a row."""
    trace = make_trace(
        [
            [(0, 0, 64, "w"), (1, 0, 64, "w")],
            [(0, 0, 64, "r"), (2, 0, 64, "w")],
            [(0, 0, 64, "r"), (1, 0, 64, "r"), (3, 0, 64, "w")],
            [(2, 0, 64, "r"), (3, 0, 64, "r")],
        ]
    )
    return make_plan([trace], [[[0, 1, 1, 0]], [[1, 0, 1, 0]]], slots=3)


def two_step_plan(count: int = 40) -> Plan:
    """A step that moves its state to another device, then one that repeats."""
    first = make_trace([[(0, 0, 64, "rw")]] * 4, {0: BufferKind.STATE}, kind="prefill")
    second = make_trace([[(0, 0, 64, "rw"), (1, 0, 64, "w")], [(1, 0, 64, "r")]], {0: BufferKind.STATE})
    return make_plan([first, second], [[[0] * 4, [1, 0]]], counts=[1, count], slots=4)


def shown(column: Column) -> list[object]:
    """What a device does: stretches by their time and sends, and receives."""
    return [(pytest.approx(x.us), x.sends) if isinstance(x, Stretch) else x for x in column.items]


@pytest.mark.parametrize("plan", [fan_plan(), make_plan([make_chain(6)], [[CROSSING]]), two_step_plan()])
def test_scripts_of_placements_are_those_of_lowered_programs(plan: Plan) -> None:
    """What is judged in the search is what the workers would run."""
    scripts = Scripts(plan.unit, plan.costs, plan.cluster)
    for lane, programs in zip(plan.lanes, lower(plan), strict=True):
        made = scripts.of(lane.placement)
        for script, program in zip(made, programs, strict=True):
            us = [[c.us for c in row] for row in plan.costs[program.step].costs]
            other = script_of(program, us, Wires(plan.cluster))
            assert [shown(c) for c in script.columns] == [shown(c) for c in other.columns]


def test_steady_rate_is_that_of_a_long_simulation() -> None:
    """Short window and long run agree on a pipeline that crosses four times a request."""
    plan = make_plan([make_chain(6)], [[CROSSING]], cluster=make_cluster(latency_us=5.0), slots=4)

    assert SteadyRates()(plan) == pytest.approx(throughput_per_s(simulate(plan, 200)), rel=0.03)


def test_skipping_repeated_runs_changes_no_rate() -> None:
    """A request of many equal runs gives the rate of the run that simulates all of them."""
    plan = two_step_plan(200)

    assert SteadyRates()(plan) == pytest.approx(throughput_per_s(simulate(plan, 40)), rel=0.02)


def test_a_short_stretch_interrupts_a_long_one_between_launches() -> None:
    """While one request does many launches in a row, another's single launch need not wait for them."""
    long = [0] * 40
    short = [1, 0, 1]
    plan = make_plan([make_chain(40)], [[long], [short + [1] * 37]], slots=2)
    timeline = simulate(plan, 2)
    first = {s.request: s for s in reversed(timeline.spans) if s.track == plan.cluster.names[0]}
    ends = {request: stop for request, _, stop in timeline.requests}

    assert first[1].start_us < 30.0
    assert ends[1] < 400.0 + 60.0


def test_a_glance_is_near_the_full_rate_on_one_lane() -> None:
    """Quick looks order single lanes as full ones do."""
    plan = make_plan([make_chain(6)], [[CROSSING]], slots=4)
    rates = SteadyRates()

    assert rates.glance(plan) == pytest.approx(rates(plan), rel=0.05)
