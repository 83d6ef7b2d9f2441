"""The monitor in real time: the same decisions, carried out by what was handed in."""

import threading
from collections.abc import Sequence

import pytest

from online_factory import split_plan
from tessera.adapt import Action, Capability, Hands, Live, Measured, Monitor, Point, measured_of
from tessera.errors import PlanInfeasible
from tessera.ir import Clock, DecisionKind, Span, Timeline
from tessera.simulate import simulate

QUICK = Capability("quick", 10.0, (Point(1.0, 1.0, 1.0), Point(9.0, 3.0, 27.0)))
WIDE = Capability("wide", 20.0, (Point(1.0, 2.0, 2.0), Point(18.0, 4.0, 72.0)))


class Seconds:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_crowd_switches_the_engine_and_an_empty_house_switches_it_back() -> None:
    """Arrivals and departures are counted; the engine is told at once."""
    clock, switched = Seconds(), list[str]()
    with Live(Monitor([QUICK, WIDE]), Hands(switched.append), clock) as live:
        for _ in range(60):
            clock.now += 0.001
            live.arrived()
        for _ in range(60):
            clock.now += 1.0
            live.finished()

    assert ["quick", "wide"] == switched[:2]
    assert "quick" == switched[-1]


def test_new_plans_are_made_beside_the_running_ones() -> None:
    """While the background plans, calls return; what it made is adopted at the first call after that."""
    clock, go, adopted = Seconds(), threading.Event(), list[str]()

    def replan(action: Action) -> Sequence[Capability]:
        assert go.wait(20.0)
        return [WIDE]

    hands = Hands(lambda name: None, replan, lambda: adopted.append("now"))
    with Live(Monitor([QUICK, WIDE]), hands, clock) as live:
        live.lost("d1")
        live.poll()
        before = list(adopted)
        go.set()
        live._background.shutdown(wait=True)
        live.poll()

    assert [] == before
    assert ["now"] == adopted
    assert DecisionKind.ADOPT is live.decisions[-1].kind


def test_a_replan_that_fails_is_told() -> None:
    """The old plans run on and the reason is in the decisions."""

    def replan(action: Action) -> Sequence[Capability]:
        raise PlanInfeasible("it does not fit")

    with Live(Monitor([QUICK, WIDE]), Hands(lambda name: None, replan)) as live:
        live.lost("d1")
        live._background.shutdown(wait=True)
        live.poll()

    assert "no new plans: it does not fit" == live.decisions[-1].why


def test_a_run_as_planned_measures_as_planned() -> None:
    """The spans of a simulated run give each kernel its planned time on each device."""
    plan = split_plan()
    found = measured_of(plan, simulate(plan, 5))

    assert ["d0", "d1"] == [event.device for event in found]
    assert all(event.us == pytest.approx(event.planned_us[0][1]) for event in found)


def test_a_slow_launch_shows_in_its_kernel() -> None:
    """Twice the planned time on d1, from the spans alone."""
    plan = split_plan()
    kernel = plan.unit.graphs[0].trace.kernels[0].name
    timeline = Timeline(Clock.MEASURED, (Span("d1", kernel, 0, 0, 5.0, 25.0),), ())

    assert [Measured("d1", ((kernel, 10.0),), 20.0)] == measured_of(plan, timeline)
