"""NcclRoad: messages between worker processes through NCCL, one GPU a process.

A message is staged in the GPU's memory on both sides, since workers compute on the CPU; on a machine with
several GPUs, GPUs that compute are all driven by one process (`execute.cuda`), which needs no messages.

NCCL does what it is given on one communicator in order. A receive that waits for its sender would hold up
every send behind it, and two ranks that both wait would wait for ever. So there are two groups, one for each
direction (to a higher and to a lower rank), every thread has a stream of its own, and waits for nothing but
that stream. Communicators are made when two ranks first talk, through the store, which is the engine's only
until all workers are ready: so every two ranks that will talk do so once before, all in the same order.

Written by the documentation and never run: NCCL refuses two ranks on one GPU, and one was at hand. Tested is
what can be without: the same road over gloo.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tessera.errors import WorkerError

# torch's stubs know neither its stores nor its groups.
_C10D: Any = dist
# What NCCL's own threads would ask of the store, which is not there for them.
QUIET = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


@dataclass(frozen=True)
class NcclRoad:
    """One worker's end."""

    rank: int
    device: torch.device
    # Of messages to a higher rank, and to a lower one.
    upward: Any
    downward: Any
    _own: threading.local = field(default_factory=threading.local)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Returns when the peer's GPU can have it and the tensor may be written again."""
        group = self.upward if self.rank < peer else self.downward
        stream = self._stream()
        with torch.cuda.stream(stream):
            group.send([tensor.to(self.device, copy=True)], peer, 0).wait()
            stream.synchronize()

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        """Returns when the tensor holds what the peer sent."""
        group = self.upward if peer < self.rank else self.downward
        stream = self._stream()
        with torch.cuda.stream(stream):
            staged = torch.empty_like(tensor, device=self.device)
            group.recv([staged], peer, 0).wait()
            stream.synchronize()
            tensor.copy_(staged)

    def greet(self, pairs: Sequence[tuple[int, int]]) -> None:
        """One byte along every pair, in the same order on all ranks, so that nobody waits in a circle."""
        for src, dst in sorted(pairs):
            if self.rank == src:
                self.send(torch.zeros(1, dtype=torch.uint8), dst)
            elif self.rank == dst:
                self.recv(torch.empty(1, dtype=torch.uint8), src)

    def _stream(self) -> Any:
        """This thread's."""
        if not hasattr(self._own, "stream"):
            torch.cuda.set_device(self.device)
            self._own.stream = torch.cuda.Stream(self.device)
        return self._own.stream


def open_nccl(
    store: Any,
    rank: int,
    world: int,
    place: int,
    pairs: Sequence[tuple[int, int]],
    make: Callable[[Any, int, int], Any] | None = None,
) -> NcclRoad:
    """The road of one worker, `place` on its machine; `make` makes a group out of a store."""
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place >= num:
        have = f"this machine has {num}" if num else "this one has none"
        raise WorkerError(
            f"transport nccl needs a GPU of its own in every worker process; {have}", "Use --transport gloo."
        )
    os.environ.update(QUIET)
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    groups = [(make or nccl_group)(_C10D.PrefixStore(way, store), rank, world) for way in ("up", "down")]
    road = NcclRoad(rank, device, *groups)
    road.greet(pairs)
    return road


def nccl_group(store: Any, rank: int, world: int) -> Any:
    """A group of all ranks."""
    return _C10D.ProcessGroupNCCL(store, rank, world, _C10D.ProcessGroupNCCL.Options())
