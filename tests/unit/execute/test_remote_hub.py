"""Workers that bring no plans: they are briefed, compared with the engine, and others take their place."""

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
from calling_worker import Given, serve
from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute import Engine, messages
from tessera.execute.briefing import (
    Briefing,
    briefing_of,
    fingerprint,
    pack_briefing,
    setup_of,
    unpack_briefing,
)
from tessera.execute.crew import MakeHub
from tessera.execute.gate import Gate
from tessera.execute.handshake import LOOPBACK_SECRET, Call, call_engine
from tessera.execute.hub import FORKSERVER, hidden_main, warm_up
from tessera.execute.inbox import Hangup, Inbox
from tessera.execute.messages import ANY_RANK, Cancel, Refused
from tessera.execute.remote import RemoteHub
from tessera.execute.setups import setups_of
from tessera.execute.worker import Setup
from tessera.ir import Plan


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


def start_worker(gate: Gate, rank: int, offset: float = 0.0) -> BaseProcess:
    """A process that calls without plans; with an offset, its weights are others."""
    call = Call(gate.address, LOOPBACK_SECRET)
    weights = Given({name: tensor + offset for name, tensor in made.workloads()[0].weights().items()})
    warm_up()
    context = multiprocessing.get_context(FORKSERVER)
    process = context.Process(target=serve, args=(call, rank, weights), daemon=True)  # type: ignore[attr-defined]
    with hidden_main():
        process.start()
    assert isinstance(process, BaseProcess)
    return process


def hub_of(plan: Plan, gate: Gate) -> MakeHub:
    """A hub that starts nobody and leaves the gate open."""
    names = plan.cluster.names
    return lambda setups: RemoteHub(names, setups, gate, "", {}, keeps_gate=True, start_timeout_s=60.0)


def setup(plan: Plan) -> Setup:
    """Of the first device."""
    return setups_of([plan], made.workloads()[0].weights())[0]


def test_a_briefing_says_all_that_a_worker_is_born_with(plan: Plan) -> None:
    """The setup that a worker makes of it is the engine's, weights and all."""
    sent = setup(plan)
    found = setup_of(unpack_briefing(pack_briefing(briefing_of(sent, 2))), made.workloads()[0].weights())

    assert [tuple(lane) for lane in sent.programs] == [tuple(lane) for lane in found.programs]
    for name in ("device", "traces", "slots", "slot_bytes", "num_threads", "is_plain", "us"):
        assert getattr(sent, name) == getattr(found, name)
    assert sent.weights.keys() == found.weights.keys()


def test_a_briefing_has_every_field_of_a_setup() -> None:
    """A field that is added to one must be added to the other, or be one that each side has of its own."""
    own = {"progress", "interpret"}
    setup_fields = {f.name for f in dataclasses.fields(Setup)}

    assert setup_fields - own == {f.name for f in dataclasses.fields(Briefing)} - {"world"}


def test_a_wrong_briefing_is_refused(plan: Plan) -> None:
    """Bytes that are no briefing, and one of a device that is not there, end in one line."""
    good = briefing_of(setup(plan), 2)
    data = b'{"device": "0"}'
    for packed in (
        {},
        {"briefing": ("uint8", (len(data),), data)},
        pack_briefing(dataclasses.replace(good, device=2)),
        pack_briefing(dataclasses.replace(good, slots=0)),
        pack_briefing(dataclasses.replace(good, traces=())),
    ):
        with pytest.raises(WorkerError, match="briefing cannot be read"):
            unpack_briefing(packed)


def test_a_fingerprint_tells_weights_apart() -> None:
    """By value, dtype and shape; a view is as good as its copy."""
    tensor = torch.randn(64, 300)

    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    others = (tensor + 1, tensor.double(), tensor.reshape(300, 64))
    assert fingerprint(tensor) not in {fingerprint(other) for other in others}


def test_weights_that_are_missing_or_others_are_named(plan: Plan) -> None:
    """The message says which weight, and what to do."""
    briefing = briefing_of(setup(plan), 2)
    with pytest.raises(MismatchError, match=r"has no weight 'layers.*--model"):
        setup_of(briefing, {})
    with pytest.raises(MismatchError, match=r"weight 'layers\..*' here is not the engine's"):
        setup_of(briefing, {n: t + 1 for n, t in made.workloads()[0].weights().items()})


