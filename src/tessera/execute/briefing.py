"""Briefing: what a worker elsewhere is told, and sent, in place of being born with it.

The engine sends the traces, the programs and the sizes as JSON; the worker makes the weights itself, from the
model that the traces name, and compares a fingerprint of each with the engine's. So the two run the same
programs on the same weights. Weights that it cannot make are sent, in pieces of bounded size, when it asks
for them (`Want`), and compared in the same way.

A fingerprint is of dtype, shape and up to 4,096 values spread over the tensor: it tells checkpoints apart,
and not two that differ in a few values only.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from tessera.errors import MismatchError, RuleBroken, WorkerError
from tessera.execute.messages import WeightBytes
from tessera.execute.setups import Duty, Setup, interpreter
from tessera.ir import AWAY, Device, verify
from tessera.ir.codec import decode, encode

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
    """What the worker of this setup must know."""
    weights = tuple(weight_of(name, tensor) for name, tensor in sorted(setup.weights.items()))
    return Briefing(Duty(**setup.duty), weights, session.hex())


def weight_of(name: str, tensor: torch.Tensor) -> WeightRecord:
    """A weight as a briefing has it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WeightRecord(name, fingerprint(tensor), dtype, tuple(tensor.shape), tuple(tensor.stride()))


def pack_briefing(briefing: Briefing) -> bytes:
    """As a message carries it."""
    return msgspec.json.encode(encode(briefing))


def unpack_briefing(packed: bytes) -> Briefing:
    """What was packed, verified; raises WorkerError on anything else."""
    try:
        briefing = decode(Briefing, msgspec.json.decode(packed))
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
    if min(duty.microbatches, duty.num_threads) < 1:
        raise ValueError("microbatches and threads are counted from 1")
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
    here = replace(duty, cluster=replace(duty.cluster, devices=tuple(map(_here, duty.cluster.devices))))
    interpret = interpreter(here.cluster.devices[here.device], here.traces)
    return Setup(**here.duty, weights=own, key=key, host=host, interpret=interpret)


def _here(device: Device) -> Device:
    """A device as its own machine counts it."""
    return replace(device, ordinal=0) if device.ordinal == AWAY else device


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
            self._name, self._flat = name, _bytes_of(self._weights[name])
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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


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
