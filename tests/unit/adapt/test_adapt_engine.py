"""The monitor beside a real run: worker processes, the wall clock, and the model itself's bits."""

import random
from dataclasses import replace
from typing import Any

import models
from factories import make_cluster, make_plan
from fake_system import FakeSystem
from tessera.adapt.capability import Capability, Point
from tessera.adapt.controller import Controller
from tessera.adapt.monitor import Monitor
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, run_reference
from tessera.ir import Plan
from tessera.kernels.tensors import same_bits

NUM = 8
# Requests per second far below what tiny models do, so that a queue of eight is a crowd.
QUICK = Capability("quick", 1.0, (Point(0.1, 1.0, 0.1), Point(0.9, 1.0, 0.9)))
WIDE = Capability("wide", 1e4, (Point(0.1, 2.0, 0.2), Point(9e3, 2.0, 100.0)))


def scattered(seed: int) -> Plan:
    """Launches at random on two devices."""
    rng = random.Random(seed)
    graphs = models.unit().graphs
    placement = [models.random_placement(g, rng, 2) for g in graphs]
    plan = make_plan(
        [g.trace for g in graphs], [placement], models.unit().counts, make_cluster(2), microbatches=2
    )
    return replace(plan, policy=("quick", "wide")[seed])


def crowd(live: Controller[Any]) -> None:
    """Three come for each that is done."""
    for _ in range(3):
        live.arrived()


def test_a_switch_in_flight_changes_no_bit() -> None:
    """Some begin under one policy, a crowd comes, the rest runs under the other; all bits are right."""
    workloads = [models.workload("prefill"), models.workload("decode")]
    requests = [UnitRequest(workloads, workloads[0].make_inputs(i), i) for i in range(NUM)]
    plans = [scattered(0), scattered(1)]
    system = FakeSystem()
    live = Controller(system, plans, Monitor([QUICK, WIDE]))
    with WorkerStepper(plans, workloads[0].weights()) as stepper:
        run = run_offline(
            stepper,
            requests,
            policy=lambda num_done: ("quick", "wide").index(system.switched[-1]),
            on_done=lambda number: crowd(live),
        )
    results = run.results

    assert 1 == len(live.decisions)
    assert {0, 1} == {result.policy for result in results}
    for request, result in zip(requests, results, strict=True):
        reference = run_reference(models.unit(), request)
        for one, other in zip(reference.outputs, result.outputs, strict=True):
            assert all(same_bits(one[name], other[name]) for name in one)
