"""Stands in for a GPU where there is none: the workers' own code runs, on the CPU, one thing after the other.

Streams and events do nothing, a "graph" issues its share of the program again, and the pace kernel writes
records from the CPU's clock without waiting. Memory, flags and waits are real: a graph's wait holds up the
worker that issues it, and only that one, for each is a thread of the test's process. So what is tested is
memory, placement, transports, messages and bookkeeping; time and graphs only on a GPU.
"""

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tessera.execute import driver, hub, worker
from tessera.execute.cuda import device, measure, share
from tessera.execute.driver import MemOp
from tessera.execute.engine_connection import EngineConnection
from tessera.execute.messages import Setup
from tessera.execute.worker_stepper import WorkerStepper

CPU = torch.device("cpu")
# A wait that nobody answers for so long ends the test's worker.
WAIT_S = 3.0


class Stream:
    """Does nothing."""

    device_index = 0
    device = CPU
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None:
        """All work is done when it is issued."""

    def wait_event(self, event: Any) -> None:
        """Likewise."""

    def synchronize(self) -> None:
        """Likewise."""


class Event:
    """The moment it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Now."""
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        """Always over."""
        return True

    def synchronize(self) -> None:
        """Always over."""

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds."""
        return (other.time_s - self.time_s) * 1e3


class PaceKernel:
    """Writes records without waiting."""

    def __call__(
        self, leave: Any, extra_ns: int, queue: Any, enter: Any, hold_ns: int, turn: Any = None
    ) -> None:
        """Leaves, then enters."""
        now = time.perf_counter_ns()
        if leave is not None:
            leave[2] = max(now, int(leave[1]) + extra_ns)
        if enter is not None:
            enter[0] = now if queue is None else max(now, int(queue[0]))
            enter[1] = enter[0] + hold_ns
            if queue is not None:
                queue[0] = enter[1]


class IpcMemory:
    """Memory of this process, which its threads open by a handle."""

    made: dict[bytes, torch.Tensor] = {}  # noqa: RUF012 - one process, one memory

    def __init__(self, ordinal: int, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, 1)
        memory = torch.zeros(self.num_bytes, dtype=torch.uint8)
        self.address = memory.data_ptr()
        self.handle = self.address.to_bytes(8, "little").ljust(driver.IPC_HANDLE_BYTES, b"\0")
        self.made[self.handle] = memory


def _mem_ops(stream: int, ops: Sequence[MemOp]) -> None:
    for op in ops:
        word = (ctypes.c_uint64 if op.is_long else ctypes.c_uint32).from_address(op.address)
        until = time.monotonic() + WAIT_S
        while op.is_wait and word.value != op.value:
            if time.monotonic() > until:
                raise RuntimeError("a wait that nobody answers")
            time.sleep(5e-4)
        if not op.is_wait:
            word.value = op.value


def _bytes_at(address: int, num_bytes: int, ordinal: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Again:
    """A part of a share as a graph: a replay issues it again. No graph holds its share."""

    def __init__(self, of: Any, issued: list[Any], part: range) -> None:
        self.of, self.issued, self.part = weakref.ref(of), issued, part

    def replay(self) -> None:
        """The first part begins a run, the last one has its outputs."""
        of: Any = self.of()
        if self.part is of._parts[0]:
            self.issued[:] = [share._Issue(of, is_rehearsal=False)]
        (issue,) = self.issued
        issue.run(self.part)
        if self.part is of._parts[-1]:
            of.outputs = issue.outputs()
            self.issued.clear()


def _capture(self: Any) -> list[Any]:
    if not self.is_rehearsed:
        self._rehearse()
    issued: list[Any] = []
    return [Again(self, issued, part) for part in self._parts]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, until the test ends."""
    patch = monkeypatch.setattr
    patch(IpcMemory, "made", {})
    for name, what in {
        "card": lambda ordinal: torch.device("cuda", ordinal) and CPU,  # refuses negative ordinals
        "new_stream": lambda ordinal, priority=0: Stream(),
        "priorities": lambda ordinal: (0, -5),
        "pinned": lambda shape, dtype=torch.uint8: torch.zeros(tuple(shape), dtype=dtype),
        "IpcMemory": IpcMemory,
        "open_shared": lambda ordinal, handle: IpcMemory.made[handle].data_ptr(),
        "close_shared": lambda address: None,
        "bytes_at": _bytes_at,
        "pin": lambda tensor: None,
        "mem_ops": _mem_ops,
        "copy": lambda stream, target, source, num: ctypes.memmove(target, source, num),
        "fetch": lambda stream, target, source, num: ctypes.memmove(target, source, num),
        "fetch_kernel": lambda ordinal: None,
    }.items():
        patch(driver, name, what)
    patch(hub, "LocalProcess", _Thread)
    patch(device, "_FREE", {})
    patch(device, "_PARTS", {})
    patch(device, "PaceKernel", PaceKernel)
    patch(device, "cut", lambda ordinal, sizes: [Part(n) for n in sizes])
    patch(share.ShareGraph, "_capture", _capture)
    for name, value in {"REPEATS": 2, "BESIDE": 2, "PAUSE_US": 0.0}.items():
        patch(measure, name, value)  # what is measured here means nothing
    for name, what in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda *device: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
        "current_stream": lambda *device: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda ordinal: contextlib.nullcontext(),
        "mem_get_info": lambda device: (1 << 40, 1 << 40),
        "Event": Event,
        "_sleep": lambda cycles: None,
    }.items():
        patch(torch.cuda, name, what)


class Part(device.Partition):
    """SMs that are not there."""

    def __init__(self, num_sms: int) -> None:
        super().__init__(0, num_sms, None)  # type: ignore[arg-type]

    def stream(self, priority: int = 0) -> Any:
        """A stream of the part."""
        return Stream()


class _Killed(BaseException):
    """Raised in the thread of a worker that is killed."""


class _Thread:
    """A worker that is a thread of this process, so that what stands in for the GPU is its own too."""

    pid: int | None = None

    def __init__(self, *process: object) -> None:
        self.engine: EngineConnection | None = None
        self._ident = 0
        self._is_over = threading.Event()

    def run(self, value: Setup) -> None:
        """Until its connection is closed, or it is killed."""
        self._ident = threading.get_ident()
        try:
            self.engine = EngineConnection(value.engine, value.secret, value.name)
            worker.serve(value, self.engine)
        except _Killed:
            pass
        finally:
            self._is_over.set()

    def end(self, timeout_s: float) -> str:
        """It leaves when its connection is closed, else it is killed: it does nothing after this."""
        if self.engine is not None:
            self.engine.end()
        if self._is_over.wait(timeout_s):
            return "its thread has ended"
        while self._ident and not self._is_over.wait(0.05):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), ctypes.py_object(_Killed))
        return "its thread was killed"


def cut_off(stepper: WorkerStepper, number: int) -> None:
    """Cuts a worker's connection to the engine; it leaves when it notices."""
    process: Any = stepper.hub.members[number].process
    assert isinstance(process, _Thread), "it was started"
    assert process.engine is not None
    process.engine.close()
