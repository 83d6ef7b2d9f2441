"""Steps on worker processes: the model itself's bits whatever the lane, the transport or the policy."""

import os
import random
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine_factory as made
import stepper_factory as factory
from tessera.errors import MismatchError, TesseraError, UnknownName, WorkerError
from tessera.execute.lower import lower
from tessera.execute.memory import landing
from tessera.execute.stepper import DeviceBack, DeviceLost, SpanLog, StepCall, StepDone
from tessera.execute.transport import resolve
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Device, DeviceKind, Plan
from tessera.profile.devices import parse_devices


def split(seed: int, num_devices: int = 2, num_lanes: int = 2) -> Plan:
    """Lanes that cross between all devices, and move state between the two steps."""
    rng = random.Random(seed)
    return made.plan_of([made.scattered(rng, range(num_devices)) for _ in range(num_lanes)], num_devices)


def workers(*plans: Plan, transport: str = "auto") -> WorkerStepper:
    """Three microbatches on processes of this machine."""
    weights = made.workloads()[0].weights()
    return WorkerStepper(plans, weights, transport=transport, timeout_s=30.0)


@pytest.fixture(scope="module", params=["shm", "host"])
def stepper(request: pytest.FixtureRequest) -> Iterator[WorkerStepper]:
    """Two policies on three devices."""
    with workers(split(0, 3), split(1, 3), transport=request.param) as found:
        yield found


@pytest.mark.parametrize("policy", [0, 1])
def test_requests_side_by_side_give_the_models_bits(stepper: WorkerStepper, policy: int) -> None:
    """Outputs and final state, with state that moves between the steps, over both transports."""
    results, told = factory.play(stepper, list(range(8)), policy=policy)

    assert factory.are_right(results)
    assert told == factory.Played()


def test_outputs_that_nobody_wants_stay_away(stepper: WorkerStepper) -> None:
    """A skipped output is not sent; without state given, it is zeros."""
    request = made.make_requests(1)[0]
    stepper.open(0, 0)
    stepper.start(StepCall(0, 0, request.inputs(0, 0, {}), skips=("y",)))
    done = stepper.take(60.0)
    stepper.close(0)

    assert isinstance(done, StepDone)
    assert not done.outputs
    assert set(done.busy_s) <= set(stepper.plans[0].cluster.names)
    assert done.seconds > 0.0


def test_a_microbatch_that_is_opened_again_starts_empty(stepper: WorkerStepper) -> None:
    """State of an earlier use, on this lane or another, is gone."""
    request = made.make_requests(1)[0]
    for lane in (0, 3, 0):
        stepper.open(1, lane)
        for _ in range(2):
            stepper.start(StepCall(1, 0, request.inputs(0, 0, {})))
            done = stepper.take(60.0)
            assert isinstance(done, StepDone)
            if _ == 0:
                assert (done.outputs["y"] == made.reference_run(0).outputs[0]["y"]).all()
        stepper.close(1)


def test_take_returns_when_woken_or_late(stepper: WorkerStepper) -> None:
    """A wake from elsewhere and a time-out both end the wait with nothing."""
    stepper.wake()
    assert stepper.take(60.0) is None
    assert stepper.take(0.01) is None


def test_wakes_do_not_hold_up_what_workers_say(stepper: WorkerStepper) -> None:
    """However many threads wake it before it looks, a step's end comes behind one wake only."""
    stepper.open(0, 0)
    for _ in range(100):
        stepper.wake()
    stepper.start(StepCall(0, 0, made.make_requests(1)[0].inputs(0, 0, {})))

    assert stepper.take(60.0) is None
    assert isinstance(stepper.take(60.0), StepDone)
    stepper.close(0)


def test_use_counts_work_and_bytes(stepper: WorkerStepper) -> None:
    """What every lane's programs move, and how devices are."""
    before = stepper.use()
    factory.play(stepper, [0], microbatches=1)
    after = stepper.use()
    lanes = [stepper.programs[n] for n in (0, 1)]
    moved = {sum(t.num_bytes * p.count for p in lane for t in p.transfers) for lane in lanes}

    assert sum(after.moved.values()) - sum(before.moved.values()) in moved
    assert any(after.busy_s[name] > before.busy_s[name] for name in after.busy_s)
    assert {"ready"} == {status.state for status in after.devices.values()}
    assert all(status.pid and status.restarts == 0 for status in after.devices.values())


def test_spans_are_reported_where_somebody_wants_them(stepper: WorkerStepper) -> None:
    """Every launch of the request, by this machine's clock."""
    log = SpanLog(stepper.plans[0])
    log.begin(stepper.now_s())
    log.open(0, 0)
    stepper.spans = log
    try:
        factory.play(stepper, [0], microbatches=1)
    finally:
        stepper.spans = None
    spans = log.timeline().spans
    launches = sum(len(g.trace.launches) * n for g, n in zip(made.unit().graphs, made.COUNTS, strict=True))

    assert launches == sum(not span.is_transfer for span in spans)
    assert all(0 <= span.start_us <= span.stop_us < 60e6 for span in spans)


def test_misuse_is_refused(stepper: WorkerStepper) -> None:
    """A microbatch is opened once, exists, runs one step at a time, and steps do not go back over a move."""
    request = made.make_requests(1)[0]
    stepper.open(0, 0, request.state())
    for wrong in (0, 3, -1):
        with pytest.raises(TesseraError, match="is open already, or not one of lane 0"):
            stepper.open(wrong, 0)
    stepper.start(StepCall(0, 1, request.inputs(0, 0, {})))
    with pytest.raises(TesseraError, match="at work"):
        stepper.close(0)
    with pytest.raises(TesseraError, match="at work"):
        stepper.start(StepCall(0, 1, {}))
    stepper.take(60.0)
    with pytest.raises(MismatchError, match="no step 7"):
        stepper.start(StepCall(0, 7, {}))
    if len(stepper.programs[0]) > 2:
        with pytest.raises(MismatchError, match="cannot go back"):
            stepper.start(StepCall(0, 0, request.inputs(0, 0, {})))
    stepper.close(0)


