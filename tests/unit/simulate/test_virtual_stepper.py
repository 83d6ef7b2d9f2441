"""The virtual stepper keeps the protocol, and the scheduler does over it what it does over workers."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.row_service.admission import RowScheduler
from benchmarks.row_service.server import ModelledRows, RequestLedger, RequestLoad, SimulatedServer, load_of

import engine_factory as made
from factories import make_chain, make_plan, make_trace
from online_factory import RUN_US, alone_plan, split_plan
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import SchedulerConfig
from tessera.execute.stepper import DeviceBack, DeviceLost, StepCall, StepDone, Stepper
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import BufferKind, Plan
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.stepper import Faults, Loss, VirtualStepper


def opened(plan: Plan, faults: Faults | None = None, num: int = 1) -> VirtualStepper:
    """With microbatches on the lanes that they get."""
    stepper = VirtualStepper([plan], faults=faults or Faults())
    for number in range(num):
        lane = stepper.lanes.take(0)
        assert lane is not None
        stepper.open(number, lane.number)
    return stepper


def test_a_step_takes_its_modelled_time_and_says_what_it_used() -> None:
    """Four launches of 10 us on one device; half of that at half the scale."""
    stepper = opened(alone_plan())
    stepper.start(StepCall(0, 0))
    whole = stepper.take(None)
    stepper.start(StepCall(0, 0, scale=0.5))
    half = stepper.take(None)

    assert isinstance(whole, StepDone)
    assert isinstance(half, StepDone)
    assert (RUN_US * 1e-6, RUN_US * 0.5e-6) == pytest.approx((whole.seconds, half.seconds))
    assert {"d0": pytest.approx(RUN_US * 1e-6)} == whole.busy_s
    assert stepper.now_s() == pytest.approx(1.5 * RUN_US * 1e-6)
    assert stepper.use().busy_s["d0"] == pytest.approx(1.5 * RUN_US * 1e-6)


def test_take_waits_no_longer_than_it_may() -> None:
    """The clock stands at the time-out; with nothing to wait for, no time goes by."""
    stepper = opened(alone_plan())
    assert stepper.take(None) is None
    stepper.start(StepCall(0, 0))

    assert stepper.take(RUN_US * 0.25e-6) is None
    assert stepper.now_s() == pytest.approx(RUN_US * 0.25e-6)
    assert isinstance(stepper.take(1.0), StepDone)


def test_a_lost_device_closes_its_microbatches_until_it_is_back() -> None:
    """Told with when it is tried again; its lane is closed meanwhile."""
    plan = make_plan([make_chain(4)], [[[0] * 4], [[1] * 4]])
    stepper = opened(plan, Faults(losses=(Loss("d1", 20e-6, 90e-6),)), 2)
    for number in range(2):
        stepper.start(StepCall(number, 0))
    told = [stepper.take(None) for _ in range(3)]
    lost = told[0]

    assert isinstance(lost, DeviceLost)
    assert ("d1", (1,)) == (lost.device, lost.microbatches)
    assert lost.retry_s == pytest.approx(70e-6)
    assert [0, DeviceBack("d1")] == [x.microbatch if isinstance(x, StepDone) else x for x in told[1:]]
    assert not stepper.lanes.lost


def test_other_plans_are_taken_up_while_a_microbatch_goes_on() -> None:
    """The one that is open keeps its lane; the next one takes a lane of the new plan."""
    stepper = opened(alone_plan())
    stepper.load([split_plan()])
    lane = stepper.lanes.take(0)
    assert lane is not None
    stepper.open(1, lane.number)
    stepper.start(StepCall(0, 0))
    first = stepper.take(None)
    stepper.start(StepCall(1, 0))
    second = stepper.take(None)

    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert ({"d0"}, {"d0", "d1"}) == (set(first.busy_s), set(second.busy_s))


def test_state_moves_before_the_step_that_wants_it_elsewhere() -> None:
    """64 KB over a link of 1 GB/s take 64 us once; steps that follow find it in place, and none goes back."""
    size = 64_000
    step = [[(0, 0, size, "rw")]]
    first, second = (
        make_trace(step, {0: BufferKind.STATE}, size_bytes=size, kind=k) for k in ("prefill", "decode")
    )
    stepper = opened(make_plan([first, second], [[[0], [1]]], counts=[1, 3]))
    took = []
    for number in (0, 1, 1, 0):
        stepper.start(StepCall(0, number))
        done = stepper.take(None)
        assert isinstance(done, StepDone)
        took.append(done.seconds * 1e6)

    assert [10.0, 10.0 + size / 1e3 + 1.0, 10.0, 10.0] == pytest.approx(took)


class _Noted(ModelledRows):
    """Rows that write down what they run and who leaves, with inputs where steps are really computed."""

    def __init__(self, *words: Any, inputs: Callable[[], Any], noted: list[object]) -> None:
        super().__init__(*words)
        self._inputs, self._noted = inputs, noted

    def next_step(self) -> StepCall | None:
        """With inputs."""
        call = super().next_step()
        return call and replace(call, inputs=self._inputs())

    def end(self, done: StepDone) -> list[int]:
        """Noted."""
        self._noted.append((done.microbatch, done.step))
        left = list(super().end(done))
        self._noted += left
        return left


def events_of(stepper: Stepper, requests: RequestLoad) -> list[object]:
    """What happens to requests that all wait at the start, in order, one microbatch at a time."""
    noted: list[object] = []
    ledger = RequestLedger.of(len(requests))

    def make(number: int, lane: LoadedLane) -> ModelledRows:
        words = (number, lane, requests, ledger, lambda: stepper.now_s() * 1e6)
        return _Noted(*words, inputs=lambda: made.workloads()[0].make_inputs(0), noted=noted)

    scheduler: RowScheduler[int] = RowScheduler(stepper, make, SchedulerConfig(depth=1))
    for number in range(len(requests)):
        scheduler.push(number)
    while True:
        scheduler.begin()
        if scheduler.is_idle:
            break
        scheduler.wait(30.0)
    return noted


def test_the_scheduler_does_the_same_over_workers_and_over_a_virtual_clock() -> None:
    """Steps, who leaves by them and when one is opened anew: the same events in the same order."""
    rng = random.Random(3)
    lanes = [made.scattered(rng, range(2))[0] for _ in range(2)]
    plan = made.plan_of([[lane, lane] for lane in lanes], 2)  # state has one home
    arrivals = make_arrivals("batch:7", seed=2, lengths="geometric:8,4")
    requests = load_of(made.unit(), arrivals, 2)
    with WorkerStepper([plan], made.workloads()[0].weights(), timeout_s=30.0) as workers:
        real = events_of(workers, requests)

    assert real == events_of(VirtualStepper([plan]), requests)
    assert set(range(7)) == {x for x in real if isinstance(x, int)}


def test_ten_thousand_requests_take_seconds() -> None:
    """A tenth of what must take less than a minute, with room for a busy machine."""
    requests = load_of(split_plan().unit, make_arrivals("poisson:6000", 10_000, 0, "geometric:1,100"), 16)
    server = SimulatedServer([split_plan()], requests)
    began = time.process_time()
    served = server.run()

    assert time.process_time() - began < 6.0
    assert min(served.ledger.done_us) > 0.0


def test_devices_wait_for_the_host_unless_a_step_is_ordered_ahead() -> None:
    """The host takes 5 us for each of two steps."""
    took = []
    for is_ahead in (False, True):
        stepper = VirtualStepper([alone_plan()], host_us=5.0)
        lane = stepper.lanes.take(0)
        assert lane is not None
        stepper.open(0, lane.number)
        stepper.start(StepCall(0, 0))
        if is_ahead:
            stepper.start(StepCall(0, 0))
        first = stepper.take(None)
        if not is_ahead:
            stepper.start(StepCall(0, 0))
        assert isinstance(first, StepDone)
        assert isinstance(stepper.take(None), StepDone)
        took.append(stepper.machine.now_us)

    assert [10.0 + 2 * RUN_US, 5.0 + 2 * RUN_US] == pytest.approx(took)
