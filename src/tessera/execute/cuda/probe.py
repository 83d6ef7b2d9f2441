"""probe: which ways between GPUs this machine has, and which one a run would take.

    same-card copies  devices that are one card: a copy inside the CUDA graph
    peer copies       GPUs of one machine: a peer copy inside the CUDA graph
    NCCL              any GPUs: point-to-point between processes, started by the CPU
    NVSHMEM           GPUs with symmetric memory: put-with-signal, started by the GPU

Nothing is sent: the probe asks torch and the driver what is there. A way that is there and that this machine
cannot exercise (two ranks need two GPUs) says so. The first usable one in this order is chosen, within one
machine and between machines separately.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Transport:
    """One way between devices."""

    name: str
    # What it joins: "one card", "one machine" or "any".
    joins: str
    is_present: bool
    # Whether it can really be used with the GPUs of this machine.
    is_usable: bool
    why: str


def transports() -> tuple[Transport, ...]:
    """Every way, best first."""
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (_same_card(num), _peer(num), _nvshmem(num), _nccl(num))


def choose(found: tuple[Transport, ...], joins: str) -> Transport | None:
    """The best usable way that joins devices of one card, of one machine, or any."""
    order = {"one card": 0, "one machine": 1, "any": 2}
    wide = [t for t in found if t.is_usable and order[t.joins] >= order[joins]]
    return min(wide, key=lambda t: order[t.joins], default=None)


def _same_card(num: int) -> Transport:
    why = "copies inside the CUDA graph" if num else "no CUDA device"
    return Transport("same-card copies", "one card", bool(num), bool(num), why)


def _peer(num: int) -> Transport:
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    direct = [p for p in pairs if torch.cuda.can_device_access_peer(*p)]
    if num < 2:
        why = "needs two GPUs" if num else "no CUDA device"
    elif len(direct) == len(pairs):
        why = "every GPU reaches every other one"
    else:
        why = f"{len(direct)} of {len(pairs)} pairs are direct; the others pass through the host"
    return Transport("peer copies", "one machine", num > 1, num > 1, why)


def _nccl(num: int) -> Transport:
    from torch import distributed

    present = bool(num) and distributed.is_available() and distributed.is_nccl_available()
    if not present:
        return Transport("NCCL", "any", False, False, "this torch has no NCCL" if num else "no CUDA device")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    why = f"version {version}" + ("" if num > 1 else "; two ranks on one GPU are refused: not exercised here")
    return Transport("NCCL", "any", True, num > 1, why)


def _nvshmem(num: int) -> Transport:
    present = bool(num) and _has_nvshmem()
    if not present:
        why = "this torch has no NVSHMEM" if num else "no CUDA device"
    else:
        why = "symmetric memory of torch" + ("" if num > 1 else "; needs two GPUs: not exercised here")
    return Transport("NVSHMEM", "any", present, present and num > 1, why)


def _has_nvshmem() -> bool:
    try:
        from torch.distributed import _symmetric_memory

        return bool(_symmetric_memory.is_nvshmem_available())
    except (ImportError, AttributeError, RuntimeError):
        return False
