"""Faults on real worker processes: killed, stopped, failing or cut off at any moment; all come back."""

import contextlib
import ctypes
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine_factory as made
import stepper_factory as factory
from sampling import some_of
from tessera.errors import WorkerError
from tessera.execute import hub as hubs
from tessera.execute.hub import Hub, pause_s
from tessera.execute.mailbox import TOO_LONG, Hangup, Mailbox
from tessera.execute.messages import Clear, Setup, StoreGet, Where, encode
from tessera.execute.processes import FORKSERVER, LocalProcess
from tessera.execute.stepper import DeviceBack, DeviceLost, StepCall, StepDone
from tessera.execute.worker_stepper import Verdict, WorkerStepper, judge
from tessera.ir import Cluster, Device, DeviceKind, Plan, Program, Recv, Run, Send, Transfer

NAMED = re.compile(r"device d\d: .*(at instruction \d+ of \d+, \w+ of |before its share|with no work)")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process and no shared memory outlives a test."""
    yield
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("tessera-")]
    assert not list(Path("/dev/shm").glob(f"tessera-{os.getpid()}-*"))


class Killing(Hub):
    """Does something to the workers of some (device, epoch) as soon as they are there, or a little later."""

    def __init__(self, setups: Sequence[Setup], plan: Plan, deeds: dict[tuple[int, int], float]) -> None:
        super().__init__(plan.cluster.names, setups, FORKSERVER)
        self.deeds, self.num_opened = deeds, 0
        self.deed = signal.SIGKILL

    def _launch(self, device: int, setup: Setup) -> LocalProcess:
        line = super()._launch(device, setup)
        self.num_opened += 1
        delay_s = self.deeds.pop((device, setup.epoch), None)
        if delay_s is not None:
            assert line.pid is not None
            if delay_s:
                time.sleep(delay_s)
            os.kill(line.pid, self.deed)
        return line


def two_ways(seed: int) -> Plan:
    """A lane over devices 0 and 1, and one over 2 and 3."""
    rng = random.Random(seed)
    return made.plan_of([made.scattered(rng, [0, 1]), made.scattered(rng, [2, 3])], 4)


def one_way(seed: int = 0) -> Plan:
    """Every lane needs both devices."""
    rng = random.Random(seed)
    return made.plan_of([made.scattered(rng, [0, 1]) for _ in range(2)], 2)


def workers(plan: Plan, **options: object) -> WorkerStepper:
    """Three microbatches on processes of this machine."""
    weights = made.workloads()[0].weights()
    return WorkerStepper([plan], weights, **{"timeout_s": 30.0, **options})  # type: ignore[arg-type]


def pid_of(stepper: WorkerStepper, device: int) -> int:
    """Process of a worker that is there."""
    pid = stepper.use().devices[f"d{device}"].pid
    assert pid is not None
    return pid


def kill(stepper: WorkerStepper, device: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a device's worker, if there is one."""
    pid = stepper.use().devices[f"d{device}"].pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # an earlier kill that was not noticed yet
            os.kill(pid, number)


def until_back(stepper: WorkerStepper, limit_s: float = 60.0) -> list[object]:
    """What is told until all devices are ready again."""
    told: list[object] = []
    end = time.monotonic() + limit_s
    while any(status.state != "ready" for status in stepper.use().devices.values()):
        assert time.monotonic() < end, told
        told.append(stepper.take(1.0))
    while (event := stepper.take(0.0)) is not None:
        told.append(event)
    return told


KILLS = [(0, "shm"), (1, "host"), (0, "host"), (1, "shm")]


