"""trace_step: a step -> one torch.fx graph of its operators, and where the model's repeated blocks begin.

The step runs once on fake tensors while every operator that reaches the dispatcher becomes a node, so there
are no graph breaks: what cannot be traced is refused with its line. The graph is as torch's own tracer would
give it, in a fraction of the time, since shapes that have been seen are not computed again (see `shapes`).

Linear layers are traced as one matrix product over all rows. A fake tensor keeps old strides of dimensions
of size 1, which would make a batched product of a decode step's output projection and read the weight once
a row. Attention becomes the operator that every GPU of an unlike set can run, as in the torch front end,
unless `portable` is False: then it is the one torch prefers on this GPU, which may run nowhere else.
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.capture import fake
from tessera.capture.fake import TargetAttention
from tessera.capture.recorder import UNRECORDABLE
from tessera.capture.refuse import check_operator, explain, fail, insisting
from tessera.capture.schema import has_wrappers, is_wrapper
from tessera.capture.shapes import Run, uncollected
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError


@dataclass(frozen=True)
class Traced:
    """A step as a graph: its arguments are the tensors given, in order."""

    graph: torch.fx.Graph
    # Tensors that the step holds and nobody gave it, by the attribute that stands for them.
    constants: dict[str, torch.Tensor]
    # What each node returned.
    values: dict[torch.fx.Node, Any]
    # Nodes before which a block of the model begins or ends, as places in the graph's order.
    borders: tuple[int, ...]
    # Results by name, as nodes.
    outputs: dict[str, torch.fx.Node]


def trace_step(
    workload: Workload, given: Sequence[Tensors], mode: FakeTensorMode, portable: bool = True
) -> Traced:
    """Traces a step; `given` are the fake weights, inputs and state of `mode`."""
    if any(map(is_wrapper, workload.module.parameters())):
        raise CaptureError("the model has weights that wrap others", "Capture it without --compiled.")
    tracer = _Tracer(fake.runner(mode))
    for tensors in given:
        for name, tensor in tensors.items():
            tracer.take(name, tensor)
    weights, inputs, state = given
    step = _Step(workload)
    held = {f"model.{name}": tensor for name, tensor in weights.items()}
    attention = TargetAttention() if portable else contextlib.nullcontext()
    seen = _borders(workload.module, tracer)
    with torch.no_grad(), uncollected(), mode, _FoldedLinear(), attention, seen, insisting(), tracer:
        results = torch.func.functional_call(step, held, (inputs, state))
    outputs = {name: tracer.node(tensor) for name, tensor in results.items()}
    tracer.graph.output(tuple(outputs.values()))
    return Traced(tracer.graph, tracer.constants, tracer.values, tuple(tracer.borders), outputs)


class _FoldedLinear(TorchFunctionMode):
    """While entered, a linear layer sees one matrix of rows, however many dimensions its input has."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear or args[0].dim() < 3:
            return func(*args, **kwargs)
        rows = func(args[0].reshape(-1, args[0].shape[-1]), *args[1:], **kwargs)
        return rows.view(*args[0].shape[:-1], -1)


class _Step(torch.nn.Module):
    """The step as a module that holds the model, so that its weights can be given from outside."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self._call = workload.module, workload.call

    def forward(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        return self._call(inputs, state)


class _Tracer(TorchDispatchMode):
    """While active, writes every operator into a graph."""

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._nodes: dict[int, torch.fx.Node] = {}
        self.graph, self.length = torch.fx.Graph(), 0
        self.constants: dict[str, torch.Tensor] = {}
        self.values: dict[torch.fx.Node, Any] = {}  # also keeps the tensors, hence their ids
        self.borders: list[int] = []

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """An argument of the graph."""
        self._know(self.graph.placeholder(name.replace(".", "_").replace(":", "_")), tensor)

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node that stands for a tensor; one that nobody gave is a constant."""
        known = self._nodes.get(id(tensor))
        if known is not None:
            return known
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            fail(
                "a tensor is neither weight, input nor state of the step",
                "Register it on its module with register_buffer.",
            )
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        return self._know(self.graph.create_node("get_attr", name), tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks a fake tensor about itself
            return func(*args, **kwargs)
        if has_wrappers(types):  # their own code runs, and is seen here
            return NotImplemented
        recorded = self._arg(args), {k: self._arg(v) for k, v in kwargs.items()}
        check_operator(func, args, kwargs, _is_unknown)
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.lift_fresh_copy.default
        try:
            result = self._run(func, args, kwargs)
        except UNRECORDABLE as error:
            explain(func, error)
        if not isinstance(result, torch.Tensor | tuple | list | NoneType):  # read from a constant
            return result
        node = self._know(self.graph.call_function(func, *recorded), result)
        if isinstance(result, tuple | list):
            for place, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._know(self.graph.call_function(operator.getitem, (node, place)), item)
        return result

    def _know(self, node: torch.fx.Node, value: Any) -> torch.fx.Node:
        self.values[node] = value
        self.length += 1
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
        return node

    def _arg(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, tuple | list):
            return type(value)([self._arg(item) for item in value])
        return value


def _is_unknown(value: Any) -> bool:
    """True for a tensor without values; one made from Python's numbers has them."""
    return isinstance(value, FakeTensor) and value.constant is None


@contextlib.contextmanager
def _borders(module: torch.nn.Module, tracer: _Tracer) -> Iterator[None]:
    """While entered, the tracer notes where calls of the model's blocks begin and end."""

    def note(*_: Any) -> None:
        tracer.borders.append(tracer.length)

    handles = [
        handle
        for block in _blocks(module)
        for handle in (block.register_forward_pre_hook(note), block.register_forward_hook(note))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules that are made of parts and stand in a list with others of their class."""
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    kinds = Counter(type(child) for child in module.children())
    for child in module.children():
        if is_list and kinds[type(child)] > 1 and any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)
