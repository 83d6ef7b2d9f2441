"""What each worker is born with, made from a plan and its programs; elsewhere, what it is told and sent.

To a worker of another machine the engine sends traces, programs and sizes as MessagePack (`Briefing`). It
makes the weights itself, from the model that the traces name, and compares a fingerprint of each with the
engine's. So the two run the same programs on the same weights. Weights that it cannot make are sent, in
pieces of bounded size, when it asks for them (`Want`), and compared in the same way. A fingerprint is of
dtype, shape and up to 4,096 values spread over the tensor: it tells checkpoints apart, and not two that
differ in a few values only.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import torch

from tessera.errors import MismatchError, RuleBroken, WorkerError
from tessera.execute.memory import flat_bytes
from tessera.execute.messages import WeightBytes
from tessera.execute.stepper import Tensors
from tessera.ir import AWAY, BufferKind, Cluster, Plan, Program, Trace, verify


@dataclass(frozen=True)
class Duty:
    """What a worker does, wherever it is: this part of a setup can travel."""

    device: int
    cluster: Cluster
    traces: tuple[Trace, ...]
    # programs[lane][index], by the lane's number among all that were ever loaded.
    programs: tuple[tuple[Program, ...], ...]
    microbatches: int
    transport: str = "shm"
    # How often this device was started before, and every device, as far as it is known now.
    epoch: int = 0
    epochs: tuple[int, ...] = ()
    # Of a device that keeps another's times: all of them are so much longer.
    scale: float = 1.0
    # True to report the time of every launch, where that costs something.
    is_profiled: bool = False
    # us[step][launch]: modelled time on this device, which decides who goes first; see `schedule`.
    us: tuple[tuple[float, ...], ...] = ()

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


def make_setups(
    plan: Plan,
    programs: Sequence[Sequence[Program]],
    weights: Tensors,
    microbatches: int,
    transport: str = "shm",
    scale: float = 1.0,
    is_profiled: bool = False,
) -> list[Setup]:
    """What each worker is born with; `programs` by the lane's number."""
    traces = tuple(g.trace for g in plan.graphs)
    names = {t.buffers[b].name for t in traces for b in t.buffers_of(BufferKind.WEIGHT)}
    own = {name: _shared(tensor) for name, tensor in weights.items() if name in names}
    lanes, devices = tuple(map(tuple, programs)), plan.cluster.devices
    first = Setup(0, plan.cluster, traces, lanes, microbatches, transport, weights=own)
    first = replace(first, epochs=(0,) * len(devices), scale=scale, is_profiled=is_profiled)
    found = []
    for number in range(len(devices)):
        us = tuple(tuple(row[number].us for row in costs.costs) for costs in plan.prices)
        found.append(replace(first, device=number, us=us))
    return found


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that other processes can have."""
    shared: torch.Tensor = tensor.detach().share_memory_()
    return shared


FINGERPRINT_VALUES = 4096
# What one message carries of a weight.
PIECE_BYTES = 16 << 20
# A briefing is traces and programs: tens of megabytes for the largest models.
MAX_BRIEFING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """What a weight is, without its values."""

    name: str
    fingerprint: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Briefing:
    """A setup that can travel."""

    duty: Duty
    # Those that this device reads.
    weights: tuple[WeightRecord, ...]
    # Names the session; with the secret it gives the key of the links.
    session_hex: str


def briefing_of(setup: Setup, session: bytes) -> Briefing:
    weights = tuple(weight_of(name, tensor) for name, tensor in sorted(setup.weights.items()))
    return Briefing(Duty(**setup.duty), weights, session.hex())


def weight_of(name: str, tensor: torch.Tensor) -> WeightRecord:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WeightRecord(name, fingerprint(tensor), dtype, tuple(tensor.shape), tuple(tensor.stride()))


def pack_briefing(briefing: Briefing) -> bytes:
    return msgspec.msgpack.encode(briefing)


def unpack_briefing(packed: bytes) -> Briefing:
    """What was packed, verified; raises WorkerError on anything else."""
    try:
        briefing = msgspec.msgpack.decode(packed, type=Briefing)
        duty = briefing.duty
        for record in (duty.cluster, *duty.traces, *(p for lane in duty.programs for p in lane)):
            verify(record)
        _check_sizes(briefing)
    except (RuleBroken, ValueError, RecursionError) as error:
        raise WorkerError(f"the engine's briefing cannot be read: {error}", "Update both sides.") from error
    return briefing


def _check_sizes(briefing: Briefing) -> None:
    duty = briefing.duty
    steps, world = len(duty.traces), len(duty.cluster.devices)
    if not 0 <= duty.device < world or steps == 0 or len(duty.epochs) != world:
        raise ValueError(f"there is no device {duty.device} of {world} in {steps} steps")
    if duty.microbatches < 1:
        raise ValueError("microbatches are counted from 1")
    if any(not 0 <= p.step < steps for lane in duty.programs for p in lane):
        raise ValueError("a program is of a step that is not there")
    bytes.fromhex(briefing.session_hex)
    for weight in briefing.weights:
        is_dtype = isinstance(getattr(torch, weight.dtype, None), torch.dtype)
        if not is_dtype or min(weight.shape, default=0) < 0:
            raise ValueError(f"weight '{weight.name}' is no tensor")


def setup_of(briefing: Briefing, weights: Mapping[str, torch.Tensor], key: bytes, host: str) -> Setup:
    """The setup that was sent, with weights from here; raises MismatchError if they are not the engine's.

    key   of the links
    host  under which other workers reach this machine
    """
    own, duty = {}, briefing.duty
    for weight in briefing.weights:
        found = weights[weight.name]
        if fingerprint(found) != weight.fingerprint:
            model = duty.traces[0].step.model
            remedy = f"Have the same {model} on every machine, or name its folder with --model."
            raise MismatchError(f"weight '{weight.name}' here is not the engine's", remedy)
        own[weight.name] = _laid_out(found.detach(), weight.stride)
    # A device as its own machine counts it.
    devices = (replace(x, ordinal=0) if x.ordinal == AWAY else x for x in duty.cluster.devices)
    here = replace(duty, cluster=replace(duty.cluster, devices=tuple(devices)))
    return Setup(**here.duty, weights=own, key=key, host=host)


class Pieces:
    """The engine's side of sending weights."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        # The one that is being sent: a worker asks for one after another.
        self._name, self._flat = "", torch.empty(0, dtype=torch.uint8)

    def piece(self, name: str, start: int) -> WeightBytes:
        """The next bytes of a weight; raises WorkerError for one that is not this worker's."""
        if name not in self._weights:
            raise WorkerError(f"it asked for a weight '{name[:80]}' that it does not read")
        if name != self._name:
            self._name, self._flat = name, flat_bytes(self._weights[name].cpu())
        part = self._flat[max(0, start) : max(0, start) + PIECE_BYTES]
        return WeightBytes(part.numpy().data)


