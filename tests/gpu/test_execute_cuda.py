"""Plans on one GPU, on parts of it and on stretched devices: bit for bit, in time, nothing left behind."""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

import models
from tessera.capture import Workload, build, record
from tessera.capture.inductor import on_device
from tessera.execute.cuda.captured import Captured
from tessera.execute.cuda.engine import CudaEngine
from tessera.execute.cuda.measure import measure, replay_us, whole_plan
from tessera.execute.cuda.undivided import Undivided, differing
from tessera.execute.engine import RunResult
from tessera.flow import UnitRequest, make_unit
from tessera.ir import Cluster, Cost, Costs, Lane, Objective, Placement, Plan, Source, Step, WorkUnit
from tessera.profile import make_cluster, parse_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT, TOKENS, SLOTS = 8, 4, 3
PARTS = "cuda:0/sm=64,cuda:0/sm=32"
STRETCHED = "cuda:0/as=a100,cuda:0/as=l40s"
# Microseconds of every launch on both stretched devices.
TARGETS_US = (30.0, 50.0)


@functools.cache
def workloads() -> tuple[Workload, ...]:
    """The tiny Llama's steps on the GPU."""
    steps = (
        Step("tiny-llama", "prefill", 2, PROMPT, reserve=TOKENS),
        Step("tiny-llama", "decode", 2, PROMPT + TOKENS),
    )
    return tuple(on_device(build(step), "cuda:0") for step in steps)


@functools.cache
def unit() -> WorkUnit:
    """One prefill and its decodes, recorded on the GPU."""
    return make_unit([record(w) for w in workloads()])


def request(seed: int) -> UnitRequest:
    """One request."""
    return UnitRequest(workloads(), workloads()[0].make_inputs(seed), seed)


@functools.cache
def wanted(seed: int) -> RunResult:
    """What it must give."""
    return Undivided(unit(), workloads()[0].weights(), torch.device("cuda:0")).run(request(seed))


def flat_costs(cluster: Cluster) -> tuple[Costs, ...]:
    """The same made-up price for every launch."""
    row = tuple(Cost(us, Source.CLASS, 0.1) for us in TARGETS_US[: len(cluster.devices)])
    return tuple(
        Costs(g.trace.digest, cluster.devices, (row,) * len(g.trace.launches)) for g in unit().graphs
    )


def scattered(devices: str, seed: int = 0, lanes: int = 2) -> Plan:
    """Launches scattered at random: the worst case for transfers."""
    cluster, rng = make_cluster(parse_devices(devices), "pcie4"), random.Random(seed)
    num = len(cluster.devices)
    made = tuple(
        Lane(
            Placement(tuple(tuple(models.random_placement(g, rng, num)) for g in unit().graphs)), 1.0
        )
        for _ in range(lanes)
    )  # fmt: skip
    return replace(
        whole_plan(unit(), cluster, 0),
        costs=flat_costs(cluster),
        objective=Objective.THROUGHPUT,
        lanes=made,
        slots=SLOTS,
    )


def wrong(results: Sequence[RunResult]) -> list[list[str]]:
    """What differs, request by request; request i has seed i % 4."""
    return [d for d in (differing(wanted(i % 4), r) for i, r in enumerate(results)) if d]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def test_the_undivided_launches_give_the_models_own_bits() -> None:
    """What divided runs are compared with is the model itself."""
    state = workloads()[0].make_state(0)
    outputs = workloads()[0].run(request(0).inputs(0, 0, {}), state)

    assert all(torch.equal(outputs[n], wanted(0).outputs[0][n]) for n in outputs)


@pytest.mark.parametrize("devices", ["cuda:0", PARTS, STRETCHED])
def test_scattered_launches_give_the_undivided_bits(devices: str) -> None:
    """On the card, on parts of it and on stretched devices, nothing changes by a bit."""
    with Captured([scattered(devices)], workloads()[0].weights()) as captured:
        results = CudaEngine(captured).run([request(i % 4) for i in range(8)])

    assert [] == wrong(results)
    assert {0, 1} == {r.lane for r in results}


def test_policies_change_between_requests_and_drain_nothing() -> None:
    """Plans loaded together serve requests in any order, over the same weights and state."""
    plans = [scattered(PARTS, seed) for seed in range(3)]
    with Captured(plans, workloads()[0].weights()) as captured:
        results = CudaEngine(captured).run([request(i % 4) for i in range(24)], lambda number: number % 3)

    assert [] == wrong(results)


