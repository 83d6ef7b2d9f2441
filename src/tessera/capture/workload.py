"""Workload: a callable step with named inputs, state and outputs, built from a `Step` alone.

`fresh` draws new values like those of an example:
  floats     between its minimum and maximum; non-finite values stay
  integers   likewise; sorted rows (positions, offsets, padding masks) stay sorted
  bools      true about as often, never always or never
A constant tensor gets nearby values: 1 becomes 0.5 to 1.5, or 0 and 1 for integers, where a row keeps its
first; `is_mild` keeps such integers.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

import torch

from tessera.capture.operators import check_tensor, parts
from tessera.capture.own import own_launches
from tessera.capture.rng import entered, seeded_state, without_generators
from tessera.ir import Step, Trace

Tensors = Mapping[str, torch.Tensor]
# Inputs and state of one request.
Values = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
# Errors of a program given unsuitable values, or called in an unknown way.
UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Workload:
    step: Step
    module: torch.nn.Module
    # (inputs, state) -> outputs, by name; changes state in place.
    call: Callable[[Tensors, Tensors], dict[str, torch.Tensor]]
    # seed -> inputs of one request.
    make_inputs: Callable[[int], dict[str, torch.Tensor]]
    # seed -> state of one request before this step.
    make_state: Callable[[int], dict[str, torch.Tensor]]
    # (first inputs, run, last outputs) -> inputs of a later run.
    follow: Callable[[Tensors, int, Tensors], dict[str, torch.Tensor]]

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name; a tied weight once, by its first name."""
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        named = dict(part for name, tensor in held.items() for part in parts(name, tensor))
        for tensor in named.values():
            check_tensor(tensor)
        by_storage: dict[int, str] = {}
        return {
            name: tensor.detach()
            for name, tensor in named.items()
            if by_storage.setdefault(tensor.untyped_storage()._cdata, name) == name
        }

    @property
    def roots(self) -> tuple[object, ...]:
        """Objects whose Python state is compared between calls."""
        return (self.module, self.call)

    def changing(self) -> dict[str, torch.Tensor]:
        return {}

    def request(self, seed: int, is_mild: bool = False) -> Values:
        inputs, state = self.make_inputs(seed), self.make_state(seed)
        if seed and self.gives_example:
            return self.fresh(inputs, seed, is_mild), self.fresh(state, seed + 1, is_mild)
        return inputs, state

    @property
    def gives_example(self) -> bool:
        values = (self.make_inputs(seed) or without_generators(self.make_state(seed)) for seed in (0, 1))
        first, other = values
        return all(torch.equal(first[name], other[name]) for name in first)

    def fresh(self, tensors: Tensors, seed: int, is_mild: bool) -> dict[str, torch.Tensor]:
        return {**tensors, **fresh(without_generators(tensors), seed, is_mild)}

    def varied(self) -> "tuple[Self, str]":
        """If the program raises on fresh values: milder ones, then its example."""
        if not self.gives_example:
            return self, "drawn by the model's own maker of inputs"
        for is_mild in (False, True):
            with suppress(*UNFIT):
                self.run(*self.request(1, is_mild))
                return self._fresh_for_all(is_mild), "drawn like the example"
        return self, "the example's own: the model raises on others"

    def _fresh_for_all(self, is_mild: bool) -> Self:
        return replace(
            self,
            make_inputs=lambda seed: self.request(seed, is_mild)[0],
            make_state=lambda seed: self.request(seed, is_mild)[1],
        )

    def run(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        with torch.no_grad(), own_launches(), entered(state):
            return self.call(inputs, without_generators(state))

    def drawing(self, trace: Trace) -> Self:
        names = [b.name for b in trace.buffers if b.is_generator]
        if not names or set(names) <= set(self.make_state(0)):
            return self

        def make_state(seed: int) -> dict[str, torch.Tensor]:
            return {**self.make_state(seed), **{name: seeded_state(name, seed) for name in names}}

        return replace(self, make_state=make_state)


def move(module: torch.nn.Module, device: str | torch.device) -> None:
    """Does nothing if it is there: packed weights cannot move while anything, such as a fake mode, refers to
    them weakly.
    """
    place = torch.empty(0, device=device).device
    if any(tensor.device != place for tensor in chain(module.parameters(), module.buffers())):
        module.to(place)


def on_device(workload: Workload, device: str) -> Workload:
    """Moves the module itself."""
    move(workload.module, device)

    def moved(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    return replace(
        workload,
        make_inputs=lambda seed: moved(workload.make_inputs(seed)),
        make_state=lambda seed: moved(workload.make_state(seed)),
    )


def fresh(example: Mapping[str, torch.Tensor], seed: int, is_mild: bool = False) -> dict[str, torch.Tensor]:
    return {
        name: fresh_tensor(tensor, seed * 1_000 + place, is_mild)
        for place, (name, tensor) in enumerate(example.items())
    }


def fresh_tensor(example: torch.Tensor, seed: int, is_mild: bool = False) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if example.is_complex():
        parts = torch.view_as_real(example.cpu())
        return torch.view_as_complex(_floats(parts, random)).to(example.device)
    old = example.detach().cpu()
    if not old.numel():
        return example.detach().clone()
    if old.dtype is torch.bool:
        share = float(old.float().mean())
        values = torch.rand(old.shape, generator=random) < min(max(share, 0.25), 0.75)
    elif old.is_floating_point():
        values = _floats(old, random)
    else:
        values = _integers(old.long(), random, is_mild)
    return values.to(old.dtype).to(example.device)


def _floats(old: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    wide = old.float()
    is_finite = wide.isfinite()
    finite = wide[is_finite]
    if not finite.numel():
        return old.clone()
    if set(finite.unique().tolist()) == {0.0, 1.0}:  # a mask
        values = _integers(wide.nan_to_num(0, 0, 0).long(), random, False).float()
    else:
        low, high = float(finite.min()), float(finite.max())
        share = torch.rand(old.shape, generator=random)
        if low < high:
            values = low + (high - low) * share
        else:
            values = low * (0.5 + share) if low else torch.randn(old.shape, generator=random)
    return torch.where(is_finite, values, wide).to(old.dtype)


def _integers(old: torch.Tensor, random: torch.Generator, is_mild: bool) -> torch.Tensor:
    low, high = int(old.min()), int(old.max())
    if low == high:
        if is_mild:
            return old.clone()
        low, high = min(low, 0), max(high, 1)
    values = torch.randint(low, high + 1, old.shape, generator=random)
    if old.dim() == 0 or old.shape[-1] < 2:
        return values
    steps = old.diff(dim=-1)
    falls, rises = bool((steps <= 0).all()), bool((steps >= 0).all())
    if falls or rises:
        values = values.sort(-1, descending=falls).values
        values[..., 0] = old[..., 0]
        if not falls:
            values[..., -1] = old[..., -1]
    return values
