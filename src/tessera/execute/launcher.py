"""Launcher: runs the launches of a trace on the memory of one device.

A result must have the recorded layout. After its first run a launch is bound to the places of its buffers
(`bind`): an operator with an `out` variant writes in place, other results are copied. Not bound: draws of
random numbers, PTX kernels, and launches with a buffer without a fixed place.

A draw runs with the device's default generator set from the generator's buffer (`drawing`), which is then
updated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.execute.memory import Memory, Storage, tensor_of
from tessera.ir import Arg, Launch, Origin, Symbol, Trace, View
from tessera.kernels import MODULES
from tessera.kernels.launch import run_kernel
from tessera.kernels.tensors import default_generator


class Launcher:
    def __init__(self, trace: Trace, device: torch.device) -> None:
        self._trace, self._device = trace, device

    def run(self, index: int, memory: Memory) -> None:
        bound = memory.calls.get(index)
        if bound is not None:
            bound()
            return
        launch, kernel = self._trace.launches[index], self._trace.kernel_of(index)
        generator = generator_buffer(self._trace, launch)
        if kernel.origin is not Origin.ATEN:
            self._run_kernel(index, launch, memory)
        elif generator is not None:
            with drawing(self._trace.buffers[generator].name, memory.get(generator)):
                self._run_operator(index, launch, memory)
        else:
            self._run_operator(index, launch, memory)
            if all(memory.is_fixed(view.buffer) for view in launch.views):
                memory.calls[index] = self._bind(index, launch, memory)

    def _run_operator(self, index: int, launch: Launch, memory: Memory) -> None:
        args, kwargs = self._arguments(launch, memory)
        result = self._operator(index, launch)(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        for place, view in _results_to_keep(launch):
            self._check(index, results[place], view)
            memory.put(view.buffer, results[place].untyped_storage())

    def _operator(self, index: int, launch: Launch) -> Any:
        operator = find_operator(self._trace.kernel_of(index).name)
        # It returns what its backward reads only while gradients are on.
        is_training = operator is torch.ops.aten.mkldnn_rnn_layer.default and launch.outputs[-1] is not None
        return torch.enable_grad()(operator) if is_training else operator

    def _bind(self, index: int, launch: Launch, memory: Memory) -> Callable[[], None]:
        name = self._trace.kernel_of(index).name
        keep = [(place, tensor_of(memory.get(view.buffer), view)) for place, view in _results_to_keep(launch)]
        return bind(
            self._operator(index, launch), *self._arguments(launch, memory), keep, f"launch {index} ({name})"
        )

    def _run_kernel(self, index: int, launch: Launch, memory: Memory) -> None:
        kernel = self._trace.kernel_of(index)
        if not kernel.ptx:
            remedy = "Capture it again."
            raise WorkerError(f"launch {index} ({kernel.name}) is not an operator and has no PTX", remedy)
        x, y, z = (*launch.grid, 1, 1, 1)[:3]
        u, v, w = (*launch.block, 1, 1, 1)[:3]
        run_kernel(kernel, (x, y, z), (u, v, w), self._arguments(launch, memory)[0])

    def _arguments(self, launch: Launch, memory: Memory) -> tuple[list[Any], dict[str, Any]]:
        # Some operators compute otherwise if two arguments are one tensor.
        tensor = cache(lambda view: tensor_of(memory.get(view.buffer), view))
        kwargs = {name: self._value(arg, tensor) for name, arg in launch.kwargs}
        return [self._value(arg, tensor) for arg in launch.args], kwargs

    def _value(self, arg: Arg, tensor: Callable[[View], torch.Tensor]) -> Any:
        """No closure: one that calls itself holds a launch's memory until garbage is collected."""
        if isinstance(arg, View):
            return tensor(arg)
        if isinstance(arg, tuple):
            return [self._value(item, tensor) for item in arg]
        if isinstance(arg, Symbol) and arg.kind == "complex":
            return complex(arg.name)
        if isinstance(arg, Symbol):  # the recorded device stands for the current one
            return self._device if arg.kind == "device" else getattr(torch, arg.name)
        return arg

    def _check(self, index: int, tensor: torch.Tensor, view: View) -> None:
        layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
        has_size = tensor.untyped_storage().nbytes() == self._trace.buffers[view.buffer].size_bytes
        # A CPU worker copies whole buffers; on a GPU a buffer is the operator's own result.
        is_sized = has_size or self._device.type != "cpu"
        if layout != (view.shape, view.stride, view.offset) or not is_sized:
            name = self._trace.kernel_of(index).name
            raise WorkerError(
                f"launch {index} ({name}) laid out its result as {layout}, the trace has "
                f"{(view.shape, view.stride, view.offset)}",
                "Capture the trace again with this version of torch.",
            )