def test_memory_stays_flat_and_is_given_back() -> None:
    """Requests leave nothing behind, and neither does the engine, but for what libraries keep a stream."""
    plan, weights = scattered(PARTS), workloads()[0].weights()
    requests = [request(i % 4) for i in range(20)]
    after = []
    for _ in range(3):
        with Captured([plan], weights) as captured:
            engine = CudaEngine(captured, keeps_results=False)
            engine.run(requests)
            first = torch.cuda.memory_allocated()
            for _ in range(3):
                engine.run(requests)
            assert first == torch.cuda.memory_allocated()
        del captured, engine
        after.append(torch.cuda.memory_allocated())

    assert after[0] == after[1] == after[2]


def test_a_stretched_step_takes_its_modelled_time() -> None:
    """Every launch of a step on one stretched device lasts for its target; so does the step."""
    cluster = make_cluster(parse_devices(STRETCHED), "pcie4")
    plan = replace(whole_plan(unit(), cluster, 1), costs=flat_costs(cluster))
    with Captured([plan], workloads()[0].weights()) as captured:
        CudaEngine(captured).run([request(0)])
        program = captured.programs[0][0][-1]
        found = replay_us(captured, 0, program)

    target = TARGETS_US[1] * len(unit().graphs[1].trace.launches)
    assert found == pytest.approx(target, rel=0.05)


def test_stretched_devices_work_at_the_same_time() -> None:
    """Two requests, each wholly on its own device, take as long as the slower one."""
    cluster = make_cluster(parse_devices(STRETCHED), "pcie4")
    lanes = tuple(whole_plan(unit(), cluster, d).lanes[0] for d in range(2))
    plan = replace(whole_plan(unit(), cluster, 0), costs=flat_costs(cluster), lanes=lanes, slots=2)
    with Captured([plan], workloads()[0].weights()) as captured:
        engine = CudaEngine(captured, keeps_results=False)
        engine.run([request(0), request(1)])
        results = engine.run([request(0), request(1)])

    launches = sum(len(g.trace.launches) * n for g, n in zip(unit().graphs, unit().counts, strict=True))
    slower = max(TARGETS_US) * launches * 1e-6
    assert max(r.stop_s for r in results) - min(r.start_s for r in results) < 1.25 * slower


def test_one_stretched_device_serves_one_launch_at_a_time() -> None:
    """Two requests on the same device take twice as long as one."""
    cluster = make_cluster(parse_devices(STRETCHED), "pcie4")
    plan = replace(whole_plan(unit(), cluster, 0), costs=flat_costs(cluster), slots=2)
    with Captured([plan], workloads()[0].weights()) as captured:
        engine = CudaEngine(captured, keeps_results=False)
        engine.run([request(0), request(1)])
        results = engine.run([request(0), request(1)])

    launches = sum(len(g.trace.launches) * n for g, n in zip(unit().graphs, unit().counts, strict=True))
    both = 2 * TARGETS_US[0] * launches * 1e-6
    taken = max(r.stop_s for r in results) - min(r.start_s for r in results)
    assert taken == pytest.approx(both, rel=0.15)


def test_a_profiled_run_has_a_span_for_every_launch_and_transfer() -> None:
    """The timeline of what really happened is complete and in order."""
    plan = scattered(PARTS, lanes=1)
    with Captured([plan], workloads()[0].weights(), is_profiled=True) as captured:
        engine = CudaEngine(captured)
        results = engine.run([request(0)])
        timeline = engine.timeline()

    launches = sum(len(g.trace.launches) * n for g, n in zip(unit().graphs, unit().counts, strict=True))
    assert [] == wrong(results)
    assert launches == sum(not s.is_transfer for s in timeline.spans)
    assert any(s.is_transfer for s in timeline.spans)
    assert all(s.stop_us >= s.start_us for s in timeline.spans)


def test_measured_costs_add_up_to_the_step() -> None:
    """Launches timed in their place sum to the whole step, on each part of the card."""
    cluster = make_cluster(parse_devices(PARTS), "pcie4")
    costs, times = measure(unit(), cluster, workloads()[0].weights(), request(0))

    for step, cost in enumerate(costs):
        for device in range(2):
            assert cost.total_us(device) == pytest.approx(times[device][step].whole_us, rel=0.01)
