"""Workers of several machines: the engine has a gate, each worker calls there and says who it is.

The call is authenticated both ways by a shared secret (see `handshake`) before anything else of it is
looked at; after that only `messages` travel, which are JSON and bytes. Without a secret, only the loopback
address is served. A worker either has the plan files itself, and is sent away if they are not the engine's;
or it has none and is sent its briefing (see `briefing`). It makes its own weights. Transfers go over gloo
between the workers.

A worker elsewhere cannot be looked into: of a lost one the request is known that it had, not the
instruction. Clocks of machines are compared once, when a worker is ready, to the time that one message
takes.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from tessera.errors import WorkerError
from tessera.execute import messages, worker
from tessera.execute.briefing import briefing_of, pack_briefing
from tessera.execute.calling import serve_and_exit
from tessera.execute.gate import Caller, Gate
from tessera.execute.handshake import Call, hang_up
from tessera.execute.hub import START_TIMEOUT_S, STOP_TIMEOUT_S, Reception, warm_up
from tessera.execute.inbox import NOBODY, Inbox, Wake
from tessera.execute.messages import Message, Welcome
from tessera.execute.muster import Muster

# How long the engine looks for a starter's bad news between two callers.
LOOK_S = 0.5


class Started(Protocol):
    """A worker process that the hub had started, wherever it is."""

    def died(self) -> str:
        """How it ended; empty while it lives."""

    def stop(self, timeout_s: float) -> None:
        """Returns when it is gone."""


# (rank, setup, number of devices): starts a worker that then calls the gate. One of this machine can be
# handed its setup; one elsewhere is briefed.
Starter = Callable[[int, worker.Setup, int], Started]


@dataclass
class OwnProcess:
    """A worker process of this machine."""

    process: BaseProcess

    def died(self) -> str:
        """By its exit code."""
        return "" if self.process.is_alive() else f"exit code {self.process.exitcode}"

    def stop(self, timeout_s: float) -> None:
        """It leaves when the engine hangs up; one that does not is killed."""
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve_here(setup: worker.Setup, world: int, call: Call, rank: int) -> None:
    """The process of such a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the engine acts on it
    serve_and_exit(setup, world, call, rank)


def start_here(call: Call) -> Starter:
    """Starts workers as processes of this machine, which are handed their setup."""

    def start(rank: int, setup: worker.Setup, world: int) -> OwnProcess:
        warm_up()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_serve_here, args=(setup, world, call, rank), daemon=True)
        process.start()
        return OwnProcess(process)

    return start


@dataclass
class RemoteHub:
    """The engine's side: some workers are started from here, the others call from wherever they are."""

    names: Sequence[str]
    setups: Sequence[worker.Setup]
    gate: Gate
    # Of the plans; what a worker that has plans must say.
    digest: str
    # Device -> how its worker is started; those without one start by themselves.
    starters: Mapping[int, Starter]
    # Device -> the rank under which its worker calls, where that is not the device's own number.
    ranks: Sequence[int] = ()
    # True: the gate outlasts this hub, and callers that are not needed now wait for the next.
    keeps_gate: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    # After a start that failed: devices whose worker did not call in time.
    absent: tuple[str, ...] = ()
    _pipes: dict[int, Connection] = field(default_factory=dict)
    _started: dict[int, Started] = field(default_factory=dict)
    _inbox: Inbox = field(default_factory=Inbox)
    _offsets: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Waits until all have called and are ready."""
        for device, starter in self.starters.items():
            self._started[device] = starter(self._ranks()[device], self.setups[device], len(self.names))
        callers = self._muster()
        self._pipes = {device: caller.pipe for device, caller in callers.items()}
        for device, caller in callers.items():
            if not caller.hello.digest:
                briefing = briefing_of(self.setups[device], len(self.names))
                messages.post(caller.pipe, Welcome(pack_briefing(briefing)))
        self._inbox.listen(self._pipes, messages.decode)
        reception = Reception(self.names, self.order)
        reception.run(self._inbox)
        self._offsets = reception.offsets

    def order(self, device: int, message: Message) -> bool:
        """Sends to a worker; False if it is gone."""
        return messages.post(self._pipes[device], message)

    def take(self, timeout_s: float | None) -> tuple[int, Any] | None:
        """The next message of any worker."""
        return self._inbox.take(True, timeout_s)

    def wake(self) -> None:
        """Makes `take` return."""
        self._inbox.post(NOBODY, Wake())

    def progress(self, device: int, slot: int) -> tuple[int, int] | None:
        """Not known: no memory is shared."""
        return None

    def end(self, device: int) -> str:
        """Hangs up; a worker that still lives leaves when it notices."""
        return "its connection was closed" if hang_up(self._pipes[device]) else "its connection is closed"

    def clock_offset_s(self, device: int) -> float:
        """As found when the worker was ready."""
        return self._offsets[device]

    def stop(self) -> None:
        """Hangs up on all; workers that were started from here are ended if they do not leave."""
        for device in list(self._pipes):
            self.end(device)
        self._inbox.join(STOP_TIMEOUT_S)
        for pipe in self._pipes.values():
            pipe.close()
        for started in self._started.values():
            started.stop(STOP_TIMEOUT_S)
        self._pipes, self._started = {}, {}
        if not self.keeps_gate:
            self.gate.close()

    def _ranks(self) -> Sequence[int]:
        return self.ranks or range(len(self.names))

    def _muster(self) -> dict[int, Caller]:
        """A caller for every device; raises WorkerError after the time, or if one died before it called."""
        started = frozenset(self.starters)
        muster = Muster(self.gate, self.names, self._ranks(), self.digest, started, self.keeps_gate)
        deadline = time.monotonic() + self.start_timeout_s
        try:
            while (found := muster.complete()) is None:
                caller = self.gate.take(min(LOOK_S, max(0.0, deadline - time.monotonic())))
                if caller is not None:
                    muster.add(caller)
                    continue
                self._check_started(muster.missing())
                if time.monotonic() >= deadline:
                    raise self._nobody(muster.missing())
        finally:
            muster.disperse()
        return found

    def _check_started(self, missing: Sequence[int]) -> None:
        for device in missing:
            how = self._started[device].died() if device in self._started else ""
            if how:
                place = f"device {self.names[device]}"
                raise WorkerError(f"its worker ended before it called ({how})", place=place)

    def _nobody(self, missing: Sequence[int]) -> WorkerError:
        self.absent = tuple(self.names[d] for d in missing)
        last = f"; sent away: {self.gate.complaints[-1]}" if self.gate.complaints else ""
        what = f"nobody called within {self.start_timeout_s:.0f} s{last}"
        return WorkerError(what, "Start one process a device.", f"device {', '.join(self.absent)}")