@pytest.mark.parametrize(("seed", "transport"), some_of(KILLS, KILLS[:2]))
def test_random_kills_under_load_cost_no_request(
    seed: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever workers are killed, every request ends with the right bits and every device comes back."""
    monkeypatch.setattr(hubs, "FIRST_PAUSE_S", 0.2)
    rng = random.Random(seed)
    at = {rng.randrange(1, 60): rng.randrange(4) for _ in range(8)}
    with workers(two_ways(seed), transport=transport) as stepper:

        def strike(num_done: int) -> None:
            if num_done in at:
                kill(stepper, at.pop(num_done))

        results, told = factory.play(stepper, list(range(16)), between=strike)
        until_back(stepper)
        again, _ = factory.play(stepper, list(range(4)))

    assert factory.are_right(results)
    assert factory.are_right(again)
    assert told.lost
    assert not [loss for loss in told.lost if not NAMED.search(loss.message) or not loss.is_certain]


@pytest.mark.parametrize("transport", ["shm", "host"])
def test_a_worker_that_is_started_again_knows_the_plans_that_were_loaded(transport: str) -> None:
    """Those of before it started, and those that came while it did; also where transfers grew."""
    alone = made.plan_of([[[0] * len(g.trace.launches) for g in made.unit().graphs]], 2)
    with workers(alone, transport=transport) as stepper:
        factory.play(stepper, [0])
        for seed, num_lanes in ((5, 1), (6, 2), (7, 4)):
            rng = random.Random(seed)
            plan = made.plan_of([made.scattered(rng, [0, 1]) for _ in range(num_lanes)], 2)
            stepper.load([plan, alone])
            results, _ = factory.play(stepper, list(range(6)))
            assert factory.are_right(results)
            kill(stepper, seed % 2)
            stepper.load([one_way(seed), alone])
            results, told = factory.play(stepper, list(range(6)))
            assert factory.are_right(results)
            assert told.lost


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.4])
def test_a_worker_killed_while_it_starts_is_started_again(delay_s: float) -> None:
    """The first start, and the first replacement of the other device."""
    plan = one_way()
    hub: list[Killing] = []

    def make(setups: Sequence[Setup]) -> Killing:
        hub.append(Killing(setups, plan, {(0, 0): delay_s, (1, 1): delay_s}))
        return hub[0]

    weights = made.workloads()[0].weights()
    with WorkerStepper([plan], weights, transport="host", hub=make) as stepper:
        first, _ = factory.play(stepper, list(range(3)))
        kill(stepper, 1)
        results, told = factory.play(stepper, list(range(6)))

    assert factory.are_right(first)
    assert factory.are_right(results)
    # One for the kill; the replacement's death is heard of too, unless it was ready before.
    assert {"d1"} == {loss.device for loss in told.lost}
    assert [loss.failures for loss in told.lost] == list(range(1, len(told.lost) + 1))
    assert not hub[0].deeds
    assert hub[0].num_opened == 5


def test_all_workers_killed_at_once_come_back() -> None:
    """Also while one of them is being replaced."""
    with workers(one_way()) as stepper:
        factory.play(stepper, [0])
        for device in (0, 1):
            kill(stepper, device)
        results, told = factory.play(stepper, list(range(6)))
        restarts = {name: status.restarts for name, status in stepper.use().devices.items()}

    assert factory.are_right(results)
    assert {"d0", "d1"} == {loss.device for loss in told.lost}
    assert restarts == {"d0": 1, "d1": 1}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_worker_is_blamed_and_not_the_one_that_waits(victim: int) -> None:
    """Silence is proof; the other answers where it is, and stays."""
    with workers(one_way(1), timeout_s=1.0) as stepper:
        factory.play(stepper, [0, 1])
        other = pid_of(stepper, 1 - victim)
        kill(stepper, victim, signal.SIGSTOP)
        results, told = factory.play(stepper, list(range(4)))
        assert pid_of(stepper, 1 - victim) == other

    assert factory.are_right(results)
    assert [(f"d{victim}", True)] == [(loss.device, loss.is_certain) for loss in told.lost]
    assert "no answer within 1 s" in told.lost[0].message


def test_orders_to_a_stopped_worker_keep_nobody_waiting() -> None:
    """A full pipe is written by a thread."""
    with workers(one_way(), timeout_s=None) as stepper:
        kill(stepper, 0, signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(200):
            assert stepper.hub.order(0, StoreGet("x" * 10_000))
        assert time.monotonic() - start < 2.0
        kill(stepper, 0)
        assert isinstance(stepper.take(30.0), DeviceLost)
        until_back(stepper)
        results, _ = factory.play(stepper, [0])
    assert factory.are_right(results)


def test_a_worker_that_never_gets_ready_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped while it starts is found by the clock."""
    monkeypatch.setattr(hubs, "START_TIMEOUT_S", 3.0)
    plan = one_way()

    def make(setups: Sequence[Setup]) -> Killing:
        found = Killing(setups, plan, {(1, 0): 0.0})
        found.deed = signal.SIGSTOP
        return found

    with WorkerStepper([plan], made.workloads()[0].weights(), hub=make) as stepper:
        results, _ = factory.play(stepper, [0])
        assert stepper.use().devices["d1"].restarts == 1
    assert factory.are_right(results)


def test_an_error_in_a_worker_is_told_and_the_worker_replaced() -> None:
    """With its own words."""
    with workers(one_way()) as stepper:
        stepper.hub.order(1, Clear(0, 99))
        told = [stepper.take(30.0), *until_back(stepper)]
        results, _ = factory.play(stepper, [0])

    assert isinstance(told[0], DeviceLost)
    assert "IndexError" in told[0].message
    assert [DeviceBack("d1")] == [event for event in told if isinstance(event, DeviceBack)]
    assert factory.are_right(results)


def test_pauses_grow_from_the_third_failure_in_a_row_on() -> None:
    """None, none, then ten seconds, doubling up to five minutes."""
    assert [pause_s(n) for n in range(1, 10)] == [0.0, 0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert pause_s(10_000) == 300.0


def test_a_device_that_fails_again_and_again_is_tried_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures in a row are counted, told with the pause, and forgotten after a finished step."""
    monkeypatch.setattr(hubs, "FIRST_PAUSE_S", 0.3)
    with workers(one_way()) as stepper:
        losses: list[DeviceLost] = []
        for _ in range(4):
            kill(stepper, 1)
            losses += [event for event in until_lost(stepper) if isinstance(event, DeviceLost)]
            until_back(stepper)
        factory.play(stepper, [0])
        kill(stepper, 1)
        losses += [event for event in until_lost(stepper) if isinstance(event, DeviceLost)]

    assert [(loss.failures, loss.retry_s) for loss in losses] == [
        (1, 0.0),
        (2, 0.0),
        (3, 0.3),
        (4, 0.6),
        (1, 0.0),
    ]


def until_lost(stepper: WorkerStepper) -> list[object]:
    """What is told up to the next loss."""
    told: list[object] = []
    while not told or not isinstance(told[-1], DeviceLost):
        told.append(stepper.take(30.0))
        assert told[-1] is not None
    return told


def test_a_device_is_given_up_where_that_is_wanted() -> None:
    """After so many failures in a row nothing is started any more, and the others go on."""
    with workers(two_ways(0), max_failures=2) as stepper:
        kill(stepper, 1)
        (first,) = until_lost(stepper)
        until_back(stepper)
        kill(stepper, 1)
        (second,) = until_lost(stepper)
        results, told = factory.play(stepper, list(range(4)))
        states = {name: status.state for name, status in stepper.use().devices.items()}

    assert isinstance(first, DeviceLost)
    assert isinstance(second, DeviceLost)
    assert (first.retry_s, second.retry_s, second.failures) == (0.0, None, 2)
    assert factory.are_right(results)
    assert not told.back
    assert {result.lane for result in results.values()} == {1}
    assert states == {"d0": "ready", "d1": "lost", "d2": "ready", "d3": "ready"}


def test_workers_that_hold_each_other_are_started_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With some transports the loss of one worker takes all down; only the one that failed is counted."""
    monkeypatch.setattr(hubs, "RESTART_TOGETHER", frozenset({"shm"}))
    with workers(two_ways(0)) as stepper:
        factory.play(stepper, [0])
        kill(stepper, 2)
        results, told = factory.play(stepper, list(range(4)))
        until_back(stepper)
        restarts = {status.restarts for status in stepper.use().devices.values()}

    assert factory.are_right(results)
    assert [(loss.device, loss.failures) for loss in told.lost] == [
        ("d2", 1),
        ("d0", 0),
        ("d1", 0),
        ("d3", 0),
    ]
    assert restarts == {1}


def test_a_worker_that_cannot_start_says_why() -> None:
    """One message, with the device; no second try, since it would say the same."""
    plan = one_way()
    stepper = workers(plan)
    stepper.hub.setups[1] = replace(stepper.hub.setups[1], transport="ipc")
    with pytest.raises(WorkerError, match="device d1: could not start: a CPU worker cannot use ipc"), stepper:
        pass


class Unsent:
    """A value that no process can be sent."""

    def __reduce__(self) -> str:
        raise RuntimeError("changed size")


def test_a_setup_that_cannot_be_sent_is_told_at_once() -> None:
    """Not after the time that a worker has to get ready."""
    stepper = workers(one_way())
    stepper.hub.setups[1] = replace(stepper.hub.setups[1], transport=Unsent())  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"device d1: .*RuntimeError: changed size"), stepper:
        pass
    assert time.monotonic() - begun < hubs.START_TIMEOUT_S / 3


def test_parts_of_one_card_share_its_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card has few for processes under CUDA MPS."""
    hub, queues = workers(one_way()).hub, list[int]()
    monkeypatch.setattr(hubs, "LocalProcess", lambda main, own, *more: queues.append(own[1]))
    for num in (1, 2, 4, 100):
        parts = tuple(Device(f"cuda:0/sm={n}", DeviceKind.CUDA, "a100", 1 << 34) for n in range(num))
        hub.names = [part.name for part in parts]
        hub._launch(0, replace(hub.setups[0], cluster=Cluster(parts, ())))

    assert [32, 32, 16, 1] == queues


class Unread:
    """A value that no process can read."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return torch.device, ("nowhere",)


def test_a_setup_that_a_worker_cannot_read_is_told() -> None:
    """As where a card takes no other process."""
    stepper = workers(one_way())
    stepper.hub.setups[1] = replace(stepper.hub.setups[1], transport=Unread())  # type: ignore[arg-type]
    words = r"device d1: its setup could not be read: .*nowhere"
    with pytest.raises(WorkerError, match=words), stepper:
        pass


def test_workers_that_always_die_at_the_start_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three times."""
    plan = one_way()
    deeds = {(1, epoch): 0.0 for epoch in range(3)}
    stepper = WorkerStepper(
        [plan], made.workloads()[0].weights(), hub=lambda setups: Killing(setups, plan, deeds)
    )
    with (
        pytest.raises(WorkerError, match=r"device d1: the worker ended while it started \(exit code -9\)"),
        stepper,
    ):
        pass
    assert not deeds


def getfd(pid: int, fd: int) -> socket.socket | None:
    """Another process's socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        got = libc.syscall(438, pidfd, fd, 0)  # pidfd_getfd
    finally:
        os.close(pidfd)
    if got < 0:
        pytest.skip(f"this system does not hand out sockets: {os.strerror(ctypes.get_errno())}")
    return socket.socket(fileno=got)


def cut_links(pid: int) -> int:
    """Closes the links into a worker under it; how many there were."""
    num = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if not os.readlink(entry).startswith("socket:"):
            continue
        found = getfd(pid, int(entry.name))
        assert found is not None
        with found:
            try:
                found.getpeername()
            except OSError:
                continue  # one that listens
            name = found.getsockname()
            if "link-" in str(name):
                found.shutdown(socket.SHUT_RDWR)
                num += 1
    return num


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("transport", ["shm", "host"])
def test_a_cut_link_is_told_as_what_it_is(transport: str) -> None:
    """Both workers answer and stay; the link is opened again, and the retry is not counted."""
    with workers(one_way(), transport=transport, timeout_s=2.0) as stepper:
        factory.play(stepper, [0])
        pids = [pid_of(stepper, device) for device in (0, 1)]
        num_cut = 0

        def strike(num_done: int) -> None:
            nonlocal num_cut
            if num_done in (3, 11):
                num_cut += cut_links(pids[1])

        results, told = factory.play(stepper, list(range(8)), between=strike)
        again, _ = factory.play(stepper, list(range(8)))
        assert pids == [pid_of(stepper, device) for device in (0, 1)]

    assert factory.are_right(results)
    assert factory.are_right(again)
    assert num_cut >= 2
    for loss in told.lost:
        assert "the link between" in loss.message
        assert "was cut" in loss.message
        assert (loss.failures, loss.retry_s, loss.is_certain) == (0, 0.0, False)
    assert len(told.lost) == len(told.back)


def program_of(*columns: Sequence[object], transfers: Sequence[tuple[int, int]]) -> Program:
    """Instructions a device, and the ends of transfers."""
    moved = tuple(Transfer(i, i, 0, 4, src, dst) for i, (src, dst) in enumerate(transfers))
    none: tuple[tuple[int, ...], ...] = tuple(() for _ in columns)
    return Program(0, 0, 1, tuple(tuple(c) for c in columns), moved, none, (), ())  # type: ignore[arg-type]


def test_blame_follows_who_waits_for_whom() -> None:
    """From the lowest number to the one without an excuse; a link where both ends have one."""
    program = program_of(
        [Recv(1), Run(2)],
        [Run(0), Send(0), Recv(2), Run(3)],
        [Recv(0), Run(1), Send(1), Send(2)],
        transfers=[(1, 2), (2, 0), (2, 1)],
    )
    everybody = {0, 1, 2}
    # 2 computes, the others wait for it.
    assert judge(program, 7, everybody, {0: {7: -1}, 1: {7: 1}, 2: {7: 0}}) == Verdict(2)
    # 2 has not come to this run: it is at another.
    assert judge(program, 7, everybody, {0: {7: -1}, 1: {7: 1}, 2: {6: 3}}) == Verdict(2)
    # 1 has sent what 2 waits for.
    assert judge(program, 7, everybody, {0: {7: -1}, 1: {7: 1}, 2: {7: -1}}) == Verdict(2, 1)
    # 2 has done everything, and 0 has not got its share.
    assert judge(program, 7, {0}, {0: {7: -1}}) == Verdict(0, 2)
    # 1 has not begun.
    assert judge(program, 7, everybody, {0: {7: -1}, 1: {7: -1}, 2: {7: -1}}) == Verdict(1)
    # A circle, which no program has: a guess.
    wrong = program_of([Recv(0), Send(1)], [Recv(1), Send(0)], transfers=[(1, 0), (0, 1)])
    assert judge(wrong, 1, {0, 1}, {0: {1: -1}, 1: {1: -1}}) == Verdict(0, is_certain=False)


def test_a_worker_says_where_it_is_while_it_computes() -> None:
    """`Where` is answered by another thread than the one that runs launches."""
    with workers(one_way()) as stepper:
        request = made.make_requests(1)[0]
        kill(stepper, 1, signal.SIGSTOP)
        stepper.open(0, 0, request.state())
        stepper.start(StepCall(0, 0, request.inputs(0, 0, {})))
        time.sleep(0.5)
        stepper.hub.order(0, Where())
        news = stepper.hub.take(5.0)
        kill(stepper, 1, signal.SIGCONT)
        done = stepper.take(30.0)

    assert news is not None
    assert news[0] == 0
    assert [(0, 1)] == [row[:2] for row in news[1].rows]
    assert isinstance(done, StepDone)


SCRIPT = """
import sys, random
sys.path.insert(0, {tests!r})
import engine_factory as made
from tessera.execute.worker_stepper import Verdict, WorkerStepper, judge
if __name__ == "__main__":
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    with WorkerStepper([plan], made.workloads()[0].weights()) as stepper:
        print(stepper.hub._folder, *(s.pid for s in stepper.use().devices.values()), flush=True)
        sys.stdin.read()
"""


def test_a_killed_engine_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its workers leave, and remove what they shared."""
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[2])))
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        folder, *pids = engine.stdout.readline().split()
        assert Path(folder).is_dir()
        engine.kill()
    end = time.monotonic() + 30.0
    while Path(folder).exists() or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, (folder, pids)
        time.sleep(0.05)


def test_a_stop_does_not_wait_for_a_worker_that_starts() -> None:
    """Nobody has heard of it yet, so nobody can tell it to leave."""
    with workers(one_way()) as stepper:
        kill(stepper, 1)
        lost = stepper.take(60.0)
        time.sleep(0.2)
        begun = time.monotonic()
    assert isinstance(lost, DeviceLost)
    assert time.monotonic() - begun < hubs.STOP_TIMEOUT_S / 2


def test_a_worker_that_sends_too_much_is_not_heard(tmp_path: Path) -> None:
    """A message is no longer than what the steps can hand over."""
    engine, worker, heard = Mailbox(), Mailbox(), []
    hear = lambda connection, message, contents: heard.append(message)  # noqa: E731
    limit = len(encode(StoreGet("x" * 100)))
    address = engine.listen(f"ipc://{tmp_path}/e", hear, max_bytes=lambda connection: limit)
    connection = worker.connect(address, lambda *news: None)
    for size in (100, 101, 1):
        connection.send(StoreGet("x" * size))
    end = time.monotonic() + 10.0
    while len(heard) < 2 and time.monotonic() < end:
        engine.pump(0.1)
    engine.pump(0.1)
    worker.close()
    engine.close()
    assert heard == [StoreGet("x" * 100), Hangup(TOO_LONG)]
