"""A step compiled by Inductor, region by region, with the compiled code's own callables at hand.

The step is traced (see `trace`) and cut (see `regions`). A region is compiled when it is first called:
AOTAutograd makes it functional and Inductor compiles it, once for all regions that are alike. `Code.run`
calls one after another as any compiled model is called; `Code.watched` does so with a context around each.

Settings that differ from Inductor's own: the static launcher is off (it drops the PTX), caches are off (a
cached kernel may have been made with other settings), and no memory is used twice (`allow_buffer_reuse`,
`inplace_buffers`), which would tie launches together that have nothing to do with one another.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessera.capture.inductor.regions import Region, alike, cut
from tessera.capture.inductor.trace import trace_step
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

# Given the tensors that code holds and nobody gave it.
Around = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Compiled:
    """What regions that are alike are compiled to."""

    call: Callable[..., Sequence[torch.Tensor]]
    constants: tuple[torch.Tensor, ...]


class Code:
    """One step, compiled for the shapes of its example."""

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        regions: Sequence[Region],
        outputs: dict[str, int],
        settings: dict[str, Any],
    ) -> None:
        self._names, self._regions, self._outputs, self._settings = names, regions, outputs, settings
        self._compiled: dict[Any, _Compiled] = {}
        self._around: Around = lambda _: contextlib.nullcontext()

    def run(self, weights: Tensors, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        """Calls the compiled step."""
        groups = zip(self._names, (weights, inputs, state), strict=True)
        values = dict(enumerate(tensors[name] for names, tensors in groups for name in names))
        with torch.no_grad():
            for region in self._regions:
                args = [values[number] for number in region.takes]
                compiled = self._compile(region, args)
                with self._around(compiled.constants):
                    made = compiled.call(*args)
                _check_views(region, args, made)
                values.update(zip(region.gives, made, strict=True))
                for number in region.frees:
                    del values[number]
        return {name: values[number] for name, number in self._outputs.items()}

    @contextlib.contextmanager
    def watched(self, around: Around) -> Iterator[None]:
        """While active, `around(its constants)` is entered for each call of compiled code."""
        before, self._around = self._around, around
        try:
            yield
        finally:
            self._around = before

    def _compile(self, region: Region, args: Sequence[torch.Tensor]) -> _Compiled:
        key = region.key, alike(args)
        if key not in self._compiled:
            self._compiled[key] = _compile(region, args, self._settings)
        return self._compiled[key]


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
    given: tuple[Tensors, Tensors, Tensors],
    mode: FakeTensorMode,
    portable: bool = True,
    **changes: Any,
) -> Code:
    """A step for the shapes, types and device of its weights, inputs and state; `mode` is to trace it in."""
    fakes = [{name: mode.from_tensor(t) for name, t in tensors.items()} for tensors in given]
    traced = trace_step(workload, fakes, mode, portable)
    return Code([list(tensors) for tensors in given], *cut(traced), changes)


def _compile(region: Region, args: Sequence[torch.Tensor], settings: dict[str, Any]) -> _Compiled:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    with inductor_config(**settings), functorch_config.patch(enable_autograd_cache=False):
        call: Any = compile_fx(region.module, list(args), inner_compile=inner)
    if len(made) != 1:
        remedy = "Capture it with the torch front end."
        raise CaptureError(f"Inductor made {len(made)} programs of one", remedy)
    inside = (getattr(made[0], "constants", None) or {}).values()
    held = [t for t in inside if isinstance(t, torch.Tensor)]
    return _Compiled(call, (*region.module.buffers(), *held))


def _check_views(region: Region, args: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
    """What is memory of an argument in the program must be so in the compiled code too."""
    for result, source in region.views:
        if made[result].untyped_storage()._cdata != args[source].untyped_storage()._cdata:
            remedy = "Capture it with the torch front end."
            raise CaptureError("compiled code copies what the program only views", remedy)
