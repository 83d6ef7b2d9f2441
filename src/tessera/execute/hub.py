"""LocalHub: one worker process a device, on this machine; see `hub_base` for what every hub does."""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.multiprocessing  # teaches pickle to pass tensors through shared memory

from tessera.execute import worker
from tessera.execute.handing import hand_over
from tessera.execute.hub_base import (
    FIRST_PAUSE_S,
    QUICK_FAILURES,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Hub,
    Line,
    Lost,
    Up,
    pause_s,
)
from tessera.execute.kernel_launch import handed_in
from tessera.execute.transport import HOST

__all__ = [
    "FIRST_PAUSE_S",
    "FORKSERVER",
    "LOOPBACK",
    "QUICK_FAILURES",
    "START_TIMEOUT_S",
    "STOP_TIMEOUT_S",
    "Hub",
    "Line",
    "LocalHub",
    "Lost",
    "Up",
    "hidden_main",
    "pause_s",
    "warm_up",
]

LOOPBACK = "127.0.0.1"
FORKSERVER = "forkserver"
# What a worker imports: done once, by the process that workers are forked from.
PRELOADED = ["tessera.execute.worker"]


def warm_up() -> None:
    """Starts the process that workers are forked from, if there is none; it imports what they need."""
    interpret = handed_in()
    also = [interpret.__module__] if interpret is not None else []
    multiprocessing.get_context(FORKSERVER).set_forkserver_preload([*PRELOADED, *also])
    forkserver.ensure_running()


_hiding = threading.Lock()
# The program itself first; one entry for everybody who hides it.
_hidden: list[types.ModuleType] = []


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keeps workers from importing the program that starts them: it takes time, and may run it again."""
    with _hiding:
        _hidden.append(sys.modules["__main__"])
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        with _hiding:
            last = _hidden.pop()
            if not _hidden:
                sys.modules["__main__"] = last


@dataclass
class _Process:
    """A worker process of this machine."""

    process: BaseProcess
    pipe: Connection
    pid: int | None

    def end(self, timeout_s: float) -> str:
        """One that does not leave is killed."""
        self.process.join(timeout_s)
        if not self.process.is_alive():
            return f"exit code {self.process.exitcode}"
        self.process.kill()
        self.process.join(STOP_TIMEOUT_S)
        return "killed by the engine"


def _hand_over(pipe: Connection, setup: worker.Setup) -> None:
    """In a thread of its own: a worker that is stopped does not read."""
    with pipe, contextlib.suppress(OSError):  # one that is gone is heard of as a hang-up
        hand_over(pipe, setup)


class LocalHub(Hub):
    """One worker process a device, on this machine.

    method  how processes are started: by themselves (spawn), or from one process that imports torch for all
            of them (forkserver); that one stays until the program ends, so it is for programs that are
            Tessera's own
    """

    def __init__(
        self,
        names: Sequence[str],
        setups: Sequence[worker.Setup],
        method: str = "spawn",
        *,
        max_failures: int | None = None,
    ) -> None:
        super().__init__(names, setups, max_failures=max_failures)
        self._method = method
        self._folder = ""
        self._lock = -1

    def start(self) -> None:
        """Makes what the workers share."""
        home = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folder = tempfile.mkdtemp(prefix=f"tessera-{os.getpid()}-", dir=home)
        self._lock = os.open(os.path.join(self._folder, worker.LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for device, setup in enumerate(self.setups):
            progress = torch.full((setup.microbatches, 2), -1, dtype=torch.int64).share_memory_()
            host = setup.host or (LOOPBACK if setup.transport == HOST else "")
            self.setups[device] = replace(setup, folder=self._folder, host=host, progress=progress)
        if self._method == FORKSERVER:
            warm_up()
        super().start()

    def progress(self, device: int) -> dict[int, tuple[int, int]]:
        """Read from memory that the worker writes."""
        shared = self.setups[device].progress
        if shared is None:
            return {}
        return {m: (run, position) for m, (run, position) in enumerate(shared.tolist()) if run >= 0}

    def _setup(self, device: int) -> worker.Setup:
        shared = self.setups[device].progress
        assert shared is not None, "made by `start`"
        shared.fill_(-1)
        return super()._setup(device)

    def _open(self, device: int, setup: worker.Setup, is_over: Callable[[], bool]) -> Line:
        context = multiprocessing.get_context(self._method)
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(  # type: ignore[attr-defined]
            target=worker.main,
            args=(theirs, self._folder),
            name=f"tessera-{self.names[device]}",
            daemon=True,
        )
        # Its end is closed here, so that the connection is when the worker that holds it is gone.
        with theirs, hidden_main():
            process.start()
        own = Connection(os.dup(ours.fileno()))
        threading.Thread(target=_hand_over, args=(own, setup), daemon=True).start()
        return _Process(process, ours, process.pid)

    def _close(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = ""
