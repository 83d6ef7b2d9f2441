"""The tiny model of every family, scattered over worker processes: the reference bits in every mode."""

import functools
import random
from dataclasses import replace

import pytest
import torch

import families
from factories import make_cluster, make_plan
from models import random_placement
from sampling import one_of_each, some_of
from tessera.cli.run import is_equal
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import ReferenceRun, UnitRequest, make_unit, run_reference
from tessera.ir import Plan, WorkUnit

# The steps of one request of each family.
UNITS = {
    "tiny-llama": ("prefill", "decode"),
    "tiny-gpt-oss": ("prefill", "decode"),
    "tiny-mamba": ("prefill", "decode"),
    "tiny-qwen2.5-vl": ("prefill", "decode"),
    "tiny-sd3.5": ("denoise",),
}
REQUESTS = 2


@functools.cache
def unit(model: str) -> WorkUnit:
    """One request's steps; two runs of the last."""
    kinds = UNITS[model]
    return make_unit([families.trace(model, kind) for kind in kinds], [1] * (len(kinds) - 1) + [2])


@functools.cache
def requests(model: str) -> tuple[UnitRequest, ...]:
    """Requests of their own seeds."""
    workloads = [families.workload(model, kind) for kind in UNITS[model]]
    return tuple(UnitRequest(workloads, workloads[0].make_inputs(i), i) for i in range(REQUESTS))


@functools.cache
def references(model: str) -> tuple[ReferenceRun, ...]:
    """The model's own run."""
    return tuple(run_reference(unit(model), request) for request in requests(model))


def plan(model: str) -> Plan:
    """Blocks of launches on alternating devices, cut at random."""
    rng = random.Random(model)
    found = unit(model)
    placements = [random_placement(g, rng, 2) for g in found.graphs]
    return make_plan([g.trace for g in found.graphs], [placements], found.counts, make_cluster(2))


ALL = [(model, transport) for model in UNITS for transport in ("shm", "host")]
CASES = one_of_each(ALL, lambda case: case[0])


@pytest.mark.parametrize(("model", "transport"), some_of(CASES, CASES[1:]))  # Llama: test_offline
def test_a_divided_family_gives_the_reference_bits(model: str, transport: str) -> None:
    """Through shared memory or sockets, not a bit changes."""
    weights = requests(model)[0].workloads[0].weights()
    with WorkerStepper([plan(model)], weights, transport=transport) as stepper:
        results = run_offline(stepper, requests(model)).results

    assert all(is_equal(one, other) for one, other in zip(references(model), results, strict=True))


def test_a_reference_run_has_the_state_of_the_last_step() -> None:
    """As workers return it: a step before may draw from a generator that the last one does not have."""

    class Drawing(UnitRequest):
        def state(self) -> dict[str, torch.Tensor]:
            return {"latents": torch.zeros(2), "rng:cpu": torch.zeros(2)}

    once = replace(unit("tiny-sd3.5"), counts=(1,))
    ran = run_reference(once, Drawing((), {}, 0), lambda step, inputs, state: {})

    assert {"latents"} == set(ran.state)
