"""Plans on worker processes of one GPU, on parts of it and on dilated devices: bits, time, faults, memory.

Processes on one card take turns unless CUDA MPS joins them: what needs two at a time is skipped without it.
Under MPS a process that is killed takes its neighbours with it: tests that kill are skipped there.
"""

import functools
import gc
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import models
from reference_stepper import ReferenceStepper
from tessera.capture import Workload, build, record
from tessera.capture.workload import on_device
from tessera.execute import driver
from tessera.execute.cuda.direct import MPS_PIPE, MPS_SHARE
from tessera.execute.cuda.graphs import DeviceGraphs
from tessera.execute.cuda.measure import measure, whole_plan
from tessera.execute.lower import lower
from tessera.execute.messages import Setup
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.processes import FORKSERVER
from tessera.execute.reference import InOrder
from tessera.execute.stepper import SpanLog
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, make_unit
from tessera.ir import Cluster, Cost, Costs, Lane, Objective, Placement, Plan, Source, Step, WorkUnit
from tessera.kernels.tensors import same_bits
from tessera.profile import parse_devices, wire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HAS_MPS = bool(os.environ.get(MPS_PIPE))
beside = pytest.mark.skipif(not HAS_MPS, reason=f"processes on one card take turns unless {MPS_PIPE} is set")
alone = pytest.mark.skipif(HAS_MPS, reason="a process that dies takes its neighbours under CUDA MPS with it")
halves = pytest.mark.skipif(
    not HAS_MPS or os.environ.get(MPS_SHARE) != "50",
    reason=f"NVSHMEM on one card needs {MPS_PIPE} set and {MPS_SHARE}=50",
)

PROMPT, TOKENS, MICROBATCHES = 8, 4, 3
PARTS = "cuda:0/sm=64,cuda:0/sm=32"
DILATED = "cuda:0/as=a100,cuda:0/as=l40s"
# Microseconds of every launch on both dilated devices.
TARGETS_US = (30.0, 50.0)
TIMEOUT_S = 60.0
# What a library may keep on the card, beside what a run needs.
SLACK_BYTES = 16 << 20


@functools.cache
def workloads() -> tuple[Workload, ...]:
    """The tiny Llama's steps: weights on the GPU, inputs and state on the CPU."""
    steps = (
        Step("tiny-llama", "prefill", 2, PROMPT, reserve=TOKENS),
        Step("tiny-llama", "decode", 2, PROMPT + TOKENS),
    )
    return tuple(build(step) for step in steps)


@functools.cache
def on_gpu() -> tuple[Workload, ...]:
    """The same with everything on the GPU."""
    return tuple(on_device(workload, "cuda:0") for workload in workloads())


@functools.cache
def unit() -> WorkUnit:
    """One prefill and its decodes, recorded on the GPU."""
    return make_unit([record(workload) for workload in on_gpu()])


def weights() -> dict[str, torch.Tensor]:
    """On the GPU; workers are handed that very memory."""
    return on_gpu()[0].weights()


def request(seed: int) -> UnitRequest:
    """One request."""
    return UnitRequest(workloads(), workloads()[0].make_inputs(seed), seed)


@functools.cache
def wanted(seed: int) -> RunResult:
    """What the launches give one by one, in program order."""
    plan = whole_plan(unit(), Cluster(parse_devices("cuda:0"), ()), 0)
    run = InOrder([g.trace for g in unit().graphs], weights(), driver.card(0))
    with ReferenceStepper([plan], run, dict) as stepper:
        return run_offline(stepper, [request(seed)]).results[0]


def flat_costs(cluster: Cluster) -> tuple[Costs, ...]:
    """The same made-up price for every launch."""
    row = tuple(Cost(us, Source.CLASS, 0.1) for us in TARGETS_US[: len(cluster.devices)])
    return tuple(
        Costs(g.trace.digest, cluster.devices, (row,) * len(g.trace.launches)) for g in unit().graphs
    )


def scattered(devices: str, seed: int = 0, lanes: int = 2) -> Plan:
    """Launches scattered at random: the worst case for transfers."""
    cluster, rng = wire(parse_devices(devices), ["pcie4"]), random.Random(seed)
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
        policy=f"scattered-{seed}",
        lanes=made,
        microbatches=MICROBATCHES,
    )


def apart(devices: Sequence[int]) -> Plan:
    """A lane for each of these dilated devices, wholly on it."""
    cluster = wire(parse_devices(DILATED), ["pcie4"])
    lanes = tuple(whole_plan(unit(), cluster, d).lanes[0] for d in devices)
    return replace(whole_plan(unit(), cluster, 0), costs=flat_costs(cluster), lanes=lanes, microbatches=2)