def test_workers_without_plans_run_one_and_are_replaced(plan: Plan, gate: Gate) -> None:
    """Two of three that call are briefed; when one is lost, the third takes its place in the next engine."""
    weights = made.workloads()[0].weights()
    workers = [start_worker(gate, rank) for rank in (0, 1)]
    with Engine(plan, weights, hub=hub_of(plan, gate)) as engine:
        workers.append(start_worker(gate, ANY_RANK))
        assert all(made.is_right(i, r) for i, r in enumerate(engine.run(made.make_requests(4))))
        assert workers[1].pid is not None
        os.kill(workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"device d1: .*0 of 2 requests were finished"):
            engine.run(made.make_requests(2))
    workers.append(start_worker(gate, 0))  # as the machine of the first does when it was hung up on
    with Engine(plan, weights, hub=hub_of(plan, gate)) as engine:
        results = engine.run(made.make_requests(4))
    for worker in workers:
        worker.join(10)

    assert all(made.is_right(i, r) for i, r in enumerate(results))
    assert [0, -signal.SIGKILL, 0, 0] == [worker.exitcode for worker in workers]


def test_a_worker_with_other_weights_is_found_before_the_first_request(plan: Plan, gate: Gate) -> None:
    """Both sides end with one line that names the weight."""
    workers = [start_worker(gate, 0), start_worker(gate, 1, 1.0)]
    engine = Engine(plan, made.workloads()[0].weights(), hub=hub_of(plan, gate))
    with (
        pytest.raises(WorkerError, match=r"device d1: could not start: weight .* is not the engine's"),
        engine,
    ):
        pass
    for worker in workers:
        worker.join(10)

    assert 2 == workers[1].exitcode


def test_nobody_calls_is_said_with_the_last_complaint(plan: Plan, gate: Gate) -> None:
    """The engine names the devices that have no worker, and whom it sent away."""
    names = plan.cluster.names
    hub = RemoteHub(names, [setup(plan)] * 2, gate, "", {}, start_timeout_s=0.3)
    with pytest.raises(MismatchError, match="another secret"):
        call_engine(Call(gate.address, b"not the secret at all"), 0, 0.0)
    with pytest.raises(WorkerError, match=r"device d0, d1: nobody called within 0 s; sent away: .*secret"):
        hub.start()
    assert names == hub.absent


@pytest.mark.parametrize(
    ("rank", "digest", "said"),
    [(7, "", "no rank 7"), (0, "other plans", "other plans")],
)
def test_one_that_does_not_belong_is_told_why(
    plan: Plan, gate: Gate, rank: int, digest: str, said: str
) -> None:
    """A rank that is not there, or other plans: the caller hears the reason."""
    hub = RemoteHub(plan.cluster.names, [setup(plan)] * 2, gate, "these plans", {}, start_timeout_s=0.3)
    pipe = call_engine(Call(gate.address, LOOPBACK_SECRET, digest), rank, 5.0)
    with pytest.raises(TesseraError):
        hub.start()
    answer = messages.decode(pipe.recv_bytes())

    assert isinstance(answer, Refused)
    assert said in answer.message


def test_one_that_sends_garbage_is_lost_and_others_are_heard() -> None:
    """An inbox drops the source that cannot be read, says why, and reads on."""
    inbox = Inbox()
    ends = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    inbox.listen({i: mine for i, (mine, _) in enumerate(ends)}, messages.decode)
    ends[0][1].send_bytes(b"\x02\0\0\0[]")
    first = inbox.take(True, 5.0)
    ends[1][1].send_bytes(messages.encode(Cancel(3)))
    second = inbox.take(True, 5.0)
    for _, theirs in ends:
        theirs.close()
    deadline = time.monotonic() + 5
    inbox.join(deadline - time.monotonic())

    assert first is not None
    assert (0, True) == (first[0], isinstance(first[1], Hangup) and "cannot be read" in first[1].reason)
    assert (1, Cancel(3)) == second
