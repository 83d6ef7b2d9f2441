"""Children of this machine: a hung one is killed, also when the process that forked it is dead."""

import multiprocessing.forkserver
import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import pytest

import engine_factory
from tessera.execute.processes import FORKSERVER, LocalProcess, warm_up


def sleep(pipe: Connection) -> None:
    """Body of a child."""
    pipe.recv_bytes()


def is_gone(pid: int) -> bool:
    """True if there is no such process, or it waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("is_orphan", [False, True])
def test_a_hung_child_is_killed(is_orphan: bool) -> None:
    warm_up()
    child = LocalProcess(sleep, (), "tessera-test", FORKSERVER)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    if is_orphan:
        server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, signal.SIGKILL)
        time.sleep(0.2)

    assert "killed by the engine" == child.end(0.2)
    assert is_gone(child.pid)


def test_a_child_that_leaves_is_not_killed() -> None:
    child = LocalProcess(sleep, (), "tessera-test", FORKSERVER)
    child.pipe.send_bytes(b"leave")

    assert "exit code 0" == child.end(20.0)


def test_a_trace_is_pickled_while_another_thread_computes_with_it() -> None:
    """As workers are started while the hub asks for the size of their messages."""

    class Asks:
        def __reduce__(self) -> tuple[type, tuple[int]]:
            assert trace.handed_over_bytes > 0
            return int, (7,)

    trace = replace(engine_factory.unit().graphs[0].trace, num_views=Asks())  # type: ignore[arg-type]

    assert 7 == ForkingPickler.loads(bytes(ForkingPickler.dumps(trace))).num_views
