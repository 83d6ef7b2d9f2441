"""Children of this machine: a hung one is killed, also when the process that forked it is dead."""

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe, forkserver
from multiprocessing.reduction import ForkingPickler
from operator import methodcaller
from types import ModuleType
from typing import Any

import pytest

import engine_factory
from tessera.errors import TesseraError
from tessera.execute.processes import FORKSERVER, LocalProcess, hand_over, raise_file_limit, warm_up
from tessera.ir import View

# Body of a child, which imports nothing for it.
sleep = methodcaller("recv_bytes")


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fork server that imports nothing: the one of other tests, which has torch, lives on."""
    made: Any = forkserver.ForkServer()
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(made, name))
    warm_up([])
    yield made
    made._stop()


def is_gone(pid: int) -> bool:
    """True if there is no such process, or it waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("is_orphan", [False, True])
def test_a_hung_child_is_killed(is_orphan: bool, server: Any) -> None:
    child = LocalProcess(sleep, (), "tessera-test", FORKSERVER)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    if is_orphan:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        time.sleep(0.2)

    assert "killed by the engine" == child.end(0.2)
    assert is_gone(child.pid)


def test_a_child_that_leaves_is_not_killed() -> None:
    child = LocalProcess(sleep, (), "tessera-test", FORKSERVER)
    child.pipe.send_bytes(b"leave")

    assert "exit code 0" == child.end(20.0)


def test_a_shell_with_too_few_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a library ends the process, which leaves its files behind."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (40, 40))

    with pytest.raises(TesseraError, match=r"allows 40 open files only. Use ulimit -n 256"):
        raise_file_limit()


def test_a_trace_is_pickled_while_another_thread_computes_with_it() -> None:
    """As workers are started while the hub asks for the size of their messages."""

    class Asks:
        def __reduce__(self) -> tuple[type, tuple[int]]:
            assert trace.handed_over_bytes > 0
            return int, (7,)

    trace = replace(engine_factory.unit().graphs[0].trace, num_views=Asks())  # type: ignore[arg-type]

    assert 7 == ForkingPickler.loads(bytes(ForkingPickler.dumps(trace))).num_views


def test_a_setup_is_handed_over_beside_modules_that_import_others_when_they_are_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As some of transformers do, which were imported before Tessera."""

    def importing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named 'torchvision', for {name}")

    module = ModuleType("lazy")
    module.__getattr__ = importing  # type: ignore[method-assign]
    later = {name: sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] == "msgspec"}
    for name in later:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lazy", module)
    for name, one in later.items():
        monkeypatch.setitem(sys.modules, name, one)
    ours, theirs = Pipe()
    with ours, theirs:
        hand_over(ours, View(0, "float32", (2,), (1,)))

        assert View(0, "float32", (2,), (1,)) == pickle.loads(theirs.recv_bytes())
