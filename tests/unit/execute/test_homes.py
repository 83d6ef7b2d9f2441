"""Homes: pages that microbatches share, plans of different steps, and moves of pages between homes."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
import torch

import engine_factory
import home_factory as made
from reference_stepper import ReferenceStepper
from tessera.errors import MismatchError, TesseraError
from tessera.execute.lanes import Lanes, shared_out
from tessera.execute.memory import WorkerMemory, footprints, ready_programs
from tessera.execute.reference import InOrder
from tessera.execute.stepper import DeviceBack, Moved, PageMove, StepCall, StepDone, Stepper
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Plan
from tessera.kernels import PAGE
from tessera.simulate.stepper import Faults, Loss, VirtualStepper


def plans() -> tuple[Plan, ...]:
    """Two plans of one home with different steps, one of another home, and one over both devices."""
    return (
        made.plan_of((2, 4), [0], "left"),
        made.plan_of((3,), [0], "left"),
        made.plan_of((4, 2), [1], "right"),
        made.plan_of((2,), [0, 1], "both"),
    )


def in_order() -> ReferenceStepper:
    """The launches of every step, in this process."""
    found = Lanes(plans())
    run = InOrder([graph.trace for graph in found.graphs], made.weights(), torch.device("cpu"))
    return ReferenceStepper(plans(), run, lambda: made.workload(2).make_state(0))


def workers(transport: str) -> Callable[[], WorkerStepper]:
    """Processes of this machine."""
    return lambda: WorkerStepper(plans(), made.weights(), transport=transport, timeout_s=30.0)


@pytest.fixture(scope="module", params=["in order", "shm", "host"])
def stepper(request: pytest.FixtureRequest) -> Iterator[Stepper]:
    """Each kind that computes."""
    make = in_order if request.param == "in order" else workers(request.param)
    with ExitStack() as stack:
        yield stack.enter_context(cast(Any, make()))


def step(stepper: Stepper, call: StepCall) -> torch.Tensor:
    """Output of one step."""
    stepper.start(call)
    done = stepper.take(60.0)
    assert isinstance(done, StepDone), done
    assert (call.microbatch, call.step) == (done.microbatch, done.step)
    found: torch.Tensor = done.outputs["y"]
    return found


def lane_of(stepper: Stepper, policy: int) -> int:
    """Number of the lane of a plan."""
    return stepper.lanes.open(policy)[0].number


def test_equal_steps_are_numbered_once_and_homes_by_name() -> None:
    """Steps of 2, 4 and 3 tokens; three homes."""
    found = Lanes(plans())

    assert [2, 4, 3] == [graph.trace.step.context for graph in found.graphs]
    assert [(0, 1), (2,), (1, 0), (0,)] == [lane.steps for lane in found.all]
    assert [0, 0, 1, 2] == [lane.home for lane in found.all]
    buffers = found.homes["both"].buffers
    assert [(0, made.PAGES, made.PAGE_BYTES), (1, made.PAGES, made.PAGE_BYTES)] == [
        (buffers[name].device, buffers[name].num_pages, buffers[name].page_bytes) for name in made.NAMES
    ]


def test_groups_of_a_service_have_microbatches_of_their_own() -> None:
    """Plans without a home share all; where there are too few, plans share some."""
    two, three = (replace(plan, microbatches=num) for plan, num in zip(plans(), (2, 3), strict=False))

    assert [(0, 1), (2, 3, 4)] == [lane.microbatches for lane in Lanes([two, three], 6).all]
    assert [(0, 1), (2, 3, 0)] == [lane.microbatches for lane in Lanes([two, three], 4).all]
    assert [range(4), (0, 1)] == shared_out([replace(three, home=""), two], 4)


def test_plans_that_replace_others_have_free_microbatches_first() -> None:
    """So that they are used while the old ones end."""
    one, two = (replace(plan, microbatches=num) for plan, num in zip(plans(), (1, 2), strict=False))
    found = Lanes([one, two], 3)

    assert [(2,), (0, 1)] == [lane.microbatches for lane in found.load([one, two], in_use={0, 1})]


def test_state_of_microbatches_that_no_lane_has_is_freed() -> None:
    """With the homes that are dropped."""
    plan, memory = plans()[2], WorkerMemory(1)
    for graph in plan.graphs:
        memory.add_step(graph.trace, {})
    for microbatch in range(3):
        memory.program_memory(microbatch, replace(ready_programs(plan)[0][0], home=7), ())
    assert ({0, 1, 2}, {7}) == ({number for number, *_ in memory.by_microbatch}, set(memory.homes))
    memory.drop([7], {1})

    assert ({1}, set()) == ({number for number, *_ in memory.by_microbatch}, set(memory.homes))


def test_a_home_on_other_devices_or_of_another_size_is_refused() -> None:
    """Nothing is loaded."""
    found = Lanes(plans())
    with pytest.raises(MismatchError, match="plans of home 'left' have pages"):
        found.load([made.plan_of((2,), [1], "left")])
    with pytest.raises(MismatchError, match="'kept' is not in pages"):
        Lanes([replace(engine_factory.plan_of([engine_factory.scattered(Random(0), [0])], 1), home="x")])

    assert 4 == len(found.all)


def test_microbatches_of_a_home_see_one_anothers_pages(stepper: Stepper) -> None:
    """Whatever the plan and the step; `newest` is each one's own, zeros when it is opened again."""
    wanted = made.Expectation()
    for microbatch, policy in enumerate((0, 1, 2)):
        stepper.open(microbatch, lane_of(stepper, policy))
    # (microbatch, home, step, tokens, written from, read from)
    script = [
        (0, "left", 1, 4, PAGE, PAGE),
        (1, "left", 0, 3, 2 * PAGE, PAGE),
        (2, "right", 0, 4, PAGE, 2 * PAGE),
        (0, "left", 0, 2, 3 * PAGE, 2 * PAGE),
        (2, "right", 1, 2, 2 * PAGE, PAGE),
    ]
    for seed, (microbatch, home, number, tokens, first, read) in enumerate(script):
        given = made.inputs(tokens, first, read, seed)
        found = step(stepper, StepCall(microbatch, number, given))
        assert torch.equal(wanted.run(home, microbatch, tokens, given), found)
    stepper.close(1)
    stepper.open(1, lane_of(stepper, 1))
    del wanted.newest[1]
    given = made.inputs(3, 4 * PAGE, PAGE)
    assert torch.equal(wanted.run("left", 1, 3, given), step(stepper, StepCall(1, 0, given)))
    for microbatch in range(3):
        stepper.close(microbatch)


