"""A service over workers that call from elsewhere: lost ones are replaced or planned around, all answered."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import steps_factory
from serving_factory import GREEDY, Told, read, read_all, wait_for
from tessera.errors import CaptureError, MismatchError, WorkerError
from tessera.execute.gate import Gate
from tessera.execute.handshake import Call
from tessera.execute.remote import OwnProcess, RemoteHub, start_here
from tessera.ir import Step
from tessera.serve.gathering import BORN, Gathering
from tessera.serve.joining import ModelHere, keep_working
from tessera.serve.local import Local
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.text import ByteText
from tessera.serve.undivided import UndividedStepper

SECRET = b"a secret of more than sixteen bytes"
LIMIT_S = 120.0


def some_asks(num: int, seed: int) -> list[Ask]:
    """Greedy, of many lengths, past the model's own end."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, steps_factory.CAPACITY // 2) for _ in range(num)]
    return [
        Ask(tuple(rng.randrange(256) for _ in range(n)), rng.randrange(8, 17), GREEDY, ignores_end=True)
        for n in lengths
    ]


@dataclass
class Host:
    """Another machine: a `tessera worker` in a session of its own."""

    process: "subprocess.Popen[str]"

    def workers(self) -> list[int]:
        """Processes that compute: those that the process which forks them has."""
        forking = _children(self.process.pid)
        return [pid for parent in forking for pid in _children(parent)]

    def vanish(self) -> None:
        """As by a loss of power."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@dataclass
class Away:
    """A service and the machine that one of its workers is on."""

    service: Service
    local: Local
    host: Host

    def answers(self, asks: Sequence[Ask], kills: str = "") -> list[Told]:
        """Answers to all; meanwhile workers are killed: `t` there, `h` here."""
        return wait_for(self._answers(asks, kills), LIMIT_S)

    async def _answers(self, asks: Sequence[Ask], kills: str) -> list[Told]:
        rng = random.Random(len(kills))
        reading = [asyncio.ensure_future(read(self.service, ask)) for ask in asks]
        for where in kills:
            await asyncio.sleep(rng.random() * 0.2)
            while not (found := self._workers(where)) and not all(r.done() for r in reading):
                await asyncio.sleep(0.05)
            for pid in found:
                with suppress(ProcessLookupError):  # it ended by itself, since its engine hung up
                    os.kill(pid, signal.SIGKILL)
        return list(await asyncio.gather(*reading))

    def _workers(self, where: str) -> list[int]:
        if where == "t":
            return self.host.workers()
        hub = self.local.stepper._hub
        assert isinstance(hub, RemoteHub)
        own = [started.process for started in hub._started.values() if isinstance(started, OwnProcess)]
        return [process.pid for process in own if process.is_alive() and process.pid is not None]


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Away]:
    """Device 0 is here, device 1 is where `tessera worker` runs."""
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists():
        pytest.skip("this system does not list the children of a process")
    secret = tmp_path_factory.mktemp("away") / "secret"
    secret.write_bytes(SECRET)
    gate = Gate("127.0.0.1", 0, SECRET)
    words = ["worker", "--rendezvous", f"127.0.0.1:{gate.address[1]}", "--secret-file", str(secret)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "tessera", *words], env=environment, start_new_session=True, text=True
    )
    made = steps_factory.over_both()
    here = {made.cluster.names[0]: start_here(Call(gate.address, SECRET, BORN))}
    gathering = Gathering(gate, made.cluster.names, here, replace_s=30.0)
    try:
        with pytest.MonkeyPatch.context() as patch, Local(made, gathering=gathering) as local:
            patch.setattr("tessera.serve.local.MAX_LOSSES", 100)  # none is given up here for being killed
            service = Service(local.stepper, ByteText(), plans=made.plans, replace=local.replace)
            with service:
                yield Away(service, local, Host(worker))
    finally:
        gathering.close()
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


@pytest.fixture(scope="module")
def expected() -> dict[Ask, list[int]]:
    """What the undivided model answers."""
    asks = [*some_asks(24, 0), *some_asks(6, 1)]
    with (
        UndividedStepper(steps_factory.prepared().model, 1) as stepper,
        Service(stepper, ByteText()) as service,
    ):
        told = wait_for(read_all(service, asks), LIMIT_S)
    return {ask: one.numbers for ask, one in zip(asks, told, strict=True)}


def test_a_killed_worker_is_replaced_and_no_request_is_lost(
    away: Away, expected: dict[Ask, list[int]]
) -> None:
    """Under load, its machine calls again: every request is answered as if nothing had happened."""
    asks = some_asks(24, 0)
    told = away.answers(asks, kills="t")

    assert [expected[ask] for ask in asks] == [one.numbers for one in told]
    assert {"length"} == {one.finish.reason for one in told}
    assert away.service.snapshot().retried > 0
    assert 2 == len(away.local.prepared.cluster.devices)


def test_whenever_workers_are_killed_every_request_has_one_end(
    away: Away, expected: dict[Ask, list[int]]
) -> None:
    """Here and there, again and again: an answer is whole and right, or says which device was lost."""
    asks = some_asks(24, 0)
    told = away.answers(asks, kills="tht")

    assert len(asks) == len(told)
    for ask, one in zip(asks, told, strict=True):
        if one.finish.reason == "error":
            assert "lost again" in one.finish.message
            assert "emu:" in one.finish.message
            assert expected[ask][: len(one.numbers)] == one.numbers
        else:
            assert expected[ask] == one.numbers


def test_a_machine_that_does_not_come_back_is_planned_around(
    away: Away, expected: dict[Ask, list[int]]
) -> None:
    """The service goes on with the devices that are left, and says the same."""
    assert away.local._gathering is not None
    away.answers(some_asks(1, 2))  # workers killed above are replaced, with the patience of before
    away.local._gathering.replace_s = 3.0
    away.host.vanish()
    asks = some_asks(6, 1)
    told = away.answers(asks)

    assert [expected[ask] for ask in asks] == [one.numbers for one in told]
    assert ("emu:a100",) == away.local.prepared.cluster.names


def test_a_model_that_is_code_is_not_built() -> None:
    """The engine of another machine chooses no code on this one; a folder that is missing is named."""
    with pytest.raises(CaptureError, match="code to import"):
        ModelHere()(Step("os:getcwd", "decode", 1, 8))
    with pytest.raises(CaptureError, match=r"no folder /nowhere/model on this machine.*--model"):
        ModelHere()(Step("/nowhere/model", "decode", 1, 8))


def test_a_worker_that_is_refused_ends_with_the_reason(away: Away) -> None:
    """It does not call again and again; and the service does not notice."""
    (hub,) = away.local._gathering._hubs  # type: ignore[union-attr]
    with pytest.raises(MismatchError, match=r"another secret. Use one --secret-file"):
        keep_working(Call(hub.gate.address, b"not the secret of this gate"), 1)
    told = away.answers(some_asks(2, 2))

    assert {"length"} == {one.finish.reason for one in told}


def test_a_worker_that_nobody_answers_says_so() -> None:
    """After its patience, in one line."""
    gate = Gate("127.0.0.1", 0, SECRET)
    gate.close()
    with pytest.raises(WorkerError, match="no engine answers"):
        keep_working(Call(gate.address, SECRET), 1, patience_s=0.0)
