"""Launches: the launches of one trace, issued on torch's current stream over memory that is handed in.

Operators are dispatched again; kernels with PTX are launched from the compiled objects handed in, or else
their PTX is loaded by the driver into the context of the GPU. Memory is a plain mapping from buffer to
storage. What a launch writes and nobody has allocated yet is allocated here, from whatever pool torch uses
at that moment, so that inside a graph's capture it is the graph's own.

Not handled: random numbers, whose generator's state would have to live in the graph.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute.launcher import find_operator
from tessera.execute.memory import tensor_of
from tessera.execute.ptx_module import PtxKernel
from tessera.ir import Arg, Buffer, Launch, Origin, Symbol, Trace, View

Memory = MutableMapping[int, torch.UntypedStorage]
Grid = tuple[int, int, int]
# (grid, arguments of the PTX entry) -> launches on the current stream.
Launchable = Callable[[Grid, Sequence[Any]], None]


class Launches:
    """The launches of a trace, ready for one GPU."""

    def __init__(
        self, trace: Trace, device: torch.device, kernels: Mapping[int, Launchable] | None = None
    ) -> None:
        """`kernels`: compiled objects by kernel, valid on this GPU."""
        self._trace, self._device = trace, device
        self._kernels = dict(kernels or {})
        self._operators: dict[int, Any] = {}

    def issue(self, index: int, memory: Memory) -> None:
        """Issues one launch; its results become buffers of `memory`."""
        launch = self._trace.launches[index]
        self._allocate(memory, launch)
        if self._trace.kernel_of(index).origin is Origin.ATEN:
            self._dispatch(index, launch, memory)
        else:
            self._launch(index, launch, memory)

    def tensor(self, memory: Memory, view: View) -> torch.Tensor:
        """The tensor that a view means."""
        return tensor_of(memory[view.buffer], view)

    def _launch(self, index: int, launch: Launch, memory: Memory) -> None:
        if launch.kernel not in self._kernels:
            self._kernels[launch.kernel] = PtxKernel(self._trace.kernel_of(index), launch.block)
        x, y, z = (*launch.grid, 1, 1, 1)[:3]
        self._kernels[launch.kernel]((x, y, z), [self._value(a, memory) for a in launch.args])

    def _dispatch(self, index: int, launch: Launch, memory: Memory) -> None:
        operator = self._operators.get(launch.kernel)
        if operator is None:
            operator = self._operators[launch.kernel] = find_operator(self._trace.kernel_of(index).name)
        args = [self._value(a, memory) for a in launch.args]
        result = operator(*args, **{k: self._value(a, memory) for k, a in launch.kwargs})
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor, view in zip(results, launch.outputs, strict=True):
            if view is not None and view.buffer not in memory:
                self._check(index, tensor, view)
                memory[view.buffer] = tensor.untyped_storage()

    def _check(self, index: int, tensor: torch.Tensor, view: View) -> None:
        """Later launches read results by offset and stride, so these must be as recorded."""
        found = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
        if found != (view.shape, view.stride, view.offset):
            raise WorkerError(
                f"launch {index} ({self._trace.kernel_of(index).name}) laid out its result as {found}, the "
                f"trace has {(view.shape, view.stride, view.offset)}",
                "Capture the trace again with this version of torch.",
            )

    def _allocate(self, memory: Memory, launch: Launch) -> None:
        """Memory for the temporaries among a launch's arguments; results bring their own."""
        for view in launch.given:
            if view.buffer not in memory:
                size = self._trace.buffers[view.buffer].size_bytes
                fresh = torch.empty(size, dtype=torch.uint8, device=self._device)
                memory[view.buffer] = fresh.untyped_storage()

    def _value(self, arg: Arg, memory: Memory) -> Any:
        if isinstance(arg, View):
            return self.tensor(memory, arg)
        if isinstance(arg, tuple):
            return [self._value(item, memory) for item in arg]
        if isinstance(arg, Symbol):
            return self._device if arg.kind == "device" else getattr(torch, arg.name)
        return arg


def given_storage(buffer: Buffer, given: Mapping[str, torch.Tensor]) -> torch.UntypedStorage:
    """The storage of a buffer that exists before the step, by its name."""
    if buffer.name not in given:
        raise WorkerError(f"{buffer.kind} '{buffer.name}' was not given", "Pass every one of the trace.")
    storage = given[buffer.name].untyped_storage()
    if storage.nbytes() != buffer.size_bytes:
        raise WorkerError(
            f"{buffer.kind} '{buffer.name}' has {storage.nbytes()} bytes, the trace {buffer.size_bytes}",
            "Give tensors of the shapes that were captured.",
        )
    return storage


def refuse_generators(trace: Trace) -> None:
    """Random numbers are not run on GPUs: their generator's state would have to live in the graph."""
    drawn = [b.name for b in trace.buffers if b.is_generator]
    if drawn:
        raise WorkerError(
            f"the {trace.step.kind} step draws random numbers ({', '.join(drawn)})",
            "Draw them outside of the step and pass them in as an input.",
        )
