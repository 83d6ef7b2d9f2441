"""Capture of any callable over tensors.

    trace = tessera.capture(fn, *args, **kwargs)

Tensors are found and named without any help:
  inputs   in the arguments, however nested in lists, tuples and dicts: the parameter's name and the path to
           the tensor ("cache.0.keys"); `arg0`, `arg1`, ... where the callable has no names to offer
  weights  in the modules that the callable is, is bound to, closes over, names as a global or is given (see
           `holders`), by their names there; other tensors it reaches, by the variable's name
  state    those of all these that the call changes in place
  outputs  what the call returns, any nest of tensors; a result that is memory the call was given is not an
           output of the step but stays what it is

What a call changes is found by running it once. Every storage is saved just before its first write and put
back after, so the caller's tensors are left as they were. Tensors that share memory are one buffer (see
`blocks`). Values that are not tensors are fixed in the trace, as they are when torch traces.

A call runs under `no_grad`, unless it reaches an optimiser or differentiates: then it is a training step.
Parameters that it updates, moments and step counts are state; so are gradients that add up from call to call.
Gradients that every call makes anew are temporaries, and gone after it.

Refused by name: a call that replaces or adds tensors where they are held instead of changing them in place
(as the first step of most optimisers does), that resizes an argument, that changes a tensor which nothing but
a closure holds, or an optimiser's settings on the host.

`workload(fn, *args, **kwargs)` is the same call as a step that can be run again, here or by workers.
"""

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera.capture.call import FunctionCall
from tessera.capture.record import record
from tessera.capture.workload import Tensors, Workload
from tessera.ir import Step, Trace

KIND = "call"


def capture(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
    """What `fn(*args, **kwargs)` launches. The arguments and the modules are left as they were."""
    return record(workload(fn, *args, **kwargs))


class CallablePackage(types.ModuleType):
    """A package that is called like the function it is named after: `tessera.capture(fn, *args)`."""

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Trace:
        """See `tessera.capture.function.capture`."""
        return capture(fn, *args, **kwargs)


def make_callable(package: str) -> None:
    """Lets an imported package be called; Python allows a module's class to be exchanged for this purpose."""
    sys.modules[package].__class__ = CallablePackage


@dataclass(frozen=True, kw_only=True)
class FunctionWorkload(Workload):
    """A call as a step. `make_inputs` and `make_state` give the values of the call for every seed."""

    function: "FunctionCall"

    @property
    def roots(self) -> tuple[object, ...]:
        """The callable itself, and arguments that are no tensors."""
        return self.function.roots

    def changing(self) -> dict[str, torch.Tensor]:
        """The tensors that were given, and those that are held and changed."""
        return self.function.changing()

    def fresh(self, tensors: Tensors, seed: int, is_mild: bool) -> dict[str, torch.Tensor]:
        """Other values for the tensors that lie in the step's memory."""
        return self.function.fresh(tensors, seed, is_mild)

    def weights(self) -> dict[str, torch.Tensor]:
        """What the call reads and never changes, by name."""
        return self.function.weights()


def workload(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FunctionWorkload:
    """The call as a step that can be recorded and run again."""
    function = FunctionCall(fn, args, kwargs)
    given = function.bind(args, kwargs)
    example = {name: tensor.clone() for name, tensor in (given.inputs | given.state).items()}

    def copies(names: Sequence[str]) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda seed: {name: example[name].clone() for name in names}

    step = Step(_name_of(fn), KIND, _batch(given.tensors), 1)
    return FunctionWorkload(
        step=step,
        module=function.module,
        call=function.call,
        make_inputs=copies(list(given.inputs)),
        make_state=copies(list(given.state)),
        follow=lambda first, run, last: dict(first),
        function=function,
    )


def _name_of(fn: Callable[..., Any]) -> str:
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    owner = getattr(fn, "__self__", None)
    prefix = f"{type(owner).__name__}." if isinstance(owner, torch.nn.Module) else ""
    return prefix + getattr(fn, "__name__", type(fn).__name__)


def _batch(tensors: Sequence[torch.Tensor]) -> int:
    """Rows of the first tensor that has any."""
    return next((int(t.shape[0]) for t in tensors if t.dim() and t.shape[0]), 1)