def fetch(weight: WeightRecord, ask: Callable[[str, int], memoryview]) -> torch.Tensor:
    """The worker's side: one weight, from pieces that are asked for by name and first byte."""
    tensor = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype))
    flat, at = tensor.reshape(-1).view(torch.uint8), 0
    while at < flat.numel():
        data = ask(weight.name, at)
        if not 0 < len(data) <= flat.numel() - at:
            raise WorkerError(f"the engine sent {len(data)} bytes of weight '{weight.name}' at {at}")
        flat[at : at + len(data)].numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        at += len(data)
    return tensor


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The weight as it lies in the engine's memory, which is how the programs read it."""
    if tensor.stride() == stride:
        return tensor
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, stride, strict=False))
    if len(stride) != tensor.dim() or min(stride) < 1 or reach != tensor.numel():
        raise MismatchError(f"a weight of shape {list(tensor.shape)} cannot lie with strides {list(stride)}")
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def fingerprint(tensor: torch.Tensor) -> str:
    """Names a tensor by its dtype, shape and a sample of its bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    every = max(1, flat.numel() // FINGERPRINT_VALUES)
    sample = flat[::every][:FINGERPRINT_VALUES].contiguous().view(torch.uint8)
    kind = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(kind + sample.cpu().numpy().tobytes()).hexdigest()
