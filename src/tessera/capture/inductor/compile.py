"""A step compiled by Inductor, with the compiled code's own callable at hand.

The step is traced at the dispatcher (make_fx on fakes of the real tensors, weights as arguments), so there
are no graph breaks: what cannot be traced is an error. AOTAutograd then makes it functional and Inductor
compiles it once. `Code.run` calls the result as any compiled model is called; `Code.watched` calls it with
a context around the innermost callable, the one that launches.

Settings that differ from Inductor's own: the static launcher is off (it drops the PTX), caches are off (a
cached kernel may have been made with other settings), and no memory is used twice (`allow_buffer_reuse`,
`inplace_buffers`), which would tie launches together that have nothing to do with one another.

Linear layers are traced as one matrix product over all rows. A fake tensor keeps old strides of dimensions
of size 1, which would make a batched product of a decode step's output projection and read the weight once
a row. Attention becomes the operator that every GPU of an unlike set can run, as in the torch front end,
unless `portable` is False: then it is the one torch prefers on this GPU, which may run nowhere else.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from tessera.capture.attention import TargetAttention
from tessera.capture.workload import Tensors, Workload
from tessera.errors import CaptureError

# Set where this torch has them: the static launcher has had two names.
CONFIG: dict[str, Any] = {
    "use_static_triton_launcher": False,
    "use_static_cuda_launcher": False,
    "fx_graph_cache": False,
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
}


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


class Code:
    """One step, compiled for the shapes of its example."""

    def __init__(self, names: Sequence[Sequence[str]], outputs: Sequence[str], call: Any, inner: Any) -> None:
        self._names, self._outputs, self._call, self._inner = names, outputs, call, inner

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors the compiled code holds that nobody gave it."""
        held = self._inner.constants or {}
        return [t for t in held.values() if isinstance(t, torch.Tensor)]

    def run(self, weights: Tensors, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        """Calls the compiled step."""
        groups = zip(self._names, (weights, inputs, state), strict=True)
        flat = [tensors[name] for names, tensors in groups for name in names]
        with torch.no_grad():
            return dict(zip(self._outputs, self._call(*flat), strict=True))

    @contextlib.contextmanager
    def watched(self, around: Callable[[Sequence[Any]], AbstractContextManager[Any]]) -> Iterator[None]:
        """While active, `around(its arguments)` is entered for each call of the innermost callable."""
        innermost = self._inner.current_callable

        def call(args: Sequence[Any]) -> Any:
            with around(list(args)):
                return innermost(args)

        self._inner.current_callable = call
        try:
            yield
        finally:
            self._inner.current_callable = innermost


def inductor_config(**changes: Any) -> AbstractContextManager[Any]:
    """Inductor's settings for a recording, with changes; unknown names are another version's."""
    from torch._inductor import config

    wanted = {k: v for k, v in {**CONFIG, **changes}.items() if _has(config, k)}
    patch: AbstractContextManager[Any] = config.patch(wanted)
    return patch


def _has(config: Any, name: str) -> bool:
    return name in config._config


def compile_step(
    workload: Workload,
    weights: Tensors,
    inputs: Tensors,
    state: Tensors,
    portable: bool = True,
    **changes: Any,
) -> Code:
    """Compiles a step for the shapes, types and device of its inputs, state and weights."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    names = [list(weights), list(inputs), list(state)]
    flat = [*weights.values(), *inputs.values(), *state.values()]
    outputs: list[str] = []
    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    with torch.no_grad(), inductor_config(**changes), functorch_config.patch(enable_autograd_cache=False):
        step = _flat_step(workload, names, outputs)
        with _FoldedLinear(), TargetAttention() if portable else contextlib.nullcontext():
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
        call = compile_fx(graph, flat, inner_compile=inner)
    if len(made) != 1 or not hasattr(made[0], "current_callable"):
        remedy = "Capture it with the torch front end."
        raise CaptureError(f"Inductor made {len(made)} programs of one step", remedy)
    return Code(names, outputs, call, made[0])


def _flat_step(
    workload: Workload, names: Sequence[Sequence[str]], outputs: list[str]
) -> Callable[..., list[torch.Tensor]]:
    """The step as a function of a list of tensors; the names of what it returns go to `outputs`."""
    step = _Step(workload)

    def call(*flat: torch.Tensor) -> list[torch.Tensor]:
        given = iter(flat)
        weights, inputs, state = ({name: next(given) for name in group} for group in names)
        held = {f"model.{name}": tensor for name, tensor in weights.items()}
        results = torch.func.functional_call(step, held, (inputs, state))
        outputs[:] = list(results)
        return list(results.values())

    return call
