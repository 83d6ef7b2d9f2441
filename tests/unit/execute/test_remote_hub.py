"""Workers that call: briefed, compared with the engine, and taken in again while others go on."""

import dataclasses
import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest
import torch
from tessera.execute.handshake import LOOPBACK_SECRET, EngineCall, call_engine
from tessera.execute.pipes import FORKSERVER, Hangup, warm_up
from tessera.execute.remote import Gate, RemoteHub
from tessera.execute.setups import (
    Pieces,
    Setup,
    briefing_of,
    fetch,
    fingerprint,
    pack_briefing,
    setup_of,
    unpack_briefing,
    weight_of,
)

import engine_factory as made
import stepper_factory as factory
from calling_worker import Given, serve
from tessera.errors import MismatchError, WorkerError
from tessera.execute import messages, remote
from tessera.execute import setups as told_setups
from tessera.execute.hub import FIRST_PAUSE_S, Up, hidden_main
from tessera.execute.memory import ready_programs
from tessera.execute.messages import ANY_RANK, Briefed, Failed, Refused, Want, Welcome
from tessera.execute.worker_stepper import WorkerStepper, make_setups
from tessera.ir import Plan

SESSION = bytes(16)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Every launch on one of two devices; no lane avoids either."""
    return made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where workers of this machine call."""
    found = Gate("127.0.0.1", 0, LOOPBACK_SECRET)
    yield found
    found.close()


def start_worker(gate: Gate, rank: int, offset: float | None = 0.0) -> BaseProcess:
    """A process that calls; with an offset its weights are others, with none it can make no weights."""
    call = EngineCall(gate.address, LOOPBACK_SECRET)
    own = made.workloads()[0].weights() if offset is not None else {}
    weights = Given({name: tensor + (offset or 0.0) for name, tensor in own.items()})
    warm_up()
    context = multiprocessing.get_context(FORKSERVER)
    process = context.Process(target=serve, args=(call, rank, weights), daemon=True)  # type: ignore[attr-defined]
    with hidden_main():
        process.start()
    assert isinstance(process, BaseProcess)
    return process


def stepper_of(plan: Plan, gate: Gate, here: frozenset[int] = frozenset()) -> WorkerStepper:
    """A stepper whose workers call."""
    return WorkerStepper(
        [plan],
        made.workloads()[0].weights(),
        hub=lambda setups: RemoteHub(setups, gate=gate, secret=LOOPBACK_SECRET, here=here),
        timeout_s=30.0,
    )


def setups(plan: Plan) -> list[Setup]:
    """One a device."""
    weights = made.workloads()[0].weights()
    return make_setups(plan, list(ready_programs(plan)), weights, 3, "host", 1.0, False)


def hub_of(plan: Plan, gate: Gate, digest: str = "") -> RemoteHub:
    """A hub alone."""
    return RemoteHub(setups(plan), gate=gate, secret=LOOPBACK_SECRET, digest=digest)


def test_a_briefing_says_all_that_a_worker_is_born_with(plan: Plan) -> None:
    """The setup that a worker makes of it is the engine's, weights and all."""
    sent = dataclasses.replace(setups(plan)[0], key=b"key", epochs=(0, 0), host="here")
    told = unpack_briefing(pack_briefing(briefing_of(sent, SESSION)))
    found = setup_of(told, made.workloads()[0].weights(), b"key", "here")

    for field in dataclasses.fields(Setup):
        if field.name == "programs":
            assert [tuple(lane) for lane in sent.programs] == [tuple(lane) for lane in found.programs]
        elif field.name == "weights":
            assert sent.weights.keys() == found.weights.keys()
        else:
            assert getattr(sent, field.name) == getattr(found, field.name)


def test_a_wrong_briefing_is_refused(plan: Plan) -> None:
    """Bytes that are no briefing, and one of a device that is not there, end in one line."""
    good = briefing_of(dataclasses.replace(setups(plan)[0], epochs=(0, 0)), SESSION)
    duties = [
        dataclasses.replace(good.duty, device=2),
        dataclasses.replace(good.duty, microbatches=0),
        dataclasses.replace(good.duty, traces=()),
    ]
    weight = dataclasses.replace(good.weights[0], dtype="rm -rf")
    for packed in (
        b"",
        b'{"device": "0"}',
        *(pack_briefing(dataclasses.replace(good, duty=duty)) for duty in duties),
        pack_briefing(dataclasses.replace(good, session_hex="xyz")),
        pack_briefing(dataclasses.replace(good, weights=(weight,))),
    ):
        with pytest.raises(WorkerError, match="briefing cannot be read"):
            unpack_briefing(packed)


