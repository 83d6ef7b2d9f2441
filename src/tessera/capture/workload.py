"""Workload: a step that can be called, with what it reads, owns and returns by name.

A workload is built from a `Step` record alone, so a plan can be run from its file: the step says which
model, which shapes and which seed, and `build` makes the same weights again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch

from tessera.capture.own import own_launches
from tessera.capture.refuse import check_tensor
from tessera.capture.rng import entered, seeded_state, without_generators
from tessera.ir import Step, Trace

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """One step of one model."""

    step: Step
    module: torch.nn.Module
    # (inputs, state) -> outputs, all by name; mutates the state's tensors in place.
    call: Callable[[Tensors, Tensors], dict[str, torch.Tensor]]
    # seed -> the inputs of one request.
    make_inputs: Callable[[int], dict[str, torch.Tensor]]
    # seed -> the state one request starts this step with.
    make_state: Callable[[int], dict[str, torch.Tensor]]
    # (the request's first inputs, run, last outputs) -> inputs of a later run of this step.
    follow: Callable[[Tensors, int, Tensors], dict[str, torch.Tensor]]
    # Buffers of the module that the step writes: given as state, hence no weights.
    state_buffers: frozenset[str] = frozenset()

    def weights(self) -> dict[str, torch.Tensor]:
        """The module's parameters and buffers by name; a tied weight appears once, by its first name."""
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for tensor in named.values():
            check_tensor(tensor)
        by_storage: dict[int, str] = {}
        return {
            name: tensor.detach()
            for name, tensor in named.items()
            if name not in self.state_buffers
            and by_storage.setdefault(tensor.untyped_storage()._cdata, name) == name
        }

    def run(self, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        """The undivided run: what every plan's result is compared with."""
        with torch.no_grad(), entered(state), own_launches():
            return self.call(inputs, without_generators(state))

    def drawing(self, trace: Trace) -> Self:
        """The workload whose state holds the generators that its trace draws from; see `rng`."""
        names = [b.name for b in trace.buffers if b.is_generator]
        if not names or set(names) <= set(self.make_state(0)):
            return self

        def make_state(seed: int) -> dict[str, torch.Tensor]:
            return {**self.make_state(seed), **{name: seeded_state(name, seed) for name in names}}

        return replace(self, make_state=make_state)
