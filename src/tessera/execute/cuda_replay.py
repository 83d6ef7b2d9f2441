"""Replay: the launches of a trace on one GPU, in program order, as one CUDA graph.

Operators are dispatched again; kernels with PTX are launched from the compiled objects handed in, or else
their PTX is loaded by the driver. Weights, inputs and state keep their memory; temporaries come from the
graph's own pool and go back to it after their last use, as in the program that was recorded.

One device only. For a split run see `engine`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute.ptx_module import PtxKernel
from tessera.ir import Arg, Buffer, BufferKind, Launch, Origin, Symbol, Trace, View, arg_views

Tensors = Mapping[str, torch.Tensor]
Grid = tuple[int, int, int]
# (grid, arguments of the PTX entry) -> launches on the current stream.
Launchable = Callable[[Grid, Sequence[Any]], None]

WARMUPS = 2


class CudaReplay:
    """A trace bound to its weights, inputs and state, captured once; `run` launches the graph."""

    def __init__(
        self,
        trace: Trace,
        given: Tensors,
        kernels: Mapping[int, Launchable] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """Captures the graph.

        `given`: weights, inputs and state by buffer name. `kernels`: compiled objects by kernel. `order`: the
        launches in another order than the program's, which the caller has found to respect its dependencies.
        """
        self._trace = trace
        self._device = next(iter(given.values())).device
        self._given = {i: self._bind(b, given) for i, b in enumerate(trace.buffers) if _is_given(b)}
        self._kernels = dict(kernels or {})
        self._order = list(range(len(trace.launches)) if order is None else order)
        self._last_use = _last_uses(trace, self._order)
        self._operators: dict[int, Any] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self._graph = self._capture()

    def run(self) -> dict[str, torch.Tensor]:
        """Launches the graph on the current stream; state is updated in place, outputs are overwritten."""
        self._graph.replay()
        return self.outputs

    def run_eagerly(self) -> dict[str, torch.Tensor]:
        """The same launches one by one, without a graph. Slow; this is the definition of correct."""
        return self._issue()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Runs twice before: libraries and kernels set themselves up. The state is then put back."""
        saved = {i: s.clone() for i, s in self._given.items() if self._is_state(i)}
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(WARMUPS):
                self._issue()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        for i, storage in saved.items():
            self._given[i].copy_(storage)
        del saved
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            self.outputs = self._issue()
        return graph

    def _is_state(self, buffer: int) -> bool:
        return self._trace.buffers[buffer].kind is BufferKind.STATE

    def _issue(self) -> dict[str, torch.Tensor]:
        memory = dict(self._given)
        for index in self._order:
            launch = self._trace.launches[index]
            self._allocate(memory, launch)
            if self._trace.kernel_of(index).origin is Origin.ATEN:
                self._dispatch(index, launch, memory)
            else:
                self._launch(index, launch, memory)
            for buffer in self._last_use.get(index, ()):
                memory.pop(buffer, None)
        return {name: self._tensor(memory, view) for name, view in self._trace.outputs}

    def _launch(self, index: int, launch: Launch, memory: dict[int, Any]) -> None:
        if launch.kernel not in self._kernels:
            self._kernels[launch.kernel] = PtxKernel(self._trace.kernel_of(index), launch.block)
        x, y, z = (*launch.grid, 1, 1, 1)[:3]
        self._kernels[launch.kernel]((x, y, z), [self._value(a, memory) for a in launch.args])

    def _dispatch(self, index: int, launch: Launch, memory: dict[int, Any]) -> None:
        operator = self._operators.get(launch.kernel)
        if operator is None:
            operator = self._operators[launch.kernel] = _operator(self._trace.kernel_of(index).name)
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

    # Memory -------------------------------------------------------------------------------------------

    def _bind(self, buffer: Buffer, given: Tensors) -> torch.UntypedStorage:
        if buffer.constant_hex:
            data = torch.frombuffer(bytearray.fromhex(buffer.constant_hex), dtype=torch.uint8)
            return data.to(self._device).untyped_storage()
        if buffer.name not in given:
            raise WorkerError(f"{buffer.kind} '{buffer.name}' was not given", "Pass every one of the trace.")
        storage = given[buffer.name].untyped_storage()
        if storage.nbytes() != buffer.size_bytes:
            raise WorkerError(
                f"{buffer.kind} '{buffer.name}' has {storage.nbytes()} bytes, the trace {buffer.size_bytes}",
                "Give tensors of the shapes that were captured.",
            )
        return storage

    def _allocate(self, memory: dict[int, Any], launch: Launch) -> None:
        """Memory for the temporaries among a launch's arguments; results bring their own."""
        for arg in (*launch.args, *(value for _, value in launch.kwargs)):
            for view in arg_views(arg):
                if view.buffer not in memory:
                    size = self._trace.buffers[view.buffer].size_bytes
                    fresh = torch.empty(size, dtype=torch.uint8, device=self._device)
                    memory[view.buffer] = fresh.untyped_storage()

    def _value(self, arg: Arg, memory: dict[int, Any]) -> Any:
        if isinstance(arg, View):
            return self._tensor(memory, arg)
        if isinstance(arg, tuple):
            return [self._value(item, memory) for item in arg]
        if isinstance(arg, Symbol):
            return self._device if arg.kind == "device" else getattr(torch, arg.name)
        return arg

    def _tensor(self, memory: dict[int, Any], view: View) -> torch.Tensor:
        storage = memory[view.buffer]
        empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
        return empty.set_(storage, view.offset, view.shape, view.stride)


def _operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    except AttributeError as error:
        remedy = "Import the package that registers it, or use the torch version of the capture."
        raise WorkerError(f"this torch has no operator {name}", remedy) from error


def _is_given(buffer: Buffer) -> bool:
    return buffer.kind in (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)


def _last_uses(trace: Trace, order: Sequence[int]) -> dict[int, list[int]]:
    """Launch -> the temporaries nobody needs after it, in that order."""
    last: dict[int, int] = {}
    for index in order:
        launch = trace.launches[index]
        views = [v for a in (*launch.args, *(x for _, x in launch.kwargs)) for v in arg_views(a)]
        for view in (*views, *(v for v in launch.outputs if v is not None)):
            last[view.buffer] = index
    kept = {view.buffer for _, view in trace.outputs}
    freed: dict[int, list[int]] = {}
    for buffer, index in last.items():
        if trace.buffers[buffer].kind is BufferKind.TEMPORARY and buffer not in kept:
            freed.setdefault(index, []).append(buffer)
    return freed
