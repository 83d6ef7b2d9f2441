"""probe: which transports between workers this machine can use, and why not the others.

    shm      CPU workers of one machine
    ipc      GPUs of one machine, one card with several workers among them
    nvshmem  GPUs with the library that torch brings
    host     workers of any kind, on any machines

Nothing is sent: torch and the driver are asked what is there.
"""

import os
from dataclasses import dataclass

import torch

from tessera.execute import driver
from tessera.execute.cuda import nvshmem

NO_GPU = "no CUDA device"
MPS_PIPE, MPS_SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, slots=True)
class TransportState:
    name: str
    # What it joins, in words.
    joins: str
    is_present: bool
    # Whether it can really be used with what this machine has.
    is_usable: bool
    why: str


def transports() -> tuple[TransportState, ...]:
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        TransportState("shm", "CPU workers of one machine", True, True, "shared memory"),
        _ipc(num),
        _nvshmem(num),
        TransportState("host", "any workers", True, True, "TCP, through pinned memory where there is a GPU"),
    )


def chosen(found: tuple[TransportState, ...]) -> dict[str, str | None]:
    """What `--transport auto` takes, by what is joined."""
    has_gpus = any(state.name == "ipc" and state.is_present for state in found)
    gpus = "ipc" if any(state.name == "ipc" and state.is_usable for state in found) else "host"
    return {
        "CPUs of one machine": "shm",
        "GPUs of one machine": gpus if has_gpus else None,
        "several machines": "host",
    }


def _ipc(num: int) -> TransportState:
    joins = "GPUs of one machine"
    if not num:
        return TransportState("ipc", joins, False, False, NO_GPU)
    if not driver.has("cuStreamBatchMemOp_v2"):
        return TransportState("ipc", joins, True, False, "this driver has no waits on streams; CUDA 12 has")
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    apart = [f"cuda:{a}-cuda:{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        return TransportState("ipc", joins, True, False, f"no peer access: {', '.join(apart)}")
    beside = (
        "" if num > 1 or os.environ.get(MPS_PIPE) else "; workers on one card take turns without CUDA MPS"
    )
    return TransportState("ipc", joins, True, True, f"CUDA IPC memory{beside}")


def _nvshmem(num: int) -> TransportState:
    joins, path = "GPUs of any machines", nvshmem.library_path()
    if not num or path is None:
        why = "this torch brought no NVSHMEM" if num else NO_GPU
        return TransportState("nvshmem", joins, False, False, why)
    if num == 1 and not (os.environ.get(MPS_PIPE) and os.environ.get(MPS_SHARE)):
        why = f"two workers on one card need CUDA MPS, with {MPS_SHARE} set to each one's share"
        return TransportState("nvshmem", joins, True, False, why)
    return TransportState("nvshmem", joins, True, True, path.name)
