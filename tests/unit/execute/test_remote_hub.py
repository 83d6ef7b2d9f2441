"""Workers that call: briefed, compared with the engine, and taken in again while others go on."""

import dataclasses
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest
import torch

import engine_factory as made
import stepper_factory as factory
from calling_worker import Given, serve
from tessera.errors import MismatchError, WorkerError
from tessera.execute import hub as hubs
from tessera.execute import messages, rendezvous
from tessera.execute.engine_connection import (
    LOOPBACK_SECRET,
    EngineAddress,
    EngineConnection,
    connect_engine,
    own_version,
)
from tessera.execute.hub import FIRST_PAUSE_S, Hub
from tessera.execute.lanes import Lanes
from tessera.execute.mailbox import Hangup
from tessera.execute.memory import ready_programs
from tessera.execute.messages import (
    ANY_RANK,
    Configured,
    Failed,
    Hello,
    Pieces,
    Setup,
    StoreValue,
    Want,
    Welcome,
    fetch,
    fingerprint,
    make_setups,
    pack_config,
    setup_of,
    unpack_config,
    weight_of,
)
from tessera.execute.processes import FORKSERVER, hidden_main, warm_up
from tessera.execute.rendezvous import Rendezvous
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Every launch on one of two devices; no lane avoids either."""
    return made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)


@pytest.fixture
def gate() -> Iterator[Rendezvous]:
    """Where workers of this machine connect."""
    found = Rendezvous("127.0.0.1", 0, LOOPBACK_SECRET)
    yield found
    found.close()


def start_worker(gate: Rendezvous, rank: int, offset: float | None = 0.0) -> BaseProcess:
    """A process that calls; with an offset its weights are others, with none it can make no weights."""
    call = EngineAddress("127.0.0.1", gate.port, LOOPBACK_SECRET)
    own = made.workloads()[0].weights() if offset is not None else {}
    weights = Given({name: tensor + (offset or 0.0) for name, tensor in own.items()})
    warm_up()
    context = multiprocessing.get_context(FORKSERVER)
    process = context.Process(target=serve, args=(call, rank, weights), daemon=True)  # type: ignore[attr-defined]
    with hidden_main():
        process.start()
    assert isinstance(process, BaseProcess)
    return process


def stepper_of(plan: Plan, gate: Rendezvous, here: frozenset[int] = frozenset()) -> WorkerStepper:
    """A stepper whose workers call."""
    return WorkerStepper(
        [plan],
        made.workloads()[0].weights(),
        hub=lambda setups: Hub(plan.cluster.names, setups, rendezvous=gate, local=here),
        timeout_s=30.0,
    )


def setups(plan: Plan) -> list[Setup]:
    """One a device."""
    weights = made.workloads()[0].weights()
    return make_setups(Lanes([plan]), list(ready_programs(plan)), weights, 3, "host", 1.0, False)


def hub_of(plan: Plan, gate: Rendezvous, digest: str = "") -> Hub:
    """A hub alone."""
    return Hub(plan.cluster.names, setups(plan), rendezvous=gate, digest=digest)


def come_in(gate: Rendezvous, rank: int = 0, digest: str = "") -> EngineConnection:
    """A worker that has said hello."""
    worker = connect_engine(EngineAddress("127.0.0.1", gate.port, LOOPBACK_SECRET), 5.0)
    worker.tell(Hello(rank, digest, own_version()))
    return worker


def test_a_configuration_says_all_that_a_worker_starts_with(plan: Plan) -> None:
    """The setup that a worker makes of it is the engine's, weights and all."""
    sent = dataclasses.replace(setups(plan)[0], secret=b"key", epochs=(0, 0), host="here")
    config = unpack_config(pack_config(sent))
    found = setup_of(config, made.workloads()[0].weights(), b"key", "here")

    for field in dataclasses.fields(Setup):
        if field.name == "programs":
            assert [tuple(lane) for lane in sent.programs] == [tuple(lane) for lane in found.programs]
        elif field.name == "weights":
            assert sent.weights.keys() == found.weights.keys()
        else:
            assert getattr(sent, field.name) == getattr(found, field.name)


def test_a_wrong_configuration_is_refused(plan: Plan) -> None:
    """Bytes that are none, and one of a device that is not there, end in one line."""
    good = dataclasses.replace(setups(plan)[0], epochs=(0, 0))
    packed = [
        pack_config(dataclasses.replace(good, **wrong))
        for wrong in ({"device": 2}, {"microbatches": 0}, {"traces": ()})
    ]
    for wrong in (b"", b'{"device": "0"}', *packed, pack_config(good).replace(b"float32", b"rm -rf!")):
        with pytest.raises(WorkerError, match="configuration cannot be read"):
            unpack_config(wrong)


def test_a_fingerprint_tells_weights_apart() -> None:
    """By value, dtype and shape; a view is as good as its copy."""
    tensor = torch.randn(64, 300)

    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    others = (tensor + 1, tensor.double(), tensor.reshape(300, 64))
    assert fingerprint(tensor) not in {fingerprint(other) for other in others}


def test_weights_that_are_others_are_named(plan: Plan) -> None:
    """The message says which weight, and what to do."""
    config = unpack_config(pack_config(dataclasses.replace(setups(plan)[0], epochs=(0, 0))))
    with pytest.raises(MismatchError, match=r"weight 'layers\..*' here is not the engine's.*--model"):
        setup_of(config, {n: t + 1 for n, t in made.workloads()[0].weights().items()}, b"", "")