def opened(plans: Sequence[Plan], transport: str = "auto", **more: Any) -> WorkerStepper:
    """Workers with these plans."""
    options = {"transport": transport, "timeout_s": TIMEOUT_S, "method": FORKSERVER, **more}
    return WorkerStepper(plans, weights(), **options)


def wrong(results: Sequence[RunResult]) -> list[list[str]]:
    """What differs, request by request; request i has seed i % 4."""
    return [d for d in (differing(wanted(i % 4), r) for i, r in enumerate(results)) if d]


def differing(one: RunResult, other: RunResult) -> list[str]:
    """Outputs and state whose bits differ, or why there are none."""
    if other.error:
        return [other.error]
    found = [
        f"{name} of run {run}"
        for run, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True))
        for name in a
        if not same_bits(a[name].cpu(), b[name].cpu())
    ]
    return found + [f"state {n}" for n, t in one.state.items() if not same_bits(t.cpu(), other.state[n])]


def num_launches() -> int:
    """Launches of one request."""
    return sum(len(g.trace.launches) * n for g, n in zip(unit().graphs, unit().counts, strict=True))


def used_bytes() -> int:
    """Memory of the card used by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


# Bits -------------------------------------------------------------------------------------------------------


def test_the_launches_one_by_one_give_the_models_own_bits() -> None:
    """What divided runs are compared with is the model itself."""
    first = on_gpu()[0]
    outputs = first.run(first.make_inputs(0), first.make_state(0))

    assert all(torch.equal(outputs[n], wanted(0).outputs[0][n]) for n in outputs)


@pytest.mark.parametrize("transport", ["ipc", "host"])
@pytest.mark.parametrize("devices", [DILATED, PARTS])
def test_scattered_launches_give_the_bits_of_one_by_one(devices: str, transport: str) -> None:
    """On dilated devices and on parts of the card, over every transport, nothing changes by a bit."""
    with opened([scattered(devices)], transport) as stepper:
        results = run_offline(stepper, [request(i % 4) for i in range(8)]).results
        moved = sum(stepper.use().moved.values())

    assert [] == wrong(results)
    assert {0, 1} == {r.lane for r in results}
    assert moved > 0


def test_one_worker_on_the_card_gives_the_bits_of_one_by_one() -> None:
    """Without any peer."""
    with opened([scattered("cuda:0", lanes=1)]) as stepper:
        assert [] == wrong(run_offline(stepper, [request(i % 4) for i in range(8)]).results)


@halves
def test_nvshmem_gives_the_bits_of_one_by_one() -> None:
    """Two processing elements on one card, each with its half of it."""
    with opened([scattered(DILATED)], "nvshmem", method="spawn") as stepper:
        assert [] == wrong(run_offline(stepper, [request(i % 4) for i in range(8)]).results)


def test_policies_change_between_requests_and_drain_nothing() -> None:
    """Plans loaded together serve requests in any order, over the same weights and state."""
    with opened([scattered(PARTS, seed, lanes=1) for seed in range(3)]) as stepper:
        results = run_offline(
            stepper, [request(i % 4) for i in range(24)], policy=lambda num: num % 3
        ).results

    assert [] == wrong(results)
    assert {0, 1, 2} == {r.policy for r in results}


def test_plans_are_loaded_while_requests_run() -> None:
    """Requests in flight keep their lanes, later ones follow the new plan, and no worker is started again."""
    with opened([scattered(DILATED, 0, lanes=1)]) as stepper:

        def on_done(number: int) -> None:
            if number == 3:
                stepper.load([scattered(DILATED, 1, lanes=1)])

        results = run_offline(stepper, [request(i % 4) for i in range(12)], on_done=on_done).results
        restarts = [status.restarts for status in stepper.use().devices.values()]

    assert [] == wrong(results)
    assert [0, 0] == restarts


# Time -------------------------------------------------------------------------------------------------------


def test_a_dilated_step_takes_its_modelled_time() -> None:
    """Every launch of a step on one dilated device lasts for its target; so does the step."""
    plan = apart([1])
    traces = [g.trace for g in unit().graphs]
    us = [[TARGETS_US[1]] * len(trace.launches) for trace in traces]
    graphs = DeviceGraphs(Setup(1, plan.cluster, (), (), 1, weights=weights()))
    graphs.add_steps(traces, us)
    graph = graphs.graph(0, graphs.add(lower(plan)[0], (0,))[-1])
    assert graph is not None
    times = []
    with torch.cuda.stream(graphs.buffers[0].origin):
        for _ in range(9):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
    graphs.close()

    assert sorted(times)[4] == pytest.approx(TARGETS_US[1] * len(traces[-1].launches), rel=0.05)


def test_a_measurement_gives_its_memory_back_when_it_ends() -> None:
    """Not when garbage is collected: workers need the card's memory next."""
    card = Cluster(parse_devices("cuda:0"), ())
    measure(unit(), card, weights(), request(0))  # starts libraries, which keep their own
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        measure(unit(), card, weights(), request(0))

        assert before == torch.cuda.memory_allocated()
    finally:
        gc.enable()


