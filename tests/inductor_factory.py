"""A small compiled step recorded without a GPU, and a CPU that can run its trace.

Operators run in torch; Triton kernels run in the PTX interpreter, which also tells the bytes they touch.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tessera.capture import Workload
from tessera.capture.inductor import record_inductor_offline
from tessera.ir import BufferKind, Graph, Hazard, Launch, Origin, Step, Trace, View
from tessera_ptx.interp import Offset, Touched, run

ROWS, WORDS, WIDTH, PLACES = 2, 50, 32, 8


class Block(torch.nn.Module):
    """A gated layer on top of what it is given."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale, self.norm = scale, torch.nn.RMSNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input and what the layer adds."""
        made: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(self.norm(x) * self.scale)))
        return made


class Reader(torch.nn.Module):
    """Looks up a token, remembers it at the row's own place, reads what the row remembers, thinks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block(), Block(), Block(0.5)])
        self.wide, self.narrow = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH // 2)
        self.out, self.more = torch.nn.Linear(WIDTH, WORDS), torch.nn.Linear(WIDTH // 2, WORDS)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Scores of the next word; `seen` is updated in place."""
        x = self.norm(self.words(tokens))
        seen[torch.arange(ROWS, device=tokens.device), places] = x
        scores = (seen @ x[:, :, None])[:, :, 0] / WIDTH**0.5
        future = torch.arange(PLACES, device=tokens.device) > places[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = (weights[:, None] @ seen)[:, 0] + x
        for block in self.blocks:
            x = block(x)
        wide, narrow = self.wide(x).sin(), self.narrow(x).cos()  # neither waits for the other
        made: torch.Tensor = self.out(wide) + self.more(narrow)
        return made


@functools.cache
def workload() -> Workload:
    """One step of the reader."""
    module = Reader().eval()
    seen = torch.randn((ROWS, PLACES, WIDTH), generator=torch.Generator().manual_seed(1))
    return Workload(
        Step("reader", "decode", ROWS, PLACES),
        module,
        lambda inputs, state: {"scores": module(inputs["tokens"], inputs["places"], state["seen"])},
        lambda seed: {"tokens": torch.tensor([7, 41]), "places": torch.tensor([5, 2])},
        lambda seed: {"seen": seen.clone()},
        lambda first, run, last: dict(first),
    )


@functools.cache
def trace() -> Trace:
    """Its compiled launches, with accesses proved from PTX."""
    return record_inductor_offline(workload())


class Cpu:
    """Runs launches of a trace on byte arrays; `touched` holds what each Triton launch reached."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.memory = [np.zeros(max(b.size_bytes, 1), np.uint8) for b in trace.buffers]
        self.touched: dict[int, dict[int, Touched]] = {}
        mine = workload()
        given = {**mine.weights(), **mine.make_inputs(0), **mine.make_state(0)}
        for index, buffer in enumerate(trace.buffers):
            if buffer.constant_hex:
                self.memory[index][:] = np.frombuffer(bytes.fromhex(buffer.constant_hex), np.uint8)
            elif buffer.kind in (BufferKind.WEIGHT, BufferKind.INPUT, BufferKind.STATE):
                flat = given[buffer.name].detach().contiguous().view(-1).view(torch.uint8)
                self.memory[index][:] = flat.numpy()

    def run(self, order: Sequence[int]) -> dict[str, torch.Tensor]:
        """The outputs and the state after the launches in this order."""
        for index in order:
            launch = self._trace.launches[index]
            if self._trace.kernel_of(index).origin is Origin.ATEN:
                self._dispatch(index, launch)
            else:
                self._interpret(index, launch)
        outputs = {name: self._tensor(view).clone() for name, view in self._trace.outputs}
        for index in self._trace.buffers_of(BufferKind.STATE):
            outputs[self._trace.buffers[index].name] = torch.from_numpy(self.memory[index]).clone()
        return outputs

    def _tensor(self, view: View) -> torch.Tensor:
        typed = torch.from_numpy(self.memory[view.buffer]).view(getattr(torch, view.dtype))
        return typed.as_strided(view.shape, view.stride, view.offset)

    def _value(self, arg: Any) -> Any:
        return self._tensor(arg) if isinstance(arg, View) else arg

    def _dispatch(self, index: int, launch: Launch) -> None:
        namespace, name, overload = self._trace.kernel_of(index).name.split(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        kwargs = {k: self._value(v) for k, v in launch.kwargs}
        result = operator(*map(self._value, launch.args), **kwargs)
        if "out" not in kwargs:
            assert launch.outputs[0] is not None
            self._tensor(launch.outputs[0]).copy_(result)

    def _interpret(self, index: int, launch: Launch) -> None:
        kernel = self._trace.kernel_of(index)
        args: list[Any] = []
        for arg in launch.args:
            if isinstance(arg, View):
                args.append(Offset(self.memory[arg.buffer], arg.offset * getattr(torch, arg.dtype).itemsize))
            else:
                args.append(arg)
        scratch = kernel.ptx.partition(".entry")[2].partition(")")[0].count(".param") - len(args)
        result = run(kernel.ptx, kernel.name, launch.grid, launch.block, [*args, *[0] * scratch])
        self.touched[index] = {}
        for place, arg in enumerate(launch.args):
            if isinstance(arg, View):
                name = result.pointers[place, 0][0]
                self.memory[arg.buffer][:] = result.buffers[name].view(np.uint8).reshape(-1)
                self.touched[index][arg.buffer] = result.touched(place)


def random_order(graph: Graph, rng: random.Random, without: Hazard | None = None) -> list[int]:
    """A random topological order, as if edges of one kind did not exist.

    Kernels that check their indices stay behind all that they depend on: a failed check ends the process.
    """
    before: dict[int, set[int]] = {i: set() for i in range(len(graph.trace.launches))}
    ancestors: dict[int, set[int]] = {i: set() for i in before}
    for edge in graph.edges:  # sorted by their ends
        ancestors[edge.dst] |= {edge.src, *ancestors[edge.src]}
        if edge.hazard is not without:
            before[edge.dst].add(edge.src)
    for launch in before:
        kernel = graph.trace.kernel_of(launch)
        if kernel.origin is not Origin.TRITON or "assertfail" in kernel.ptx:
            before[launch] |= ancestors[launch]
    order: list[int] = []
    while len(order) < len(before):
        done = set(order)
        order.append(rng.choice([i for i in before if i not in done and before[i] <= done]))
    return order
