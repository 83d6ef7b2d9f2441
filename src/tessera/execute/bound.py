"""Bound: a launch tied to the places of its buffers, so that running it again costs one call of the operator.

A worker runs the same launches on the same memory over and over. The first run goes through `launcher`, which
looks at everything; what is bound then is the operator with its tensors at hand. An operator with one result
and an `out` variant of the same signature writes its result where it belongs; the results of the others are
copied there. Either way a result of another shape than the recorded one is an error.

Not bound: launches that draw random numbers, kernels with PTX, those with a buffer that has no fixed place.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tessera.errors import WorkerError
from tessera.ir import View

Call = Callable[[], None]
Make = Callable[[View], torch.Tensor]


def bind(
    operator: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    keep: Sequence[tuple[int, View]],
    place: Make,
    name: str,
) -> Call:
    """The call of an operator on tensors that stay; `keep` are results with a place of their own."""
    into = [(index, place(view), torch.Size(view.shape)) for index, view in keep]
    if not into:
        return lambda: operator(*args, **kwargs)
    if len(into) == 1 and into[0][0] == 0:
        out = out_variant(operator)
        if out is not None:
            return _written(out, args, kwargs, into[0][1], into[0][2], name)

    def call() -> None:
        result = operator(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        for index, held, shape in into:
            if results[index].shape != shape:
                raise _misshapen(name, results[index], shape)
            held.copy_(results[index])

    return call


def _written(
    out: Any, args: Sequence[Any], kwargs: dict[str, Any], held: torch.Tensor, shape: torch.Size, name: str
) -> Call:
    stride, start = held.stride(), held.data_ptr()

    def call() -> None:
        out(*args, **kwargs, out=held)
        # An operator that finds another shape resizes what it was given, or puts it elsewhere.
        if held.shape != shape or held.stride() != stride or held.data_ptr() != start:
            raise _misshapen(name, held, shape)

    return call


def _misshapen(name: str, found: torch.Tensor, shape: torch.Size) -> WorkerError:
    return WorkerError(
        f"{name} gave a result of shape {tuple(found.shape)}, the trace has {tuple(shape)}",
        "Capture the trace again with this version of torch.",
    )


@cache
def out_variant(operator: Any) -> Any | None:
    """The overload with the same arguments and one tensor `out` to write to; None if there is none."""
    schema = operator._schema
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor" or schema.is_mutable:
        return None
    if schema.name.endswith("_loss"):  # torch's mse_loss.out resizes `out` to its input's shape for a while
        return None
    packet = operator.overloadpacket
    wanted = _signature(schema.arguments)
    for overload in packet.overloads():
        found = getattr(packet, overload)
        arguments = found._schema.arguments
        outs = [a for a in arguments if a.is_out]
        others = [a for a in arguments if not a.is_out]
        if len(outs) == 1 and outs[0].name == "out" and _signature(others) == wanted:
            return found
    return None


def _signature(arguments: Sequence[Any]) -> list[tuple[str, str]]:
    """Names and types in order."""
    return [(a.name, str(a.type)) for a in arguments]