def test_a_fingerprint_tells_weights_apart() -> None:
    """By value, dtype and shape; a view is as good as its copy."""
    tensor = torch.randn(64, 300)

    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    others = (tensor + 1, tensor.double(), tensor.reshape(300, 64))
    assert fingerprint(tensor) not in {fingerprint(other) for other in others}


def test_weights_that_are_others_are_named(plan: Plan) -> None:
    """The message says which weight, and what to do."""
    told = briefing_of(setups(plan)[0], SESSION)
    with pytest.raises(MismatchError, match=r"weight 'layers\..*' here is not the engine's.*--model"):
        setup_of(told, {n: t + 1 for n, t in made.workloads()[0].weights().items()}, b"", "")


def test_weights_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in order, whatever their size and strides; only those that the worker reads."""
    monkeypatch.setattr(told_setups, "PIECE_BYTES", 64)
    there = {"a": torch.randn(7, 5).t(), "b": torch.arange(3), "c": torch.empty(0, 4), "d": torch.tensor(1.5)}
    pieces, sizes = Pieces(there), []

    def ask(name: str, start: int) -> memoryview:
        data = pieces.piece(name, start).data
        sizes.append(len(data))
        return data

    for name, tensor in there.items():
        found = fetch(weight_of(name, tensor), ask)
        assert torch.equal(tensor, found)
        assert tensor.dtype == found.dtype
    assert max(sizes) == 64
    with pytest.raises(WorkerError, match="does not read"):
        pieces.piece("e", 0)
    with pytest.raises(WorkerError, match="0 bytes"):
        fetch(weight_of("b", there["b"]), lambda name, start: memoryview(b""))


def test_a_worker_that_leaves_is_replaced_while_the_other_stays(plan: Plan, gate: Gate) -> None:
    """One is sent its weights; it is killed at work and the next takes its place: all bits are right."""
    workers = [start_worker(gate, 0), start_worker(gate, ANY_RANK, None)]

    def kill_at_five(num_done: int) -> None:
        if num_done == 5:
            assert workers[1].pid is not None
            os.kill(workers[1].pid, signal.SIGKILL)
            workers.append(start_worker(gate, 1))

    with stepper_of(plan, gate) as stepper:
        before = stepper.use().devices
        results, told = factory.play(stepper, list(range(8)), between=kill_at_five)
        again, _ = factory.play(stepper, [0])
        after = stepper.use().devices
    for worker in workers:
        worker.join(10)

    assert factory.are_right(results)
    assert factory.are_right(again)
    assert (["d1"], ["d1"]) == ([x.device for x in told.lost], [x.device for x in told.back])
    assert before["d0"] == after["d0"]
    assert (workers[2].pid, 1, "ready") == (after["d1"].pid, after["d1"].restarts, after["d1"].state)
    assert [0, -signal.SIGKILL, 0] == [worker.exitcode for worker in workers]


def test_a_worker_beside_the_engine_needs_no_call(plan: Plan, gate: Gate) -> None:
    """Device 0 is started here; killed, it is started again, and the other goes on."""
    worker = start_worker(gate, 1)

    def kill_at_five(num_done: int) -> None:
        if num_done == 5:
            pid = stepper.use().devices["d0"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    with stepper_of(plan, gate, frozenset({0})) as stepper:
        results, told = factory.play(stepper, list(range(8)), between=kill_at_five)
        restarts = [stepper.use().devices[name].restarts for name in ("d0", "d1")]
    worker.join(10)

    assert factory.are_right(results)
    assert ["d0"] == [x.device for x in told.lost]
    assert [1, 0] == restarts


def test_a_worker_with_other_weights_is_found_before_the_first_request(plan: Plan, gate: Gate) -> None:
    """Both sides end with one line that names the weight."""
    workers = [start_worker(gate, 0), start_worker(gate, 1, 1.0)]
    stepper = stepper_of(plan, gate)
    with (
        pytest.raises(WorkerError, match=r"device d1: could not start: .*weight .* is not the engine's"),
        stepper,
    ):
        pass
    for worker in workers:
        worker.join(10)

    assert 2 == workers[1].exitcode


def test_nobody_calls_is_said_with_the_last_complaint(
    plan: Plan, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine names the device that has no worker, and whom it sent away."""
    monkeypatch.setattr(remote, "START_TIMEOUT_S", 0.3)
    with pytest.raises(MismatchError, match="another secret"):
        call_engine(EngineCall(gate.address, b"not the secret at all"), 0, 0.0)
    stepper = stepper_of(plan, gate)
    with (
        pytest.raises(WorkerError, match=r"device d.: .*nobody called within 0 s; sent away: .*secret"),
        stepper,
    ):
        pass