def taken_s(plan: Plan) -> float:
    """Two requests at once, after two that are not counted."""
    with opened([plan]) as stepper:
        run_offline(stepper, [request(0), request(1)], is_timed=True)
        results = run_offline(stepper, [request(0), request(1)], is_timed=True).results
    return max(r.stop_s for r in results) - min(r.start_s for r in results)


@beside
def test_dilated_devices_work_at_the_same_time() -> None:
    """Two requests, each wholly on its own device, take little longer than the slower one; not both times."""
    slower, both = (f(TARGETS_US) * num_launches() * 1e-6 for f in (max, sum))

    assert taken_s(apart([0, 1])) < (slower + both) / 2


def test_one_dilated_device_serves_one_launch_at_a_time() -> None:
    """Two requests on the same device take twice as long as one."""
    both = 2 * TARGETS_US[0] * num_launches() * 1e-6

    assert both * 0.95 < taken_s(apart([0])) < both * 1.3


def test_a_profiled_run_has_a_span_for_every_launch_and_transfer() -> None:
    """The timeline of what really happened is complete and in order."""
    plan = scattered(PARTS, lanes=1)
    with opened([plan], is_profiled=True) as stepper:
        stepper.spans = SpanLog(plan)
        results = run_offline(stepper, [request(0)], spans=stepper.spans).results
        timeline = stepper.spans.timeline()

    assert [] == wrong(results)
    assert num_launches() == sum(not s.is_transfer for s in timeline.spans)
    assert any(s.is_transfer for s in timeline.spans)
    assert all(s.stop_us >= s.start_us for s in timeline.spans)


def test_measured_costs_add_up_to_the_step() -> None:
    """Launches timed in their place sum to the whole step, on each part of the card."""
    cluster = wire(parse_devices(PARTS), ["pcie4"])
    costs, times = measure(unit(), cluster, weights(), request(0))

    for step, cost in enumerate(costs):
        for device in range(2):
            assert cost.total_us(device) == pytest.approx(times[device][step].whole_us, rel=0.01)


# Faults -----------------------------------------------------------------------------------------------------


@alone
@pytest.mark.parametrize("transport", ["ipc", "host"])
def test_a_killed_worker_comes_back_and_results_stay_right(transport: str) -> None:
    """Requests in flight start again; its peer stays, and finds the new worker's memory."""
    with opened([scattered(DILATED)], transport) as stepper:
        stays, dies = stepper.plans[0].cluster.names
        pid = stepper.use().devices[dies].pid
        assert pid is not None
        done: list[int] = []

        def on_done(number: int) -> None:
            done.append(number)
            if len(done) == 3:
                os.kill(pid, signal.SIGKILL)

        ran = run_offline(stepper, [request(i % 4) for i in range(16)], on_done=on_done)
        devices = stepper.use().devices

    assert [] == wrong(ran.results)
    assert (0, 1) == (devices[stays].restarts, devices[dies].restarts)
    assert any(dies in fault for fault in ran.faults)
    assert any(result.restarts for result in ran.results)


@alone
def test_a_worker_that_stands_still_is_found_by_the_time_out() -> None:
    """Its peer's graph waits for ever; the loss names the one that is silent, and requests start again."""
    with opened([scattered(DILATED, lanes=1)], "ipc", timeout_s=10.0) as stepper:
        assert [] == wrong(run_offline(stepper, [request(0)]).results)
        name = stepper.plans[0].cluster.names[1]
        pid = stepper.use().devices[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ran = run_offline(stepper, [request(i % 4) for i in range(4)])
        restarts = stepper.use().devices[name].restarts

    assert [] == wrong(ran.results)
    assert 1 == restarts
    assert any(f"device {name}: no answer within 10 s" in fault for fault in ran.faults)


# Memory -----------------------------------------------------------------------------------------------------


def test_memory_stays_flat_and_is_given_back() -> None:
    """Requests leave nothing behind, and neither do workers, of which the second take what the first gave."""
    plan, requests = scattered(PARTS), [request(i % 4) for i in range(20)]
    own, after = [], []
    for _ in range(3):
        with opened([plan]) as stepper:
            run_offline(stepper, requests)
            first = used_bytes()
            for _ in range(3):
                run_offline(stepper, requests)
            assert abs(used_bytes() - first) < SLACK_BYTES
        gc.collect()  # and what tests before this one left in cycles
        own.append(torch.cuda.memory_allocated())
        after.append(used_bytes())

    assert own[0] == own[1] == own[2]
    assert abs(after[1] - after[0]) < SLACK_BYTES
    assert abs(after[2] - after[1]) < SLACK_BYTES
