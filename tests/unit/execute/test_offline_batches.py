"""Lanes of unlike batches on real worker processes, compared bit for bit with the model itself."""

import functools
import multiprocessing
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import models
from batches_factory import mixed_plan
from clocked_stepper import ClockedStepper
from engine_factory import WIDTH, Net
from factories import make_plan
from tessera.capture import Workload, record
from tessera.cli.run import is_equal
from tessera.errors import DeviceMemoryError, MismatchError
from tessera.execute.lower import lower
from tessera.execute.memory import check_fits, footprints, ready_programs
from tessera.execute.offline import RunResult, run_offline, timeline_of
from tessera.execute.stepper import SpanLog
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import BatchRequest, UnitRequest, as_run, make_unit, run_reference
from tessera.ir import Cluster, Lane, Placement, Plan, Step, Variant, verify
from tessera.serve.sequences import Steps

BATCHES, COUNTS = (4, 2), (1, 3)


@functools.cache
def workloads(batch: int) -> tuple[Workload, ...]:
    """Two steps of a small model that remembers something for every row."""
    net = Net()

    def call(
        inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        for index, weight in enumerate(net.layers):
            x = torch.tanh(x @ weight) + state["kept"][index]
            state["kept"][index].mul_(0.5).add_(x)
        return {"y": x}

    def make_inputs(seed: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed))}

    return tuple(
        Workload(
            Step("made", kind, batch, 8),
            net,
            call,
            make_inputs,
            lambda seed: {"kept": torch.zeros(4, batch, WIDTH)},
            lambda first, run, last: {"x": last["y"]},
        )
        for kind in ("prefill", "decode")
    )


def make_requests(num: int) -> list[BatchRequest]:
    """Each at any of the batches."""
    return [BatchRequest([workloads(batch) for batch in BATCHES], seed) for seed in range(num)]


@functools.cache
def variants() -> tuple[Variant, ...]:
    """The steps at two batches, every launch at the same cost."""
    found = []
    for batch in BATCHES:
        unit = make_unit([record(w) for w in workloads(batch)], COUNTS)
        whole = [[0] * len(g.trace.launches) for g in unit.graphs]
        found.append(Variant(unit, make_plan([g.trace for g in unit.graphs], [whole], unit.counts).costs))
    return tuple(found)


def make_mixed(seed: int = 0, microbatches: int = 3, is_apart: bool = False) -> Plan:
    """A lane a batch: launches scattered at random over two devices, or all on a device of its own."""
    rng = random.Random(seed)
    lanes = []
    for number, variant in enumerate(variants()):
        placed = [
            [number] * len(g.trace.launches) if is_apart else models.random_placement(g, rng, 2)
            for g in variant.unit.graphs
        ]
        lanes.append(Lane(Placement(tuple(tuple(step) for step in placed)), 1.0, number))
    first = variants()[0]
    base = make_plan([g.trace for g in first.unit.graphs], [lanes[0].placement.devices], first.unit.counts)
    plan = replace(
        base,
        unit=first.unit,
        lanes=tuple(lanes),
        microbatches=microbatches,
        variants=variants()[1:],
        bound_per_s=2.0,
    )
    verify(plan)
    return plan


def check_equal(
    plan: Plan, requests: Sequence[UnitRequest | BatchRequest], results: Sequence[RunResult]
) -> None:
    """Every result is that of the model itself at the batch of its lane."""
    for request, result in zip(requests, results, strict=True):
        unit, own = as_run(plan, result.lane, request)
        assert is_equal(run_reference(unit, own), result)


def test_scattered_lanes_of_two_batches_give_the_reference_bits() -> None:
    """Each request has the inputs, the state and the tokens of its own lane's batch."""
    plan, requests = make_mixed(), make_requests(8)
    weights = workloads(BATCHES[0])[0].weights()
    log = SpanLog(plan)
    with WorkerStepper([plan], weights) as stepper:
        stepper.spans = log
        results = run_offline(stepper, requests, spans=log).results
    timeline = timeline_of(log, [plan], results)

    check_equal(plan, requests, results)
    assert {0, 1} == {r.lane for r in results}
    for result in results:
        assert {BATCHES[result.lane]} == {t.shape[0] for t in result.outputs[0].values()}
    assert timeline.weights == tuple(BATCHES[r.lane] / BATCHES[0] for r in results)
    assert {"d0", "d1"} == {span.track for span in timeline.spans if not span.is_transfer}


def test_a_lost_device_leaves_the_other_batch() -> None:
    """Requests of its lane start again at the batch of the lane that is left, with that batch's bits."""
    plan, requests = make_mixed(is_apart=True), make_requests(8)
    weights = workloads(BATCHES[0])[0].weights()
    with WorkerStepper([plan], weights, max_failures=1) as stepper:
        victim = next(p for p in multiprocessing.active_children() if p.name == "tessera-d0")
        victim.kill()
        results = run_offline(stepper, requests).results

    check_equal(plan, requests, results)
    assert {1} == {r.lane for r in results}


def test_requests_of_one_batch_are_refused() -> None:
    """They could not say what they are at the other one; nothing is started for them."""
    plan = make_mixed()
    steps = workloads(BATCHES[0])
    with pytest.raises(MismatchError, match="lanes of batch 4, 2"):
        run_offline(ClockedStepper([plan]), [UnitRequest(steps, steps[0].make_inputs(0), 0)])


def test_programs_name_their_steps_among_all_variants() -> None:
    """The second lane's programs are those of the second variant's steps, with its counts and sizes."""
    plan = make_mixed()
    first, second = lower(plan)

    assert {0, 1} == {p.step for p in first}
    assert {2, 3} == {p.step for p in second}
    for programs, variant in zip((first, second), variants(), strict=True):
        steps = [p for p in programs if p.outputs]
        assert variant.unit.counts == tuple(p.count for p in steps)


def test_footprint_is_that_of_the_hungriest_lane_of_each_device() -> None:
    """Weights once, and for every microbatch the arena of the larger batch where that runs."""
    plan = make_mixed(is_apart=True)
    found = footprints([plan], [ready_programs(plan)])
    large, small = found

    assert large.weight_bytes == small.weight_bytes
    assert large.microbatch_bytes > 1.5 * small.microbatch_bytes


def test_memory_that_holds_the_small_batch_only() -> None:
    """Fits where the small batch is on the small device, and is refused the other way round."""
    plan = make_mixed(is_apart=True)
    programs = ready_programs(plan)
    sizes = [f.peak_bytes for f in footprints([plan], [programs])]
    devices = tuple(
        replace(d, memory_bytes=size) for d, size in zip(plan.cluster.devices, sizes, strict=True)
    )
    fitting = replace(plan, cluster=Cluster(devices, plan.cluster.links))
    check_fits([fitting], footprints([fitting], [programs]))

    turned = replace(fitting, cluster=Cluster(devices[::-1], plan.cluster.links))
    with pytest.raises(DeviceMemoryError):
        check_fits([turned], footprints([turned], [programs]))


def test_services_refuse_unlike_batches() -> None:
    """In one line, before anything is started."""
    with pytest.raises(MismatchError, match="a service takes one batch"):
        Steps.of(mixed_plan())
