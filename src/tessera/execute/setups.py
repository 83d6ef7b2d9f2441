"""What each worker is born with, made from a plan and its programs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tessera.execute.kernel_launch import Interpret, handed_in
from tessera.execute.stepper import Tensors
from tessera.ir import BufferKind, Cluster, Device, DeviceKind, Plan, Program, Trace


@dataclass(frozen=True)
class Duty:
    """What a worker does, wherever it is: this part of a setup can travel; see `briefing`."""

    device: int
    cluster: Cluster
    traces: tuple[Trace, ...]
    # programs[lane][index], by the lane's number among all that were ever loaded.
    programs: tuple[tuple[Program, ...], ...]
    microbatches: int
    num_threads: int = 1
    transport: str = "shm"
    # How often this device was started before, and every device, as far as it is known now.
    epoch: int = 0
    epochs: tuple[int, ...] = ()
    # First lanes of what was loaded together, in order; see `transport.SharedMemory`.
    loads: tuple[int, ...] = (0,)
    # Of a device that keeps another's times: all of them are so much longer.
    scale: float = 1.0
    # True to report the time of every launch, where that costs something.
    is_profiled: bool = False
    # us[step][launch]: modelled time on this device, which decides who goes first; see `schedule`.
    us: tuple[tuple[float, ...], ...] = ()

    @property
    def loaded(self) -> list[tuple[int, tuple[tuple[Program, ...], ...]]]:
        """(first lane, lanes) of what was loaded together, in order."""
        stops = (*self.loads[1:], len(self.programs))
        return [(first, self.programs[first:stop]) for first, stop in zip(self.loads, stops, strict=True)]

    @property
    def duty(self) -> dict[str, Any]:
        """The fields that travel."""
        return {item.name: getattr(self, item.name) for item in fields(Duty)}


@dataclass(frozen=True, kw_only=True)
class Setup(Duty):
    """What a worker is born with: its duty, and what its machine has."""

    # Weight name -> shared tensor: all of the model's, since plans that are loaded later may read others.
    weights: dict[str, torch.Tensor]
    # Of the session; whoever has it is a worker of this engine.
    key: bytes = b""
    # Where the links listen: at this address, or in the session's folder, where all are on one machine.
    host: str = ""
    folder: str = ""
    # progress[microbatch] = (run, position): where this worker is, in memory that the engine sees.
    progress: torch.Tensor | None = None
    # Runs kernels with PTX on the CPU; see `kernel_launch`.
    interpret: Interpret | None = None


def make_setups(
    plan: Plan,
    programs: Sequence[Sequence[Program]],
    weights: Tensors,
    microbatches: int,
    num_threads: int = 1,
    transport: str = "shm",
    scale: float = 1.0,
    is_profiled: bool = False,
) -> list[Setup]:
    """What each worker is born with; `programs` by the lane's number."""
    traces = tuple(g.trace for g in plan.graphs)
    names = {t.buffers[b].name for t in traces for b in t.buffers_of(BufferKind.WEIGHT)}
    own = {name: _shared(tensor) for name, tensor in weights.items() if name in names}
    return [
        Setup(
            device,
            plan.cluster,
            traces,
            tuple(map(tuple, programs)),
            microbatches,
            num_threads,
            transport,
            epochs=(0,) * len(plan.cluster.devices),
            scale=scale,
            is_profiled=is_profiled,
            us=tuple(tuple(row[device].us for row in costs.costs) for costs in plan.prices),
            weights=own,
            interpret=interpreter(plan.cluster.devices[device], traces),
        )
        for device in range(len(plan.cluster.devices))
    ]


def interprets(device: Device, traces: Sequence[Trace]) -> bool:
    """True if kernels with PTX run on a CPU there."""
    return device.kind is not DeviceKind.CUDA and any(k.ptx for trace in traces for k in trace.kernels)


def interpreter(device: Device, traces: Sequence[Trace]) -> Interpret | None:
    """What runs them, where there are any: it takes time to import."""
    return handed_in() if interprets(device, traces) else None


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that other processes can have."""
    shared: torch.Tensor = tensor.detach().share_memory_()
    return shared