@cache
def find_operator(name: str) -> Any:
    namespace, operator, overload = name.split(".")
    if namespace == "tessera" and operator in MODULES:
        import_module(MODULES[operator])
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    except AttributeError as error:
        remedy = "Import the package that registers it, or use the torch version of the capture."
        raise WorkerError(f"this torch has no operator {name}", remedy) from error


def _results_to_keep(launch: Launch) -> list[tuple[int, View]]:
    """Aliases of arguments are in place."""
    args = {a.buffer for a in launch.accesses if a.read}
    written = {a.buffer for a in launch.accesses if a.write} - args
    # An empty result touches no byte, but later launches still name it.
    return [
        (place, view)
        for place, view in enumerate(launch.outputs)
        if view is not None and (view.buffer in written or view.num_elements == 0)
    ]


def bind(
    operator: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keep: Sequence[tuple[int, torch.Tensor]],
    name: str,
) -> Callable[[], None]:
    """`keep`: results by number, and the places that they are written to."""
    if not keep:
        return lambda: operator(*args, **kwargs)
    # Where a stride is 0, elements share memory, which torch refuses to write: the first of them is copied.
    apart = [tuple(slice(None) if step else slice(1) for step in held.stride()) for _, held in keep]
    is_whole = all(step for _, held in keep for step in held.stride())
    if is_whole and [number for number, _ in keep] == [0] and (out := out_variant(operator)) is not None:
        return _written(out, args, kwargs, keep[0][1], name)
    copies = [
        (number, held.shape, held[part], part) for (number, held), part in zip(keep, apart, strict=True)
    ]

    def call() -> None:
        result = operator(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        for number, shape, place, part in copies:
            if results[number].shape != shape:
                raise _misshapen(name, results[number], shape)
            place.copy_(results[number] if is_whole else results[number][part])

    return call


def _written(
    out: Any, args: Sequence[Any], kwargs: dict[str, Any], held: torch.Tensor, name: str
) -> Callable[[], None]:
    shape, stride, start = held.shape, held.stride(), held.data_ptr()

    def call() -> None:
        out(*args, **kwargs, out=held)
        # An operator with another result shape resizes or moves `out`.
        if held.shape != shape or held.stride() != stride or held.data_ptr() != start:
            raise _misshapen(name, held, shape)

    return call


def _misshapen(name: str, result: torch.Tensor, shape: torch.Size) -> WorkerError:
    return WorkerError(
        f"{name} gave a result of shape {tuple(result.shape)}, the trace has {tuple(shape)}",
        "Capture the trace again with this version of torch.",
    )


@cache
def out_variant(operator: Any) -> Any | None:
    """The overload with the same arguments and one tensor `out`."""
    schema = operator._schema
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor" or schema.is_mutable:
        return None
    if schema.name.endswith("_loss"):  # mse_loss.out resizes `out` to its input's shape while it runs
        return None
    packet = operator.overloadpacket
    signature = _signature(schema.arguments)
    for overload in packet.overloads():
        variant = getattr(packet, overload)
        arguments = variant._schema.arguments
        outs = [a for a in arguments if a.is_out]
        others = [a for a in arguments if not a.is_out]
        if len(outs) == 1 and outs[0].name == "out" and _signature(others) == signature:
            return variant
    return None


def _signature(arguments: Sequence[Any]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments]


def generator_buffer(trace: Trace, launch: Launch) -> int | None:
    return next((a.buffer for a in launch.accesses if trace.buffers[a.buffer].is_generator), None)


@contextmanager
def drawing(name: str, state: Storage) -> Iterator[None]:
    generator = default_generator(name)
    before = generator.get_state().clone()
    flat = torch.empty(0, dtype=torch.uint8, device=state.device).set_(state)
    generator.set_state(flat.cpu().clone())
    try:
        yield
        flat.copy_(generator.get_state())
    finally:
        generator.set_state(before)
