"""InOrder: the launches of a work unit in program order on one GPU, one by one; a `ReferenceStepper` runs it.

No graph, no streams, no placement: this is what every divided run on the same architecture must equal, bit by
bit. It is slow, and meant to be compared with, not timed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera.execute.cuda.graphs import Kernels, refuse_generators
from tessera.execute.launcher import Launcher
from tessera.execute.memory import Memory, constant, fresh, given_storage, tensor_of
from tessera.ir import BufferKind, Trace

Tensors = Mapping[str, torch.Tensor]


class InOrder:
    """Called with a step, its inputs, and the state, which it changes; gives the outputs."""

    def __init__(
        self, traces: Sequence[Trace], weights: Tensors, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        """`kernels[step]`: compiled objects by kernel; else PTX is loaded by the driver."""
        self._traces, self._device = traces, device
        for trace in traces:
            refuse_generators(trace)
        placed = {name: tensor.to(device) for name, tensor in weights.items()}
        self._weights = [self._bind(trace, placed) for trace in traces]
        self._launchers = [Launcher(t, device, (kernels or {}).get(i)) for i, t in enumerate(traces)]

    def __call__(self, step: int, inputs: Tensors, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        trace = self._traces[step]
        memory = Memory(self._weights[step], fresh(trace, self._device))
        for name, tensor in state.items():
            state[name] = tensor.to(self._device)
        given = {name: tensor.to(self._device, copy=True) for name, tensor in inputs.items()}
        for kind, found in ((BufferKind.INPUT, given), (BufferKind.STATE, state)):
            for index in trace.buffers_of(kind):
                memory.put(index, given_storage(trace.buffers[index], found))
        with torch.no_grad():
            for index in range(len(trace.launches)):
                self._launchers[step].run(index, memory)
            outputs = {n: tensor_of(memory.get(v.buffer), v).clone() for n, v in trace.outputs}
        return outputs

    def _bind(self, trace: Trace, weights: Tensors) -> dict[int, torch.UntypedStorage]:
        found = {}
        for index in trace.buffers_of(BufferKind.WEIGHT):
            buffer = trace.buffers[index]
            is_constant = bool(buffer.constant_hex)
            found[index] = constant(buffer, self._device) if is_constant else given_storage(buffer, weights)
        return found
