"""Undivided: the launches of a work unit in program order on one GPU, one by one.

No graph, no streams, no placement: this is what every divided run on the same architecture must equal, bit by
bit. It is slow, and meant to be compared with, not timed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera.execute.cuda.launches import (
    Launchable,
    Launches,
    bytes_of,
    constant_storage,
    given_storage,
    refuse_generators,
)
from tessera.execute.engine import Request, RunResult
from tessera.ir import BufferKind, Trace, WorkUnit

Tensors = Mapping[str, torch.Tensor]


class Undivided:
    """A work unit on one GPU."""

    def __init__(
        self,
        unit: WorkUnit,
        weights: Tensors,
        device: torch.device,
        kernels: Mapping[int, Mapping[int, Launchable]] | None = None,
    ) -> None:
        """`kernels[step]`: compiled objects by kernel; else PTX is loaded by the driver."""
        self._unit, self._device = unit, device
        self._traces: Sequence[Trace] = [g.trace for g in unit.graphs]
        for trace in self._traces:
            refuse_generators(trace)
        self._weights = [self._bind(trace, weights) for trace in self._traces]
        self._launches = [Launches(t, device, (kernels or {}).get(i)) for i, t in enumerate(self._traces)]

    def run(self, request: Request) -> RunResult:
        """One request, start to end; lane -1 says that it followed none."""
        result = RunResult(-1)
        state = {
            name: bytes_of(t.untyped_storage(), 0, t.untyped_storage().nbytes()).to(self._device, copy=True)
            for name, t in request.state().items()
        }
        with torch.no_grad():
            for step, count in enumerate(self._unit.counts):
                for run in range(count):
                    last = result.outputs[-1] if result.outputs else {}
                    inputs = request.inputs(step, run, last)
                    result.outputs.append(self._step(step, inputs, state))
        result.state = state
        return result

    def _step(self, step: int, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        trace = self._traces[step]
        memory: dict[int, Any] = dict(self._weights[step])
        for kind, given in ((BufferKind.INPUT, inputs), (BufferKind.STATE, state)):
            for index in trace.buffers_of(kind):
                memory[index] = given_storage(trace.buffers[index], _on(self._device, given))
        for index in range(len(trace.launches)):
            self._launches[step].issue(index, memory)
        return {name: self._launches[step].tensor(memory, view).clone() for name, view in trace.outputs}

    def _bind(self, trace: Trace, weights: Tensors) -> dict[int, torch.UntypedStorage]:
        found = {}
        for index in trace.buffers_of(BufferKind.WEIGHT):
            buffer = trace.buffers[index]
            if buffer.constant_hex:
                found[index] = constant_storage(buffer, self._device)
            else:
                found[index] = given_storage(buffer, weights)
        return found


def _on(device: torch.device, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors on a device; those that are there already keep their memory."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def differing(wanted: RunResult, found: RunResult) -> list[str]:
    """Names of the outputs (with their run) and state whose bits differ, and of what is missing."""
    names = []
    for run, (one, other) in enumerate(zip(wanted.outputs, found.outputs, strict=True)):
        names += [f"{name} of run {run}" for name, t in one.items() if not _same(t, other.get(name))]
    names += [f"state {name}" for name, t in wanted.state.items() if not _same(t, found.state.get(name))]
    return names


def _same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None:
        return False
    one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return one.numel() == other.numel() and bool(torch.equal(one, other))