def test_pages_are_counted_once_however_many_microbatches_share_them() -> None:
    """Pages once per home, what is a microbatch's own for each."""
    sized = [replace(plans()[0], microbatches=num) for num in (1, 4)]
    found = [footprints([p], [ready_programs(p)])[0] for p in sized]
    pages = len(made.NAMES) * made.PAGES * made.PAGE_BYTES

    assert [pages, pages] == [x.home_bytes for x in found]
    assert found[1].peak_bytes - found[0].peak_bytes == 3 * found[0].microbatch_bytes
    both = footprints(plans(), [ready_programs(p) for p in plans()])
    assert [pages + pages // 2] * 2 == [x.home_bytes for x in both]


def test_a_step_that_reads_other_weights_is_refused() -> None:
    """With what to do; nothing is loaded."""
    found = workers("shm")()
    with pytest.raises(MismatchError, match=r"no weight '.*' of the"):
        found.load([engine_factory.plan_of([engine_factory.scattered(Random(0), [0])], 1)])

    assert 4 == len(found.lanes.all)


@pytest.mark.parametrize("transport", ["shm", "host"])
def test_new_steps_are_sent_to_running_workers_and_to_those_that_replace_them(transport: str) -> None:
    """A step that no worker had, beside an open microbatch; also after both workers were killed."""
    wanted = made.Expectation()
    with workers(transport)() as stepper:
        stepper.open(0, lane_of(stepper, 0))
        given = made.inputs(4, PAGE, PAGE)
        assert torch.equal(wanted.run("left", 0, 4, given), step(stepper, StepCall(0, 1, given)))
        stepper.load([made.plan_of((5, 2), [0], "left"), made.plan_of((6,), [0, 1], "across")])
        stepper.open(1, lane_of(stepper, 0))
        stepper.open(2, lane_of(stepper, 1))
        for seed in range(2):
            five, six = made.inputs(5, PAGE, PAGE, seed), made.inputs(6, 2 * PAGE, 2 * PAGE, seed)
            four = made.inputs(4, 3 * PAGE, PAGE, seed)
            assert torch.equal(wanted.run("left", 1, 5, five), step(stepper, StepCall(1, 0, five)))
            assert torch.equal(wanted.run("across", 2, 6, six), step(stepper, StepCall(2, 0, six)))
            assert torch.equal(wanted.run("left", 0, 4, four), step(stepper, StepCall(0, 1, four)))
        for device in range(2):
            pid = stepper.hub.status(device).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        back: set[str] = set()
        while len(back) < 2:
            event = stepper.take(60.0)
            assert event is not None
            back |= {event.device} if isinstance(event, DeviceBack) else set()
        again = made.Expectation()
        stepper.open(3, lane_of(stepper, 1))
        six = made.inputs(6, PAGE, PAGE)
        assert torch.equal(again.run("across", 3, 6, six), step(stepper, StepCall(3, 0, six)))


def test_pages_of_a_home_that_nothing_uses_are_freed() -> None:
    """With the last microbatch on a lane of a replaced plan; plans of that name may then have other pages."""
    small, large = made.plan_of((2,), [0], "here"), made.plan_of((2,), [0], "here", size=(made.WIDTH, 16))
    tokens = made.inputs(2, PAGE, PAGE)
    with WorkerStepper([small], made.weights(), timeout_s=30.0) as stepper:
        wanted = made.Expectation()
        stepper.open(0, 0)
        assert torch.equal(wanted.run("here", 0, 2, tokens), step(stepper, StepCall(0, 0, tokens)))
        stepper.load([made.plan_of((2,), [1], "there")])
        with pytest.raises(MismatchError, match="plans of home 'here' have pages"):
            stepper.load([large])
        assert torch.equal(wanted.run("here", 0, 2, tokens), step(stepper, StepCall(0, 0, tokens)))
        stepper.close(0)
        assert {"there"} == stepper.lanes.homes.keys()
        stepper.load([large])
        stepper.open(0, lane_of(stepper, 0))
        fresh = made.Expectation().run("here", 0, 2, tokens)
        assert torch.equal(fresh, step(stepper, StepCall(0, 0, tokens)))
        assert [(0, 1), (0, 1)] == [setup.dropped for setup in stepper.hub.setups]


def test_plans_of_known_steps_can_be_loaded_and_keep_the_pages_of_their_home(stepper: Stepper) -> None:
    """A plan with one of the steps, in another order."""
    wanted = made.Expectation()
    stepper.open(0, lane_of(stepper, 0))
    given = made.inputs(4, PAGE, PAGE)
    assert torch.equal(wanted.run("left", 0, 4, given), step(stepper, StepCall(0, 1, given)))
    stepper.load([made.plan_of((4,), [0], "left")])
    stepper.open(1, lane_of(stepper, 0))
    given = made.inputs(4, 2 * PAGE, PAGE)
    assert torch.equal(wanted.run("left", 1, 4, given), step(stepper, StepCall(1, 0, given)))
    stepper.load(plans())
    for microbatch in (0, 1):
        stepper.close(microbatch)


# Moves.


def virtual(faults: Faults | None = None) -> VirtualStepper:
    """Microbatches 0 and 1 at home left and right."""
    found = VirtualStepper(plans(), faults=faults or Faults())
    for microbatch, policy in enumerate((0, 2, 3)):
        found.open(microbatch, lane_of(found, policy))
    return found


def test_a_virtual_move_takes_its_link_one_after_the_other() -> None:
    """Bytes over the rate, and a latency; the other direction is another link."""
    found = virtual()
    num_bytes = 2 * len(made.NAMES) * made.PAGE_BYTES
    wire_s, latency_s = num_bytes / 1e9, 1e-6
    found.move(PageMove(7, 0, 1, (1, 2), (3, 4)))
    found.move(PageMove(8, 0, 1, (3, 4), (1, 2)))
    found.move(PageMove(9, 1, 0, (1, 2), (3, 4)))
    events = [found.take(None) for _ in range(3)]

    assert [7, 9, 8] == [event.number for event in events if isinstance(event, Moved)]
    assert found.now_s() == pytest.approx(2 * wire_s + latency_s)
    assert all(isinstance(e, Moved) and not e.failure and e.num_bytes == num_bytes for e in events)
    assert {("d0", "d1"): 2 * num_bytes, ("d1", "d0"): num_bytes} == found.use().moved
    assert not any(found.busy_us)


def test_a_virtual_move_to_a_home_over_two_devices_takes_what_is_elsewhere_only_over_links() -> None:
    """One layer stays on its device."""
    found = virtual()
    found.move(PageMove(1, 0, 2, (1,), (1,)))
    event = found.take(None)

    assert isinstance(event, Moved)
    assert 2 * made.PAGE_BYTES == event.num_bytes
    assert event.seconds == pytest.approx(made.PAGE_BYTES / 1e9 + 1e-6)


def test_a_lost_device_or_a_closed_microbatch_ends_a_virtual_move() -> None:
    """Once, with why."""
    found = virtual(Faults(losses=(Loss("d1", 1e-6, 1.0),)))
    found.move(PageMove(1, 0, 1, (1,), (1,)))
    found.take(None)
    lost = found.take(None)
    assert isinstance(lost, Moved)
    assert "d1 was lost" in lost.failure
    other = virtual()
    other.move(PageMove(2, 0, 1, (1,), (1,)))
    other.close(0)
    closed = other.take(None)
    assert isinstance(closed, Moved)
    assert "closed" in closed.failure
    assert other.take(1.0) is None
    assert not other.use().moved


@pytest.mark.parametrize("make", [virtual, in_order])
def test_moves_that_cannot_be_are_refused(make: Callable[[], Stepper]) -> None:
    """With the reason; within a home there is nothing to move."""
    found = make()
    found.load([*plans(), replace(plans()[0], home="")])
    for microbatch, policy in enumerate((0, 2, 1, 4), 10):
        found.open(microbatch, lane_of(found, policy))
    for move, why in (
        (PageMove(1, 10, 19, (1,), (1,)), "is not open"),
        (PageMove(1, 10, 13, (1,), (1,)), "not in the pages of a home"),
        (PageMove(1, 10, 11, (1, 2), (1,)), "cannot go"),
        (PageMove(1, 10, 11, (0,), (1,)), "cannot go"),
        (PageMove(1, 10, 11, (1,), (made.PAGES,)), "cannot go"),
    ):
        with pytest.raises(TesseraError, match=why):
            found.move(move)
    found.move(PageMove(5, 10, 12, (1,), (2,)))
    event = found.take(1.0)
    assert isinstance(event, Moved)
    assert (5, "", 0) == (event.number, event.failure, event.num_bytes)
