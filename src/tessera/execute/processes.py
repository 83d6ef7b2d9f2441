"""Worker processes of this machine: how they are started and inherit their setup. Imports no torch.

Workers are forked from a server process that has imported torch (`warm_up`). `hand_over` passes a setup with
tensors over an inherited socket, as torch's reductions; the child opens their memory in `/proc`.
`Process.start` would hang if the child dies meanwhile, and a fork server takes at most 256 tensors. The
socket stays open: its end tells each side that the other is gone. Pickle is used only between a process and
its child.
"""

import multiprocessing
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context, forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tessera.errors import TesseraError

FORKSERVER = "forkserver"
PRELOADED = ["tessera.execute.worker"]
# zmq ends a process that has none left.
LEAST_FILES, MAX_FILES = 256, 1 << 16
KILL_S = 5.0

_hiding = threading.Lock()


def raise_file_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if limit < LEAST_FILES:
        raise TesseraError(f"this shell allows {limit} open files only", f"Use ulimit -n {LEAST_FILES}.")
    if soft < limit:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return limit
    return soft


def warm_up(preloaded: list[str] = PRELOADED) -> None:
    raise_file_limit()
    multiprocessing.get_context(FORKSERVER).set_forkserver_preload(preloaded)
    forkserver.ensure_running()


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keeps a process that is started meanwhile from importing the program that starts it."""
    with _hiding:
        program, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = program


class LocalProcess:
    def __init__(
        self, target: Callable[..., None], arguments: tuple[Any, ...], name: str, method: str
    ) -> None:
        start_method = multiprocessing.get_context(method)
        self.pipe, child_pipe = start_method.Pipe(duplex=True)
        self._process: BaseProcess = start_method.Process(  # type: ignore[attr-defined]
            target=target, args=(child_pipe, *arguments), name=name, daemon=True
        )
        # The child's death closes the socket.
        with child_pipe, hidden_main():
            self._process.start()
        self.pid = self._process.pid
        # Sees the child itself if the server process, which reports the end of its children, is dead.
        self._pid_fd: int | None = None
        with suppress(OSError):  # gone already
            self._pid_fd = os.pidfd_open(self.pid or 0)

    def run(self, value: Any) -> str:
        """Returns when the child is gone, with what it said last."""
        with suppress(OSError, EOFError), self.pipe:
            hand_over(self.pipe, value)
            return self.pipe.recv_bytes().decode()
        return ""

    def end(self, timeout_s: float) -> str:
        """Kills the child after the time; returns how it ended."""
        fd, self._pid_fd = self._pid_fd, None
        is_killed = fd is not None and not wait([fd], timeout_s)
        if fd is not None:
            if is_killed:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                wait([fd], KILL_S)
            os.close(fd)
        self._process.join(KILL_S)
        return "killed by the engine" if is_killed else f"exit code {self._process.exitcode}"


class _Handed:
    """A descriptor of the process that pickled it, which stays open there."""

    def __init__(self, fd: int) -> None:
        self._path = f"/proc/{os.getpid()}/fd/{fd}"

    def detach(self) -> int:
        return os.open(self._path, os.O_RDWR)


# The interface by which multiprocessing passes descriptors to a child.
DESCRIPTORS = types.SimpleNamespace(DupFd=_Handed, duplicate_for_child=lambda fd: fd)


def hand_over(pipe: Connection, value: Any) -> None:
    """Raises OSError if the other process is gone."""
    context.set_spawning_popen(DESCRIPTORS)  # type: ignore[arg-type]
    try:
        data = ForkingPickler.dumps(value)
    finally:
        context.set_spawning_popen(None)
    pipe.send_bytes(data)
