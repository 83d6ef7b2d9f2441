"""The machine: what ends while something else begins is told."""

import math

import pytest

from factories import make_chain, make_plan
from tessera.ir import Recv
from tessera.simulate.columns import LaunchSegment, Script, Scripts, TransferWire, make_column
from tessera.simulate.core import VirtualMachine

FOR_EVER = float("inf")


def script(*columns: list[Recv | LaunchSegment]) -> Script:
    """What each device does in one run."""
    return Script(tuple(make_column(c) for c in columns), 1, 0.0, 0)


def busy(us: float) -> Script:
    """So long on the first of two devices."""
    return script([LaunchSegment([0.0, us], 0, 1)], [])


def test_a_run_that_only_receives_ends_beside_one_that_begins() -> None:
    """A device frees up with a finished hand-over in its queue: both ends are told, each once."""
    long = script([], [LaunchSegment([0.0, 10.0], 0, 1, ())])
    wire = TransferWire(0, 0, 1, 8, 0, 1.0, 1.0)
    move = script([LaunchSegment([0.0, 1.0], 0, 1, (wire,))], [Recv(0)])
    machine = VirtualMachine(2, 1)
    machine.start(0, [(long, 1.0)])
    machine.start(1, [(move, 1.0)])

    assert (0, 10.0) == (machine.take(FOR_EVER), machine.now_us)
    machine.start(0, [(long, 1.0)])
    assert (1, 10.0) == (machine.take(FOR_EVER), machine.now_us)
    assert (0, 20.0) == (machine.take(FOR_EVER), machine.now_us)


def test_runs_of_a_microbatch_follow_one_another() -> None:
    """Two runs, the second half as fast, end as one."""
    machine = VirtualMachine(2, 1)
    machine.start(7, [(busy(4.0), 1.0), (busy(4.0), 2.0)])

    assert (7, 12.0) == (machine.take(FOR_EVER), machine.now_us)
    assert [12.0, 0.0, 0.0] == machine.busy_us


def test_the_clock_stops_at_the_limit_and_something_can_begin_there() -> None:
    """A shorter run that comes in the middle of a launch goes next, and nothing is counted twice."""
    machine = VirtualMachine(2, 1)
    machine.start(0, [(script([LaunchSegment([0.0, 4.0, 8.0], 0, 2)], []), 1.0)])

    assert (None, 3.0) == (machine.take(3.0), machine.now_us)
    machine.start(1, [(busy(1.0), 1.0)])
    assert (1, 5.0) == (machine.take(FOR_EVER), machine.now_us)
    assert (0, 9.0) == (machine.take(FOR_EVER), machine.now_us)
    assert 9.0 == machine.busy_us[0]
    assert None is machine.take(FOR_EVER)


@pytest.mark.parametrize("turns", [2, 15, 29])
def test_an_end_that_rounding_puts_after_the_limit_is_at_the_limit(turns: int) -> None:
    """Sums of many times, as clocks of callers have them."""
    machine, us = VirtualMachine(2, 1), 0.1 / 3.0
    for _ in range(turns):
        machine.start(0, [(busy(us), 1.0)])
        assert machine.take(FOR_EVER) == 0
    machine.start(0, [(busy(us), 1.0)])
    limit_us = math.nextafter(machine.now_us + us, 0.0)
    found = machine.take(limit_us)
    machine.start(1, [(busy(us), 1.0)])
    ends = [found, machine.take(FOR_EVER), machine.take(FOR_EVER)]
    assert [0, 1] == [number for number in ends if number is not None]


def test_what_is_dropped_leaves_its_device_to_others() -> None:
    """In the middle of a run of ten, the one behind it begins at once."""
    machine = VirtualMachine(2, 1)
    for number in range(2):
        machine.start(number, [(busy(10.0), 1.0)])
    machine.take(4.0)
    machine.drop([0])

    assert (1, 14.0) == (machine.take(FOR_EVER), machine.now_us)


def test_microbatches_that_cross_between_devices_take_turns() -> None:
    """Three of them, three hundred times."""
    plan = make_plan([make_chain(6)], [[[0, 1, 0, 0, 1, 1]]], microbatches=3)
    work = (Scripts(plan.unit, plan.costs, plan.cluster).of(plan.lanes[0].placement)[0], 1.0)
    machine = VirtualMachine(2, 2)
    for number in range(3):
        machine.start(number, [work])
    for _ in range(299):
        ended = machine.take(FOR_EVER)
        assert ended is not None
        machine.start(ended, [work])
    machine.take(FOR_EVER)

    assert machine.now_us == pytest.approx(9231.736)