def test_weights_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in order, whatever their size and strides; only those that the worker reads."""
    monkeypatch.setattr(messages, "PIECE_BYTES", 64)
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


def test_a_worker_that_leaves_is_replaced_while_the_other_stays(plan: Plan, gate: Rendezvous) -> None:
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


def test_a_worker_beside_the_engine_needs_no_call(plan: Plan, gate: Rendezvous) -> None:
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


def test_a_worker_with_other_weights_is_found_before_the_first_request(plan: Plan, gate: Rendezvous) -> None:
    """Both sides end with one line that names the weight."""
    workers = [start_worker(gate, 0), start_worker(gate, 1, 1.0)]
    stepper = stepper_of(plan, gate)
    with (
        pytest.raises(WorkerError, match=r"device d1: could not start: .*weight .* is not the engine's"),
        stepper,
    ):
        pass
    workers[1].join(10)
    workers[0].kill()  # the engine may be gone before it is heard, and the gate stays open

    assert 2 == workers[1].exitcode


def test_nobody_calls_is_said_with_the_last_complaint(
    plan: Plan, gate: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine names the device that has no worker, and whom it sent away."""
    monkeypatch.setattr(hubs, "START_TIMEOUT_S", 0.3)
    with pytest.raises(MismatchError, match="another secret"):
        connect_engine(EngineAddress("127.0.0.1", gate.port, b"not the secret at all"), 0.0)
    stepper = stepper_of(plan, gate)
    with (
        pytest.raises(WorkerError, match=r"device d.: .*nobody connected within 0 s; refused: .*secret"),
        stepper,
    ):
        pass


def test_an_absent_device_is_awaited_without_a_pause(
    plan: Plan, gate: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three times in vain it has long been planned around; whoever comes then is taken at once."""
    monkeypatch.setattr(hubs, "ABSENT_S", 0.1)
    hub = hub_of(plan, gate)
    workers = [start_worker(gate, 0), start_worker(gate, 1)]
    hub.start()
    assert all(isinstance(hub.take(30.0)[1], messages.WorkerReady) for _ in range(2))  # type: ignore[index]
    workers[1].kill()
    assert isinstance(hub.take(30.0)[1], Hangup)  # type: ignore[index]
    for failures in (1, 2, 3):
        assert failures == hub.lose(1).failures
        if failures < 3:
            assert "nobody connected" in hub.take(30.0)[1].message  # type: ignore[index]
    assert hub.take(1.0) is None
    workers.append(start_worker(gate, 1))
    start_s = time.monotonic()
    assert isinstance(hub.take(30.0)[1], messages.WorkerReady)  # type: ignore[index]
    assert (3, True) == (hub.members[1].epoch, hub.members[1].state == "ready")
    waited_s = time.monotonic() - start_s
    hub.stop()
    for worker in workers:
        worker.join(10)

    assert waited_s < 5.0 < FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("rank", "digest", "said"), [(7, "", "no rank 7"), (0, "other plans", "other plans")]
)
def test_one_that_does_not_belong_is_told_why(
    plan: Plan, gate: Rendezvous, rank: int, digest: str, said: str
) -> None:
    """A rank that is not there, or other plans: the worker hears the reason, and the engine waits on."""
    hub = hub_of(plan, gate, "these plans")
    hub.start()
    worker = come_in(gate, rank, digest)
    assert hub.take(0.5) is None
    answer = worker.take(block=True)
    hub.stop()
    worker.close()

    assert isinstance(answer, Failed)
    assert said in answer.message


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_message_that_is_too_long_is_not_read(
    plan: Plan, gate: Rendezvous, is_configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with the secret that sends more than it may is lost at once."""
    hub = hub_of(plan, gate)
    hub.start()
    worker = come_in(gate)
    assert hub.take(0.5) is None
    assert isinstance(worker.take(block=True), Welcome)
    if is_configured:
        worker.tell(Configured())
        assert hub.take(0.2) is None
    limit = hub.max_bytes() if is_configured else rendezvous.MAX_ASKED_BYTES
    worker.tell(StoreValue("x", bytes(limit + 1)))
    found = hub.take(20.0)
    hub.stop()
    worker.close()

    assert found is not None
    assert "too long" in found[1].reason


def test_the_library_refuses_what_no_message_is(
    plan: Plan, gate: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound of all messages the connection is closed before anything is allocated."""
    from tessera.execute import mailbox

    monkeypatch.setattr(mailbox, "MAX_MESSAGE_BYTES", 1 << 20)
    small = Rendezvous("127.0.0.1", 0, LOOPBACK_SECRET)
    hub = hub_of(plan, small)
    hub.start()
    worker = come_in(small)
    assert hub.take(0.5) is None
    assert isinstance(worker.take(block=True), Welcome)
    worker.tell(Configured())
    worker.tell(StoreValue("x", bytes(2 << 20)))
    found = hub.take(20.0)
    hub.stop()
    worker.close()

    assert found == (0, Hangup())


def test_what_a_worker_says_while_it_is_configured_is_bounded(plan: Plan) -> None:
    """One that asks for a weight that is not its own, or says something else, is a failure in words."""
    for said, message in (
        (Want("x" * 999, 0), "does not read"),
        (messages.WorkerReady(0.0, 1), "sent WorkerReady"),
    ):
        gate = Rendezvous("127.0.0.1", 0, LOOPBACK_SECRET)
        hub = hub_of(plan, gate)
        hub.start()
        worker = come_in(gate)
        assert hub.take(0.5) is None
        worker.tell(said)
        found = hub.take(10.0)
        hub.stop()
        worker.close()

        assert found is not None
        assert isinstance(found[1], Failed)
        assert message in found[1].message
        assert len(found[1].message) < 200
