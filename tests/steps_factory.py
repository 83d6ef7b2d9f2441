"""A tiny served model with its plans, made once for all tests that run steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from tessera.execute.stepper import StepDone, Stepper
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Load, Plan
from tessera.profile.devices import parse_devices, wire
from tessera.serve.planning import Prepared, prepare
from tessera.serve.records import ServeSpec
from tessera.serve.step_inputs import Steps
from tessera.serve.steps import ServedModel

DEVICES = "emu:a100,emu:l40s"
ROWS, CAPACITY = 3, 32
# Sizes of a model that reads prompts in parts.
SIZES = (3, 12)
# Inputs of steps by their number.
Script = list[tuple[int, dict[str, torch.Tensor]]]


@cache
def prepared(model: str = "tiny-llama", *policies: str) -> Prepared:
    """Two unlike devices; by default both of them beside one another, and divided for one request."""
    return prepare(
        model,
        wire(parse_devices(DEVICES), ["pcie4"]),
        ServeSpec(
            2,
            ROWS,
            CAPACITY,
            SIZES[-1],
            load=Load(12, 8),
            policies=policies or ("data-parallel", "latency"),
            effort="quick",
        ),
    )


@cache
def plan_by(policy: str, model: str = "tiny-llama") -> Plan:
    """A plan of one policy: that of its first group."""
    return prepared(model, policy).policies[0].plans[0]


def over_both() -> Prepared:
    """A service whose one group needs both devices, so that no loss can be avoided."""
    return prepared("tiny-llama", "attention-ffn")


def built(made: Prepared) -> ServedModel:
    """The model that was prepared, which was not kept from an earlier start."""
    assert isinstance(made.model, ServedModel)
    return made.model


def script(model: ServedModel, seed: int) -> Script:
    """Tokens of some sequences in every size, and again; pages hold what the steps before left there."""
    return [
        (number, workload.make_inputs(seed + run))
        for run in range(2)
        for number, workload in enumerate(model.workloads)
    ]


def done(stepper: Stepper) -> StepDone:
    """The next step that ends; nothing else may happen."""
    event = stepper.take(60.0)
    assert isinstance(event, StepDone), event
    return event


def opened(stepper: Stepper, microbatch: int, policy: int = 0) -> None:
    """A microbatch on the lane whose turn it is."""
    lane = stepper.lanes.take(policy)
    assert lane is not None
    stepper.open(microbatch, lane.number)


def play(stepper: Stepper, microbatch: int, steps: Script) -> list[dict[str, torch.Tensor]]:
    """Outputs of one step after the other in an open microbatch."""
    known = Steps.of(stepper.plans[0])
    outputs = []
    for number, inputs in steps:
        stepper.start(known.call(microbatch, number, inputs))
        outputs.append(dict(done(stepper).outputs))
    return outputs


def is_same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True)
class Local:
    """What a service was prepared from, and its workers."""

    prepared: Prepared
    stepper: WorkerStepper


@contextmanager
def working(prepared: Prepared, transport: str = "auto") -> Iterator[Local]:
    """Workers of this machine."""
    with prepared.workers(transport) as stepper:
        yield Local(prepared, stepper)
