"""Replay: the launches of a trace on one GPU, in program order, as one CUDA graph, to compare bits and times.

Operators are dispatched again; the PTX of other kernels is loaded by the driver. Weights, inputs and state
keep their memory; temporaries come from the graph's own pool and go back to it after their last use, as in
the program that was recorded. Random numbers are drawn from the state of the generator that is given with the
rest of the state.

One device only, and nothing of the runtime but its launches.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

from tessera.execute.cuda.share import own_workspaces
from tessera.execute.launcher import Launcher, drawing
from tessera.execute.memory import Memory, constant, fresh, storage_of, tensor_of
from tessera.ir import GENERATOR, Buffer, BufferKind, Trace

Tensors = Mapping[str, torch.Tensor]

WARMUPS = 2


class CudaReplay:
    """A trace bound to its weights, inputs and state, captured once; `run` launches the graph."""

    def __init__(
        self,
        trace: Trace,
        given: Tensors,
        order: Sequence[int] | None = None,
    ) -> None:
        """Captures the graph.

        `given`: weights, inputs and state by buffer name. `order`: the
        launches in another order than the program's, which the caller has found to respect its dependencies.
        """
        self._trace = trace
        self._device = next(t.device for name, t in given.items() if not name.startswith(GENERATOR))
        self._given = {i: self._bind(b, given) for i, b in enumerate(trace.buffers) if is_given(b)}
        self._launcher = Launcher(trace, self._device)
        self._order = list(range(len(trace.launches)) if order is None else order)
        self._last_use = _last_uses(trace, self._order)
        self.outputs: dict[str, torch.Tensor] = {}
        with mock.patch("tessera.execute.launcher.drawing", return_value=nullcontext()):  # see `_drawing`
            self._graph = self._capture()

    def run(self) -> dict[str, torch.Tensor]:
        """Launches the graph on the current stream; state is updated in place, outputs are overwritten."""
        with self._drawing():
            self._graph.replay()
        return self.outputs

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Generators start from their buffers; a graph counts on from where the generator is."""
        with ExitStack() as stack:
            for index, storage in self._given.items():
                if self._trace.buffers[index].is_generator:
                    stack.enter_context(drawing(self._trace.buffers[index].name, storage))
            yield

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Runs twice before: libraries and kernels set themselves up. The state is then put back."""
        saved = {i: s.clone() for i, s in self._given.items() if self._is_state(i)}
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad(), self._drawing():
            for _ in range(WARMUPS):
                self._issue()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        for i, storage in saved.items():
            self._given[i].copy_(storage)
        del saved
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.no_grad(), own_workspaces(), torch.cuda.graph(graph):
            self.outputs = self._issue()
        return graph

    def _is_state(self, buffer: int) -> bool:
        return self._trace.buffers[buffer].kind is BufferKind.STATE

    def _issue(self) -> dict[str, torch.Tensor]:
        memory = Memory(self._given, fresh(self._trace, self._device))
        for index in self._order:
            self._launcher.run(index, memory)
            for buffer in self._last_use.get(index, ()):
                memory.free(buffer)
        return {name: tensor_of(memory.get(view.buffer), view) for name, view in self._trace.outputs}

    def _bind(self, buffer: Buffer, given: Tensors) -> torch.UntypedStorage:
        if buffer.constant_hex:
            return constant(buffer, self._device)
        return storage_of(buffer, given)


def _last_uses(trace: Trace, order: Sequence[int]) -> dict[int, list[int]]:
    """Launch -> the temporaries nobody needs after it, in that order."""
    last: dict[int, int] = {}
    for index in order:
        for view in trace.launches[index].views:
            last[view.buffer] = index
    kept = {view.buffer for _, view in trace.outputs}
    freed: dict[int, list[int]] = {}
    for buffer, index in last.items():
        if trace.buffers[buffer].kind is BufferKind.TEMPORARY and buffer not in kept:
            freed.setdefault(index, []).append(buffer)
    return freed


def is_given(buffer: Buffer) -> bool:
    """True if the buffer's contents exist before the step."""
    return buffer.kind in (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE)
