"""The steady rate and the scripts behind it, held against the full simulation and the lowered programs."""

from collections.abc import Sequence

import pytest

from factories import make_chain, make_cluster, make_plan, make_trace
from tessera.execute.lower import lower
from tessera.ir import BufferKind, Plan, Program, Recv, Run, Send
from tessera.simulate import SteadyRates, simulate, throughput_per_s
from tessera.simulate.closed import Window
from tessera.simulate.columns import DeviceColumn, LaunchSegment, Script, Scripts, Wires, column_of

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
    return make_plan([trace], [[[0, 1, 1, 0]], [[1, 0, 1, 0]]], microbatches=3)


def two_step_plan(count: int = 40) -> Plan:
    """A step that moves its state to another device, then one that repeats."""
    first = make_trace([[(0, 0, 64, "rw")]] * 4, {0: BufferKind.STATE}, kind="prefill")
    second = make_trace([[(0, 0, 64, "rw"), (1, 0, 64, "w")], [(1, 0, 64, "r")]], {0: BufferKind.STATE})
    return make_plan([first, second], [[[0] * 4, [1, 0]]], counts=[1, count], microbatches=4)


def script_of(program: Program, us: Sequence[Sequence[float]], wires: Wires) -> Script:
    """Script of a lowered program; us[launch][device]."""
    sent = [wires.of(n, t.src, t.dst, t.num_bytes) for n, t in enumerate(program.transfers)]
    columns = []
    for device, instructions in enumerate(program.instructions):
        ends = [0.0]
        here = {x.launch for x in instructions if isinstance(x, Run)}
        for launch, row in enumerate(us):
            ends.append(ends[-1] + (row[device] if launch in here else 0.0))
        events: list[tuple[int, int, int]] = []
        at = -1
        runs = [x.launch for x in instructions if isinstance(x, Run)][::-1]
        for x in instructions:
            if isinstance(x, Run):
                at = runs.pop()
            elif isinstance(x, Send):
                events.append((at, 1, x.transfer))
            elif isinstance(x, Recv):
                events.append((runs[-1] if runs else len(us), 0, x.transfer))
        columns.append(column_of(ends, events, sent))
    busy = sum(x.us for c in columns for x in c.items if isinstance(x, LaunchSegment))
    return Script(tuple(columns), program.count, busy, program.step)


def shown(column: DeviceColumn) -> list[object]:
    """What a device does: segments by their time and sends, and receives."""
    return [(pytest.approx(x.us), x.sends) if isinstance(x, LaunchSegment) else x for x in column.items]


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
    plan = make_plan([make_chain(6)], [[CROSSING]], cluster=make_cluster(latency_us=5.0), microbatches=4)

    assert SteadyRates()(plan) == pytest.approx(throughput_per_s(simulate(plan, 200)), rel=0.03)


def test_skipping_repeated_runs_changes_no_rate() -> None:
    """A request of many equal runs gives the rate of the run that simulates all of them."""
    plan = two_step_plan(200)

    assert SteadyRates()(plan) == pytest.approx(throughput_per_s(simulate(plan, 40)), rel=0.02)


def test_a_short_segment_interrupts_a_long_one_between_launches() -> None:
    """While one request does many launches in a row, another's single launch need not wait for them."""
    long = [0] * 40
    short = [1, 0, 1]
    plan = make_plan([make_chain(40)], [[long], [short + [1] * 37]], microbatches=2)
    timeline = simulate(plan, 2)
    first = {s.request: s for s in reversed(timeline.spans) if s.track == plan.cluster.names[0]}
    ends = {request: stop for request, _, stop in timeline.requests}

    assert first[1].start_us < 30.0
    assert ends[1] < 400.0 + 60.0


def test_a_quick_look_is_near_the_full_rate_on_one_lane() -> None:
    """Quick looks order single lanes as full ones do."""
    plan = make_plan([make_chain(6)], [[CROSSING]], microbatches=4)
    rates = SteadyRates()

    assert rates.quick(plan) == pytest.approx(rates(plan), rel=0.05)


def long_run_plan() -> Plan:
    """One long step that crosses between the devices, then one that repeats and crosses too."""
    first = make_chain(600)
    second = make_trace([[(7, 0, 64, "w")], [(7, 0, 64, "r"), (8, 0, 64, "w")], [(8, 0, 64, "r")]])
    place = [(n // 5) % 2 for n in range(600)]
    return make_plan([first, second], [[place, [0, 1, 0]]], counts=[1, 400], microbatches=4)


def test_fewer_longer_runs_of_a_long_program_give_the_rate_of_all_of_them() -> None:
    """Four hundred runs of a step as a few, in the same order and with the same work."""
    plan = long_run_plan()
    scripts = Scripts(plan.unit, plan.costs, plan.cluster)
    whole, few = (Window(plan, scripts, (1.0, 4.0), num) for num in (10**6, 500))

    assert few.rate_per_us() == pytest.approx(whole.rate_per_us(), rel=0.03)
    assert few._order * 2 < whole._order
