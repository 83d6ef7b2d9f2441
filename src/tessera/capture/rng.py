"""Random generators as state of a step.

A launch that draws reads and writes the state of its device's default generator: a buffer "rng:cpu" or
"rng:cuda:0". So draws keep their order and repeat on another device. A request's generator is seeded by its
seed; a captured call starts with the program's state (`entered`).

Refused with the program's line: other generators, and steps that seed or draw without a declaring operator
(`Draws` compares states around every draw).
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from tessera.capture.operators import argument_of, fail
from tessera.ir import GENERATOR
from tessera.kernels.tensors import default_generator

Tensors = Mapping[str, torch.Tensor]

# Seed and offset.
CUDA_STATE_BYTES = 16


def generator_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    if not _may_draw(func):
        return ""
    if argument_of(func, "dropout_p", args, kwargs) == 0.0:  # attention without dropout
        return ""
    if argument_of(func, "generator", args, kwargs) is not None:
        fail(f"{func} draws from a generator of its own", "Draw from the default one: torch.manual_seed.")
    devices = (v.device for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
    device = kwargs.get("device") or next(devices, torch.device("cpu"))
    return f"{GENERATOR}{device.type}" + (f":{device.index or 0}" if device.type != "cpu" else "")


@functools.cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def size_of(name: str) -> int:
    return CUDA_STATE_BYTES if _device(name).type != "cpu" else torch.default_generator.get_state().numel()


def state_now(name: str) -> torch.Tensor:
    with no_dispatch():
        return default_generator(name).get_state().clone()


def set_state(name: str, state: torch.Tensor) -> None:
    with no_dispatch():
        default_generator(name).set_state(state.detach().reshape(-1).view(torch.uint8).cpu())


def seeded_state(name: str, seed: int) -> torch.Tensor:
    with no_dispatch():
        return torch.Generator(_device(name)).manual_seed(seed).get_state().clone()


@contextmanager
def entered(state: Tensors) -> Iterator[None]:
    names = [name for name in state if name.startswith(GENERATOR) and not isinstance(state[name], FakeTensor)]
    before = {name: state_now(name) for name in names}
    for name in names:
        set_state(name, state[name])
    try:
        yield
    finally:
        for name in names:
            with no_dispatch():
                state[name].copy_(state_now(name))
            set_state(name, before[name])


def forked() -> AbstractContextManager[None]:
    used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(devices=list(used))


def without_generators(state: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith(GENERATOR)}


class Draws:
    def __init__(self, is_fake: bool) -> None:
        self._is_fake = is_fake
        self._states: dict[str, torch.Tensor] = {} if is_fake else {"rng:cpu": state_now("rng:cpu")}
        self.names: list[str] = []

    def before(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
        if not self._is_fake:
            self._check(name)

    def after(self, name: str) -> None:
        if not self._is_fake:
            self._states[name] = state_now(name)

    def check(self) -> None:
        for name in self._states:
            self._check(name)

    def _check(self, name: str) -> None:
        if name in self._states and not torch.equal(self._states[name], state_now(name)):
            message = (
                f"the step seeds the generator {name}, or draws from it without an operator that says so"
            )
            remedy = "Seed before the step; register a drawing operator with the tag nondeterministic_seeded."
            fail(message, remedy)


def _device(name: str) -> torch.device:
    return torch.device(name.removeprefix(GENERATOR))
