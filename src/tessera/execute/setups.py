"""What each worker is born with, made from a plan and its programs."""

from collections.abc import Sequence

import torch

from tessera.execute.stepper import Tensors
from tessera.execute.worker import Setup
from tessera.ir import BufferKind, Plan, Program


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
            list(programs),
            own,
            microbatches,
            num_threads,
            transport,
            epochs=(0,) * len(plan.cluster.devices),
            scale=scale,
            is_profiled=is_profiled,
            us=tuple(tuple(row[device].us for row in costs.costs) for costs in plan.prices),
        )
        for device in range(len(plan.cluster.devices))
    ]


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that other processes can have."""
    shared: torch.Tensor = tensor.detach().share_memory_()
    return shared
