"""A pretended CUDA for tests of timing: tensors on the CPU, streams and graphs that only move a clock."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera.execute import timing
from tessera.execute.cuda import timing as cuda_timing
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory

MHZ = 1000.0


class FakeCuda:
    """Stands for `torch.cuda`. A launch costs `cost_us`, a graph `start_us` more, whatever it holds."""

    def __init__(self, cost_us: float, start_us: float) -> None:
        self.now_us, self.cost_us, self.start_us = 0.0, cost_us, start_us
        self.mhz = MHZ
        # The graph that is being captured, as the list of its launches.
        self.capturing: list[int] | None = None
        # Launches whose capture fails, and whether the device is gone.
        self.broken: set[int] = set()
        self.is_lost = False
        self.host_readers: set[int] = set()
        self._debug = 0

    def launched(self, launch: int) -> None:
        """Called for every launch."""
        if self._debug and launch in self.host_readers:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing is not None:
            if launch in self.broken:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.capturing.append(launch)
        else:
            self.now_us += self.cost_us

    def Stream(self, device: Any = None) -> Any:
        """A stream."""
        return SimpleNamespace(synchronize=lambda: None)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        """The current stream."""
        yield

    def Event(self, enable_timing: bool = False) -> "FakeEvent":
        """An event."""
        return FakeEvent(self)

    def CUDAGraph(self) -> "FakeGraph":
        """A graph."""
        return FakeGraph(self)

    def _sleep(self, cycles: int) -> None:
        self.now_us += cycles / self.mhz

    def synchronize(self, device: Any = None) -> None:
        """Raises once the device is gone."""
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def get_sync_debug_mode(self) -> int:
        """As torch's."""
        return self._debug

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """As torch's."""
        self._debug = 2 if mode == "error" else int(mode)

    def set_device(self, device: Any) -> None:
        """There is one."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def graph_pool_handle(self) -> object:
        """A pool."""
        return object()

    def get_device_properties(self, device: Any) -> Any:
        """A card with a small cache."""
        return SimpleNamespace(name="Fake GPU", multi_processor_count=8, L2_cache_size=1 << 20)


class FakeEvent:
    """A moment."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._at = cuda, 0.0

    def record(self) -> None:
        """Now."""
        self._at = self._cuda.now_us

    def synchronize(self) -> None:
        """It has passed."""

    def elapsed_time(self, later: "FakeEvent") -> float:
        """Milliseconds."""
        return (later._at - self._at) / 1e3


class FakeGraph:
    """Counts what was launched while it was captured."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.launches: list[int] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        """From now on launches are not run."""
        self._cuda.capturing = self.launches

    def capture_end(self) -> None:
        """Until now."""
        self._cuda.capturing = None

    def replay(self) -> None:
        """Moves the clock."""
        self._cuda.now_us += self._cuda.start_us + len(self.launches) * self._cuda.cost_us


class _Torch:
    """`torch` with a pretended `cuda`, whose device is the CPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def device(self, *words: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(monkeypatch: pytest.MonkeyPatch, cost_us: float = 5.0, start_us: float = 40.0) -> FakeCuda:
    """Puts a pretended CUDA under the timers."""
    cuda = FakeCuda(cost_us, start_us)
    monkeypatch.setattr(cuda_timing, "torch", _Torch(cuda))

    class Counted(Launcher):
        """Tells of every launch."""

        def run(self, launch: int, memory: Memory) -> None:
            cuda.launched(launch)
            super().run(launch, memory)

    monkeypatch.setattr(timing, "Launcher", Counted)
    return cuda
