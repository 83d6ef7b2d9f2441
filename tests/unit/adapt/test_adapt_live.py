"""The monitor in real time: the same decisions, carried out by what was handed in."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from online_factory import split_plan
from tessera.adapt.capability import Capability, Point
from tessera.adapt.live import Hands, Live
from tessera.adapt.monitor import Action, Monitor, MonitorConfig
from tessera.errors import PlanInfeasible
from tessera.execute.lanes import Lanes
from tessera.ir import DecisionKind, DeviceKind

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


def test_it_watches_from_its_start_and_not_from_the_first_request() -> None:
    """A service that waited a minute for its first request knows that none came before."""
    clock, watching = Seconds(), Monitor([QUICK, WIDE], MonitorConfig(window_s=2.0))
    with Live(watching, Hands(lambda name: None), clock) as live:
        clock.now += 60.0
        live.arrived()

    assert 0.5 == watching.load(clock.now)[0]


def monitor() -> Monitor:
    """Judges costs every second."""
    return Monitor([QUICK, WIDE], MonitorConfig(window_s=1.0))


def slow_steps(live: Live, clock: Seconds, kind: DeviceKind = DeviceKind.CPU) -> None:
    """Steps of a plan on two devices, one of which takes three times as long as planned."""
    plan = split_plan()
    devices = tuple(replace(device, kind=kind) for device in plan.cluster.devices)
    plan = replace(plan, cluster=replace(plan.cluster, devices=devices))
    (lane,) = Lanes([plan]).all
    live.poll()
    for step, (costs, place) in enumerate(zip(plan.costs, lane.lane.placement.devices, strict=True)):
        busy_s = {"d0": 0.0, "d1": 0.0}
        for launch, device in enumerate(place):
            busy_s[f"d{device}"] += costs.us(launch, device) * 1e-6 * (1, 3)[device]
        live.stepped(lane, step, {name: seconds for name, seconds in busy_s.items() if seconds})
    clock.now += 2.0
    live.poll()


def test_new_plans_are_made_beside_the_running_ones() -> None:
    """While the background plans, calls return; what it made is adopted at the first call after that."""
    clock, go, adopted, wanted = Seconds(), threading.Event(), list[str](), list[Action]()

    def replan(action: Action) -> Sequence[Capability]:
        wanted.append(action)
        assert go.wait(20.0)
        return [WIDE]

    def adopt() -> str:
        adopted.append("now")
        return "better ones"

    with Live(monitor(), Hands(lambda name: None, replan, adopt), clock) as live:
        slow_steps(live, clock)
        live.poll()
        before = list(adopted)
        go.set()
        live._background.shutdown(wait=True)
        live.poll()

    assert ([], ["now"]) == (before, adopted)
    assert [DecisionKind.REPLAN, DecisionKind.ADOPT] == [d.kind for d in live.decisions.latest]
    assert "better ones" == live.decisions.latest[-1].why
    (action,) = wanted
    assert action.factors is not None
    assert 2.0 < action.factors.usual["d1"] / action.factors.usual["d0"] < 3.5  # pulled towards 1


def test_a_replan_that_fails_is_told() -> None:
    """The old plans run on and the reason is in the decisions."""
    clock = Seconds()

    def replan(action: Action) -> Sequence[Capability]:
        raise PlanInfeasible("it does not fit")

    with Live(monitor(), Hands(lambda name: None, replan), clock) as live:
        slow_steps(live, clock)
        live._background.shutdown(wait=True)
        live.poll()

    assert "no new plans: it does not fit" == live.decisions.latest[-1].why


def test_emulated_devices_and_owners_who_cannot_plan_decide_nothing() -> None:
    """Times on a CPU are not those of the GPU that it stands for; and nobody is told what he cannot do."""
    clock, wanted = Seconds(), list[Action]()

    def replan(action: Action) -> Sequence[Capability]:
        wanted.append(action)
        return []

    with Live(monitor(), Hands(lambda name: None, replan), clock) as live:
        slow_steps(live, clock, DeviceKind.EMU)
    with Live(monitor(), Hands(lambda name: None), clock) as other:
        slow_steps(other, clock)

    assert ([], []) == (wanted, [*live.decisions.latest, *other.decisions.latest])


def test_plans_that_the_owner_took_up_are_told() -> None:
    """The monitor knows what they can do, and the decision is kept with the others."""
    with Live(monitor(), Hands(lambda name: None)) as live:
        live.adopted([replace(QUICK, capacity_per_s=5.0)], "plans without d1 are in force")

    assert ["plans without d1 are in force"] == [decision.why for decision in live.decisions.latest]
    assert 1 == live.decisions.counts[DecisionKind.ADOPT]