def test_an_absent_device_is_awaited_without_a_pause(
    plan: Plan, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three times in vain it has long been planned around; whoever comes then is taken at once."""
    monkeypatch.setattr(remote, "ABSENT_S", 0.1)
    monkeypatch.setattr(remote, "LOOK_S", 0.05)
    hub = hub_of(plan, gate)
    workers = [start_worker(gate, 0), start_worker(gate, 1)]
    hub.start()
    assert [Up(0), Up(0)] == [hub.take(30.0)[1] for _ in range(2)]  # type: ignore[index]
    workers[1].kill()
    assert isinstance(hub.take(30.0)[1], Hangup)  # type: ignore[index]
    for failures in (1, 2, 3):
        assert failures == hub.lose(1).failures
        if failures < 3:
            assert "nobody called" in hub.take(30.0)[1].message  # type: ignore[index]
    assert hub.take(1.0) is None
    workers.append(start_worker(gate, 1))
    start_s = time.monotonic()
    assert hub.take(30.0) == (1, Up(3))
    waited_s = time.monotonic() - start_s
    hub.stop()
    for worker in workers:
        worker.join(10)

    assert waited_s < 5.0 < FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("rank", "digest", "said"), [(7, "", "no rank 7"), (0, "other plans", "other plans")]
)
def test_one_that_does_not_belong_is_told_why(
    plan: Plan, gate: Gate, rank: int, digest: str, said: str
) -> None:
    """A rank that is not there, or other plans: the caller hears the reason, and the engine waits on."""
    hub = hub_of(plan, gate, "these plans")
    hub.start()
    pipe = call_engine(EngineCall(gate.address, LOOPBACK_SECRET, digest), rank, 5.0)
    answer = messages.decode(pipe.recv_bytes())

    assert isinstance(answer, Refused)
    assert said in answer.message
    assert hub.take(0.0) is None
    hub.stop()


@pytest.mark.parametrize("is_briefed", [False, True])
def test_a_message_that_is_too_long_is_not_read(plan: Plan, gate: Gate, is_briefed: bool) -> None:
    """A caller with the secret that announces 700 MB is lost at once, while it is briefed and after."""
    hub = hub_of(plan, gate)
    hub.start()
    pipe = call_engine(EngineCall(gate.address, LOOPBACK_SECRET), 0, 5.0)
    assert isinstance(messages.decode(pipe.recv_bytes()), Welcome)
    if is_briefed:
        messages.post(pipe, Briefed())
    os.write(pipe.fileno(), struct.pack("!i", 700 << 20) + bytes(1 << 16))
    if is_briefed:
        found = hub.take(10.0)
        assert found is not None
        assert "too long" in found[1].reason
    else:
        with pytest.raises((EOFError, OSError)):
            pipe.recv_bytes()
    hub.stop()


def test_what_a_worker_says_while_it_is_briefed_is_bounded(plan: Plan, gate: Gate) -> None:
    """One that asks for a weight that is not its own, or says something else, is a failure in words."""
    for said, message in (
        (Want("x" * 999, 0), "does not read"),
        (messages.WorkerReady(0.0, 1), "said WorkerReady"),
    ):
        hub = hub_of(plan, Gate("127.0.0.1", 0, LOOPBACK_SECRET))
        hub.start()
        pipe = call_engine(EngineCall(hub._gate.address, LOOPBACK_SECRET), 0, 5.0)
        pipe.recv_bytes()
        messages.post(pipe, said)
        found = hub.take(10.0)
        hub.stop()

        assert found is not None
        assert isinstance(found[1], Failed)
        assert message in found[1].message
        assert len(found[1].message) < 200