@pytest.mark.parametrize("transport", ["shm", "host"])
def test_plans_are_loaded_while_steps_run(transport: str) -> None:
    """What is open goes on along its old lane; what is opened next takes new ones, with larger transfers."""
    alone = made.plan_of([[[0] * len(g.trace.launches) for g in made.unit().graphs]], 2)
    across = split(2)
    least, most = (max(landing(p, 0, 1)[1] for p in lower(plan)[0]) for plan in (alone, across))
    assert least < most
    with workers(alone, transport=transport) as stepper:

        def load(num_done: int) -> None:
            if num_done in (2, 9, 14):
                stepper.load([across, alone] if num_done != 9 else [split(3, num_lanes=4), alone])

        results, told = factory.play(stepper, list(range(10)), between=load)
        shared = sorted(Path(stepper.hub._folder).glob("arena-*"))
        for _ in range(3):  # plans that come again need no more memory
            stepper.load([across, alone])
        more, _ = factory.play(stepper, list(range(4)))
        assert shared == sorted(Path(stepper.hub._folder).glob("arena-*"))

    assert factory.are_right(results)
    assert factory.are_right(more)
    assert told == factory.Played()
    assert {0, 1} <= {result.lane for result in results.values()}


def test_missing_shared_memory_is_named() -> None:
    """With its size and what to do, as where a container has little of it; nothing is left there."""
    weights = {name: weight.clone() for name, weight in made.workloads()[0].weights().items()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(WorkerError, match=r"no shared memory for weights of \d.*Make room in /dev/shm"):
            WorkerStepper([split(0)], weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


def test_too_few_files_are_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets would end the process or the command with a traceback."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (50, 50))
    monkeypatch.setattr("tempfile.mkdtemp", lambda **options: pytest.fail("a folder was made"))

    with pytest.raises(TesseraError, match="allows 50 open files"), workers(split(0)):
        pass


def test_plans_for_more_microbatches_or_other_devices_are_refused() -> None:
    """What the workers were made for stays."""
    stepper = workers(split(0))
    with pytest.raises(MismatchError, match="3 microbatches only"):
        stepper.load([replace(split(1), microbatches=4)])
    with pytest.raises(MismatchError, match="other devices"):
        stepper.load([split(0, 3)])


def test_a_transport_is_chosen_by_what_the_devices_are() -> None:
    """`auto`, and what cannot be."""
    cpu = tuple(parse_devices("emu:a100,emu:l40s"))
    gpu = tuple(replace(d, kind=DeviceKind.CUDA) for d in cpu)
    mixed: tuple[Device, ...] = (cpu[0], gpu[1])
    assert [resolve("auto", d, True) for d in (cpu, gpu, mixed)] == ["shm", "ipc", "shm"]
    assert {resolve("auto", d, False) for d in (cpu, gpu, mixed)} == {"host"}
    assert resolve("nvshmem", gpu, False) == "nvshmem"
    for name, devices, is_local in (("ipc", cpu, True), ("shm", gpu, True), ("shm", cpu, False)):
        with pytest.raises(WorkerError, match="joins"):
            resolve(name, devices, is_local)
    with pytest.raises(UnknownName, match="auto, host, ipc, nvshmem, shm"):
        resolve("gloo", cpu, True)


def test_a_step_that_is_queued_begins_when_the_one_before_has_ended() -> None:
    """On a lane of one device two steps are ordered at once, and give what they give one by one."""
    alone = made.plan_of([made.scattered(random.Random(0), [0]), made.scattered(random.Random(0), [1])], 2)
    inputs = made.make_requests(1)[0].inputs(0, 0, {})
    with workers(alone) as stepper:
        found = []
        for is_queued in (False, True):
            stepper.open(0, 0)
            outputs = []
            for _ in range(2 if is_queued else 0):
                stepper.start(StepCall(0, 0, inputs))
            for _ in range(2):
                if not is_queued:
                    stepper.start(StepCall(0, 0, inputs))
                done = stepper.take(60.0)
                assert isinstance(done, StepDone)
                outputs.append(done.outputs["y"])
            stepper.close(0)
            found.append(outputs)

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(*found[0])


def test_a_worker_that_is_killed_takes_what_was_queued_with_it() -> None:
    """One loss is told, and the microbatch works again when the device is back."""
    alone = made.plan_of([made.scattered(random.Random(0), [0])], 1)
    inputs = made.make_requests(1)[0].inputs(0, 0, {})
    with workers(alone) as stepper:
        stepper.open(0, 0)
        for _ in range(2):
            stepper.start(StepCall(0, 0, inputs))
        pid = next(iter(stepper.use().devices.values())).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        events = [stepper.take(60.0)]
        while not isinstance(events[-1], DeviceBack):
            events.append(stepper.take(60.0))
        stepper.open(0, 0)
        stepper.start(StepCall(0, 0, inputs))
        done = stepper.take(60.0)

    assert [(0,)] == [event.microbatches for event in events if isinstance(event, DeviceLost)]
    assert isinstance(done, StepDone)
    assert (done.outputs["y"] == made.reference_run(0).outputs[0]["y"]).all()
