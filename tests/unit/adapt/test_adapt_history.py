"""The load history: what a service learns of its requests, and when that is another load."""

import random

import pytest

from fake_system import FakeSystem
from serving_factory import toy_policies
from tessera.adapt.capability import Capability, Point
from tessera.adapt.controller import Change, Controller, Replanned
from tessera.adapt.history import MAX_REQUESTS, MIN_REQUESTS, LoadHistory
from tessera.adapt.monitor import Monitor
from tessera.ir import Load, ServicePlan

PLANNED = Load(100, 20, tpot_ms=50.0)
QUICK = Capability("quick", 10.0, (Point(1.0, 1.0, 1.0), Point(9.0, 3.0, 27.0)))


def observed(prompt: int, output: int, num: int = 2 * MIN_REQUESTS) -> LoadHistory:
    history, rng = LoadHistory(), random.Random(1)
    for number in range(num):
        history.arrived(float(number))
        history.answered(rng.randrange(prompt // 2, 3 * prompt // 2), output)
    return history


def test_lengths_that_were_planned_for_are_no_news() -> None:
    assert observed(100, 20).changed(PLANNED) is None


@pytest.mark.parametrize(("prompt", "output"), [(200, 20), (100, 40), (50, 20)])
def test_other_lengths_are_another_load_within_the_same_limits(prompt: int, output: int) -> None:
    load = observed(prompt, output).changed(PLANNED)

    assert load is not None
    assert prompt == pytest.approx(load.prompt_tokens, rel=0.15)
    assert (output, 50.0) == (load.output_tokens, load.tpot_ms)
    assert {output} == {answer for _, answer in load.lengths}


def test_a_few_answers_say_nothing() -> None:
    assert observed(400, 80, MIN_REQUESTS - 1).changed(PLANNED) is None


def test_old_lengths_are_forgotten_and_memory_is_bounded() -> None:
    history = observed(400, 80, MAX_REQUESTS)
    for _ in range(MAX_REQUESTS):
        history.answered(100, 20)
    view = history.view(float(MAX_REQUESTS - 1), PLANNED)

    assert history.changed(PLANNED) is None
    assert MAX_REQUESTS == view.requests
    assert view.prompt_tokens is not None
    assert (100.0, 100) == (view.prompt_tokens.mean, view.prompt_tokens.p99)
    assert 1.0 == view.arrivals_per_s
    assert 0.0 == view.burstiness


class Learner:
    """Remembers the loads that it planned for."""

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def replan(self, plans: tuple[ServicePlan, ...], change: Change) -> Replanned[ServicePlan]:
        if isinstance(change, Load):
            self.loads.append(change)
        return Replanned(tuple(toy_policies(["other"])), [Capability("other", 20.0, QUICK.curve)])


def test_a_controller_plans_for_what_it_sees_and_adopts_it() -> None:
    """Once for each change; a policy of another name is current then."""
    system, learner = FakeSystem(), Learner()
    plans = toy_policies(["quick"])
    controller: Controller[ServicePlan] = Controller(system, plans, Monitor([QUICK]), learner)  # type: ignore[arg-type]
    for _ in range(MIN_REQUESTS):
        controller.arrived()
        controller.finished((300, 30))
    controller.poll()
    controller.poll()
    system.work()
    controller.poll()

    assert [(300, 30)] == [(load.prompt_tokens, load.output_tokens) for load in learner.loads]
    assert ["other"] == [policy.policy for policy in controller.plans]
    assert "other" == system.switched[-1]
    assert ["replan", "adopt"] == [decision.kind.value for decision in controller.decisions]
    assert "planned for 300 tokens in and 30 out; 0 of 1 plans are new" == controller.decisions[-1].why


def test_a_load_whose_planning_a_lost_device_cancelled_is_planned_for_later() -> None:
    system, learner, plans = FakeSystem(), Learner(), toy_policies(["quick"])
    controller: Controller[ServicePlan] = Controller(system, plans, Monitor([QUICK]), learner)  # type: ignore[arg-type]
    for is_lost in (True, False):
        for _ in range(MIN_REQUESTS):
            controller.arrived()
            controller.finished((300, 30))
        controller.poll()
        if is_lost:
            controller.lost("d1", "d1 is lost", is_lasting=True)
            controller.back("d1")
        system.work()

    assert [(300, 30)] == [(load.prompt_tokens, load.output_tokens) for load in learner.loads]


def test_one_request_is_no_rate() -> None:
    history = LoadHistory()
    history.arrived(10.0)

    assert 0.0 == history.view(10.001, PLANNED).arrivals_per_s
