"""Briefing: what a worker elsewhere is told in place of being born with it, as JSON.

The engine sends the traces, the programs and the sizes; the worker makes the weights itself, from the model
that the traces name, and compares a fingerprint of each with the engine's. So the two run the same programs
on the same weights, and no weight crosses the network.

A fingerprint is of dtype, shape and up to 4,096 values spread over the tensor: it tells checkpoints apart,
and not two that differ in a few values only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tessera.errors import MismatchError, RuleBroken, WorkerError
from tessera.execute.packing import Packed
from tessera.execute.worker import Setup
from tessera.ir import Program, Trace, verify
from tessera.ir.codec import Undecodable, decode, encode

NAME = "briefing"
FINGERPRINT_VALUES = 4096


@dataclass(frozen=True, slots=True)
class Briefing:
    """A `Setup` that can travel; the fields that both have mean the same."""

    device: int
    # How many devices there are.
    world: int
    traces: tuple[Trace, ...]
    programs: tuple[tuple[Program, ...], ...]
    slots: int
    slot_bytes: int
    num_threads: int
    is_plain: bool
    us: tuple[tuple[float, ...], ...]
    # (name, fingerprint, strides) of the weights that this device reads.
    weights: tuple[tuple[str, str, tuple[int, ...]], ...]


def briefing_of(setup: Setup, world: int) -> Briefing:
    """What the worker of this setup must know."""
    return Briefing(
        setup.device,
        world,
        tuple(setup.traces),
        tuple(tuple(lane) for lane in setup.programs),
        setup.slots,
        setup.slot_bytes,
        setup.num_threads,
        setup.is_plain,
        setup.us,
        tuple((name, fingerprint(t), tuple(t.stride())) for name, t in sorted(setup.weights.items())),
    )


def pack_briefing(briefing: Briefing) -> dict[str, Packed]:
    """As a message carries it."""
    data = json.dumps(encode(briefing), separators=(",", ":"), allow_nan=False).encode()
    return {NAME: ("uint8", (len(data),), data)}


def unpack_briefing(packed: Mapping[str, Packed]) -> Briefing:
    """What was packed, verified; raises WorkerError on anything else."""
    try:
        briefing = decode(Briefing, json.loads(packed[NAME][2]))
        for record in (*briefing.traces, *(p for lane in briefing.programs for p in lane)):
            verify(record)
        _check_sizes(briefing)
    except (Undecodable, RuleBroken, KeyError, ValueError, RecursionError) as error:
        raise WorkerError(f"the engine's briefing cannot be read: {error}", "Update both sides.") from error
    return briefing


def _check_sizes(briefing: Briefing) -> None:
    steps = len(briefing.traces)
    if not 0 <= briefing.device < briefing.world or steps == 0:
        raise ValueError(f"there is no device {briefing.device} of {briefing.world} in {steps} steps")
    if min(briefing.slots, briefing.num_threads) < 1 or briefing.slot_bytes < 0:
        raise ValueError("slots, threads and bytes are counted from 1")
    if any(not 0 <= p.step < steps for lane in briefing.programs for p in lane):
        raise ValueError("a program is of a step that is not there")


def setup_of(briefing: Briefing, weights: Mapping[str, torch.Tensor]) -> Setup:
    """The setup that was sent, with weights made here; raises MismatchError if they are not the engine's."""
    own = {}
    for name, wanted, stride in briefing.weights:
        if name not in weights:
            raise MismatchError(f"the model here has no weight '{name}'", _remedy(briefing.traces))
        if fingerprint(weights[name]) != wanted:
            raise MismatchError(f"weight '{name}' here is not the engine's", _remedy(briefing.traces))
        own[name] = _laid_out(weights[name].detach(), stride)
    return Setup(
        briefing.device,
        briefing.traces,
        briefing.programs,
        own,
        briefing.slots,
        briefing.slot_bytes,
        briefing.num_threads,
        briefing.is_plain,
        us=briefing.us,
    )


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


def _remedy(traces: Sequence[Trace]) -> str:
    return f"Have the same {traces[0].step.model} on every machine, or name its folder with --model."
