"""The controller: decisions of the monitor are carried out, and plans follow the devices."""

from dataclasses import replace

from fake_system import FakeSystem
from online_factory import split_plan
from tessera.adapt.capability import Capability, Point
from tessera.adapt.controller import Change, Controller, Replanned
from tessera.adapt.drift import Factors
from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.errors import PlanInfeasible
from tessera.execute.lanes import Lanes
from tessera.ir import DecisionKind, Load, Plan

QUICK = Capability("quick", 10.0, (Point(1.0, 1.0, 1.0), Point(9.0, 3.0, 27.0)))
WIDE = Capability("wide", 20.0, (Point(1.0, 2.0, 2.0), Point(18.0, 4.0, 72.0)))
PLANS = (split_plan(),)

Plans = tuple[Plan, ...]


class FakePlanner:
    """Plans that can be told apart by their rates."""

    def __init__(self, is_able: bool = True) -> None:
        self.factors: list[Factors] = []
        self._is_able = is_able

    def replan(self, plans: Plans, change: Change) -> Replanned[Plan]:
        if isinstance(change, Factors):
            self.factors.append(change)
            plans = self._made(plans, "corrected")
        elif not isinstance(change, Load):
            plans = self._made(plans, f"without {', '.join(sorted(change))}")
        return Replanned(plans, [QUICK, WIDE])

    def _made(self, plans: Plans, name: str) -> Plans:
        if not self._is_able:
            raise PlanInfeasible("it does not fit")
        return tuple(replace(plan, policy=name) for plan in plans)


def monitor() -> Monitor:
    """Judges costs every second."""
    return Monitor([QUICK, WIDE], MonitorConfig(window_s=1.0))


def controlled(planner: FakePlanner | None = None) -> tuple[FakeSystem, Controller[Plan]]:
    system = FakeSystem()
    return system, Controller(system, PLANS, monitor(), planner)


def slow_steps(system: FakeSystem, controller: Controller[Plan]) -> None:
    """Steps on two devices, one of which takes three times as long as planned."""
    (lane,) = Lanes(PLANS).all
    for step, (costs, place) in enumerate(zip(PLANS[0].costs, lane.lane.placement.devices, strict=True)):
        busy_s = {"d0": 0.0, "d1": 0.0}
        for launch, device in enumerate(place):
            busy_s[f"d{device}"] += costs.us(launch, device) * 1e-6 * (1, 3)[device]
        controller.stepped(lane, step, busy_s)
    system.now += 2.0
    controller.poll()


def names(system: FakeSystem) -> list[str]:
    return [plans[0].policy for plans in system.loaded]


def test_a_crowd_switches_the_system_and_an_empty_one_switches_back() -> None:
    """Arrivals and departures are counted; the system is told at once."""
    system = FakeSystem()
    controller = Controller(system, PLANS, Monitor([QUICK, WIDE]))
    for _ in range(60):
        system.now += 0.001
        controller.arrived()
    for _ in range(60):
        system.now += 1.0
        controller.finished()

    assert ["quick", "wide"] == system.switched[:2]
    assert "quick" == system.switched[-1]


def test_it_watches_from_its_start_and_not_from_the_first_request() -> None:
    """A service that waited a minute for its first request knows that none came before."""
    system, watching = FakeSystem(), Monitor([QUICK, WIDE], MonitorConfig(window_s=2.0))
    controller = Controller(system, PLANS, watching)
    system.now += 60.0
    controller.arrived()

    assert 0.5 == watching.load(system.now)[0]


def test_corrected_plans_are_loaded_when_they_are_ready() -> None:
    """Nothing waits for them; factors are those of the device that is slow."""
    planner = FakePlanner()
    system, controller = controlled(planner)
    slow_steps(system, controller)
    controller.poll()
    before = names(system)
    system.work()
    controller.poll()

    assert ([], ["corrected"]) == (before, names(system))
    assert [DecisionKind.REPLAN, DecisionKind.ADOPT] == [d.kind for d in controller.decisions]
    assert 2.0 < planner.factors[0].by_device["d1"] / planner.factors[0].by_device["d0"] < 3.5  # pulled to 1


def test_a_replan_that_fails_is_told() -> None:
    """The old plans run on and the reason is in the decisions."""
    system, controller = controlled(FakePlanner(is_able=False))
    slow_steps(system, controller)
    system.work()
    controller.poll()

    assert "no new plans: it does not fit" == controller.decisions[-1].why
    assert [] == system.loaded


def test_without_a_planner_times_decide_nothing() -> None:
    system, controller = controlled()
    slow_steps(system, controller)

    assert [] == list(controller.decisions)


def test_a_loss_cancels_a_correction_and_a_return_brings_the_plans_back() -> None:
    """Planned around one, around both, around one again; with all devices back the first plans are loaded."""
    system, controller = controlled(FakePlanner())
    slow_steps(system, controller)
    controller.lost("d1", "d1 is lost", is_lasting=True)
    system.work()
    controller.poll()
    controller.lost("d0", "d0 is lost", is_lasting=True)
    controller.back("d1")
    system.work()
    controller.poll()
    controller.back("d0")

    assert ["without d1", "without d0", PLANS[0].policy] == names(system)
    assert controller.plans is PLANS or controller.plans == PLANS


def test_a_device_that_is_tried_again_is_not_planned_around() -> None:
    system, controller = controlled(FakePlanner())
    controller.lost("d1", "d1 is lost", is_lasting=False)
    system.work()
    controller.back("d1")

    assert [] == system.loaded
    assert [DecisionKind.LOSE, DecisionKind.RETURN] == [d.kind for d in controller.decisions]
