"""Stands in for a GPU where there is none: the engine's own code runs, on the CPU, one thing after the other.

Streams and events do nothing, a "graph" issues its program again, and the turnstile writes records from the
CPU's clock without waiting. So what is tested is memory, placement, requests and bookkeeping. Order between
streams is tested in test_cuda_issue.py; time and graphs only on a GPU.
"""

import contextlib
import time
from typing import Any

import pytest
import torch

from tessera.execute.cuda import driver, graph, machine, measure, partition

CPU = torch.device("cpu")


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


class Turnstile:
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


def _capture(self: Any) -> Any:
    self.outputs = self._issue()

    class Again:
        def replay(again) -> None:
            made = self._issue()
            for name, tensor in self.outputs.items():
                tensor.copy_(made[name])

    return Again()


def install(monkeypatch: pytest.MonkeyPatch, num_sms: int = 132) -> None:
    """One GPU of so many SMs, until the test ends."""
    patch = monkeypatch.setattr
    patch(driver, "card", lambda ordinal: CPU)
    patch(driver, "new_stream", lambda ordinal, priority=0: Stream())
    patch(driver, "priorities", lambda ordinal: (0, -5))
    patch(machine, "_FREE", {})
    patch(machine, "_PARTS", {})
    patch(machine, "Turnstile", Turnstile)
    patch(machine, "cut", lambda ordinal, sizes: [Part(n) for n in sizes])
    patch(graph.ProgramGraph, "_capture", _capture)
    for name, value in {"REPEATS": 2, "BESIDE": 2, "PAUSE_US": 0.0}.items():
        patch(measure, name, value)  # what is measured here means nothing
    for name, what in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
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


class Part(partition.Partition):
    """SMs that are not there."""

    def __init__(self, num_sms: int) -> None:
        super().__init__(0, num_sms, None)  # type: ignore[arg-type]

    def stream(self, priority: int = 0) -> Any:
        """A stream of the part."""
        return Stream()
