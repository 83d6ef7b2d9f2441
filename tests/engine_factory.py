"""A small model with state for tests of the engine: quick to run, divided anywhere, two steps."""

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence

import torch

from factories import make_cluster, make_plan
from models import random_placement
from tessera.capture import Workload, record
from tessera.execute.offline import RunResult
from tessera.flow import ReferenceRun, UnitRequest, make_unit, run_reference
from tessera.ir import Plan, Step, WorkUnit
from tessera.kernels.tensors import same_bits

WIDTH, COUNTS = 16, (1, 3)


class Net(torch.nn.Module):
    """A few layers that remember."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 4) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Every layer reads what the one before left behind; the memory is updated in between."""
        for index, weight in enumerate(self.layers):
            x = torch.tanh(x @ weight) + kept[index]
            kept[index].mul_(0.5).add_(x.mean(0))
        return x


@functools.cache
def workloads() -> tuple[Workload, ...]:
    """The model's first step, and the one that follows on from its outputs."""
    net = Net()

    def call(
        inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"y": net(inputs["x"], state["kept"])}

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))}

    return tuple(
        Workload(
            Step("made", kind, 1, 8),
            net,
            call,
            make_inputs,
            lambda seed: {"kept": torch.zeros(4, WIDTH)},
            lambda first, run, last: {"x": last["y"]},
        )
        for kind in ("prefill", "decode")
    )


@functools.cache
def unit() -> WorkUnit:
    """One run of the first step and three of the second."""
    return make_unit([record(w) for w in workloads()], COUNTS)


def make_requests(num: int) -> list[UnitRequest]:
    """Requests with inputs of their own."""
    return [UnitRequest(workloads(), workloads()[0].make_inputs(i), i) for i in range(num)]


def scattered(rng: random.Random, devices: Sequence[int]) -> list[list[int]]:
    """Every launch on one of these devices."""
    placements = [random_placement(g, rng, len(devices)) for g in unit().graphs]
    return [[devices[d] for d in placement] for placement in placements]


def plan_of(placements: Sequence[Sequence[Sequence[int]]], num_devices: int, microbatches: int = 3) -> Plan:
    """A plan with one lane a placement."""
    traces = [g.trace for g in unit().graphs]
    return make_plan(traces, placements, COUNTS, make_cluster(num_devices), microbatches=microbatches)


@functools.cache
def reference_run(number: int) -> ReferenceRun:
    """What the model gives for a request."""
    return run_reference(unit(), make_requests(number + 1)[number])


def is_right(number: int, result: RunResult) -> bool:
    """True iff every output and the state are the reference run's, bit for bit."""
    reference = reference_run(number)
    return (
        len(reference.outputs) == len(result.outputs)
        and all(
            same_bits(one["y"], other["y"])
            for one, other in zip(reference.outputs, result.outputs, strict=True)
        )
        and all(same_bits(t, result.state[name]) for name, t in reference.state.items())
    )


def with_memory_of(plan: Plan, memory_bytes: int) -> Plan:
    """The plan for devices of this size."""
    devices = tuple(dataclasses.replace(d, memory_bytes=memory_bytes) for d in plan.cluster.devices)
    costs = tuple(dataclasses.replace(c, devices=devices) for c in plan.costs)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, devices=devices), costs=costs)
