"""A service over workers that call: lost ones come back or are planned around, and all is answered."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import steps_factory
from commands import without_transformers
from own_code import reference
from serving_factory import GREEDY, Told, policies_of, read, read_all, wait_for
from tessera.errors import CaptureError, MismatchError, WorkerError
from tessera.execute import hub as hubs
from tessera.execute.engine_connection import EngineAddress
from tessera.execute.hub import Hub
from tessera.execute.rendezvous import Rendezvous
from tessera.execute.stepper import DeviceStatus
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Step
from tessera.serve.joining import LocalModel, keep_working
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.text import ByteText

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

    def vanish(self) -> None:
        """As by a loss of power."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Away:
    """A service and the machine that one of its workers is on."""

    service: Service
    stepper: WorkerStepper
    host: Host
    gate: Rendezvous

    def answers(self, asks: Sequence[Ask], kills: str = "") -> list[Told]:
        """Answers to all; meanwhile workers are killed: `t` there, `h` here."""
        return wait_for(self._answers(asks, kills), LIMIT_S)

    async def _answers(self, asks: Sequence[Ask], kills: str) -> list[Told]:
        rng = random.Random(len(kills))
        reading = [asyncio.ensure_future(read(self.service, ask)) for ask in asks]
        for where in kills:
            await asyncio.sleep(rng.random() * 0.2)
            while (pid := self.device(where).pid) is None and not all(r.done() for r in reading):
                await asyncio.sleep(0.05)
            with suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
        return list(await asyncio.gather(*reading))

    def device(self, where: str) -> DeviceStatus:
        """How the device there (`t`) or here (`h`) is."""
        return self.stepper.use().devices["emu:l40s" if where == "t" else "emu:a100"]


def start_worker(gate: Rendezvous, folder: Path) -> Host:
    """`tessera worker`, as from another machine, which cannot build the model and is sent its weights."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    words = ["worker", "--rendezvous", f"127.0.0.1:{gate.port}", "--secret-file", str(secret)]
    command = [sys.executable, "-m", "tessera", *words]
    bare = without_transformers(folder)
    return Host(subprocess.Popen(command, env=bare, start_new_session=True, text=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the secret."""
    return tmp_path_factory.mktemp("away")


@pytest.fixture(scope="module")
def away(folder: Path) -> Iterator[Away]:
    """Device 0 is here, device 1 is where `tessera worker` runs."""
    gate = Rendezvous("127.0.0.1", 0, SECRET)
    host = start_worker(gate, folder)
    made = steps_factory.over_both()
    names = ["emu:a100", "emu:l40s"]
    workers = made.workers(hub=lambda setups: Hub(names, setups, rendezvous=gate, local=frozenset({0})))
    given = (made.policies, made.model.shape, ByteText())
    try:
        with workers as stepper, Service(stepper, *given, planner=made.planner) as service:
            yield Away(service, stepper, host, gate)
    finally:
        gate.close()
        with suppress(ProcessLookupError):
            os.killpg(host.process.pid, signal.SIGKILL)
        host.process.wait()


@pytest.fixture(scope="module")
def expected() -> dict[Ask, list[int]]:
    """What the model itself answers."""
    asks = [*some_asks(24, 0), *some_asks(6, 1)]
    model = steps_factory.built(steps_factory.prepared())
    with (
        reference(model, 1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText()) as service,
    ):
        told = wait_for(read_all(service, asks), LIMIT_S)
    return {ask: one.numbers for ask, one in zip(asks, told, strict=True)}


def test_a_killed_worker_comes_back_and_no_request_is_lost(
    away: Away, expected: dict[Ask, list[int]]
) -> None:
    """Under load its machine calls again: all is answered as if nothing had happened; the other goes on."""
    asks, here = some_asks(24, 0), away.device("h")
    told = away.answers(asks, kills="t")

    assert [expected[ask] for ask in asks] == [one.numbers for one in told]
    assert {"length"} == {one.finish.reason for one in told}
    assert away.service.snapshot().retried > 0
    assert here == away.device("h")
    assert 1 == away.device("t").restarts


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


def test_a_machine_that_is_gone_is_planned_around_and_taken_in_again(
    away: Away, folder: Path, expected: dict[Ask, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service goes on with what is left, and says the same; a new machine takes the place."""
    away.answers(some_asks(1, 1))  # workers killed above are replaced, with the patience of before
    monkeypatch.setattr(hubs, "ABSENT_S", 0.5)
    away.host.vanish()
    asks = some_asks(6, 1)
    told = away.answers(asks)
    lost = away.device("t")
    away.host = start_worker(away.gate, folder)
    deadline = time.monotonic() + LIMIT_S
    while away.device("t").state != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = away.answers(asks)

    assert [expected[ask] for ask in asks] == [one.numbers for one in told] == [one.numbers for one in again]
    assert "ready" != lost.state


def test_a_model_that_is_code_is_not_built() -> None:
    """The engine of another machine chooses no code on this one; a folder that is missing is named."""
    with pytest.raises(CaptureError, match="code to import"):
        LocalModel()(Step("os:getcwd", "decode", 1, 8))
    with pytest.raises(CaptureError, match=r"no folder /nowhere/model on this machine"):
        LocalModel()(Step("/nowhere/model", "decode", 1, 8))


def test_a_worker_that_is_refused_ends_with_the_reason(away: Away) -> None:
    """It does not call again and again; and the service does not notice."""
    with pytest.raises(MismatchError, match=r"another secret.*Use one --secret-file"):
        keep_working(
            EngineAddress("127.0.0.1", away.gate.port, b"not the secret of this gate"), 1, LocalModel()
        )
    told = away.answers(some_asks(2, 1))

    assert {"length"} == {one.finish.reason for one in told}


def test_a_worker_that_nobody_answers_says_so() -> None:
    """After its patience, in one line."""
    gate = Rendezvous("127.0.0.1", 0, SECRET)
    gate.close()
    with pytest.raises(WorkerError, match="no engine answers"):
        keep_working(EngineAddress("127.0.0.1", gate.port, SECRET), 1, LocalModel(), patience_s=0.0)
