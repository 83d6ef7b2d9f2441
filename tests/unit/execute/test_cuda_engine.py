"""The engine for GPUs with a stand-in for the GPU: memory, lanes, policies, state and bookkeeping."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import cuda_stub
import models
from factories import make_plan
from tessera.errors import DeviceMemoryError, MismatchError, WorkerError
from tessera.execute.cuda.captured import Captured
from tessera.execute.cuda.engine import CudaEngine
from tessera.execute.cuda.measure import measure, whole_plan
from tessera.execute.cuda.undivided import Undivided, differing
from tessera.execute.engine import RunResult
from tessera.flow import UnitRequest
from tessera.ir import Cluster, Device, DeviceKind, Link, Plan, Source

CPU = torch.device("cpu")
SLOTS = 3


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stub.install(monkeypatch)


def make_cuda_cluster(num: int = 2, stretched: bool = False, sms: int = 0) -> Cluster:
    """Devices on one card."""
    devices = tuple(
        Device(f"cuda:0/{i}", DeviceKind.CUDA, "a100", 1 << 34, is_stretched=stretched, num_sms=sms)
        for i in range(num)
    )
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, 25.0) for a in devices for b in devices if a is not b)
    return Cluster(devices, links)


def make_scattered(seed: int, cluster: Cluster, lanes: int = 2) -> Plan:
    """Launches of the tiny Llama scattered at random."""
    rng, unit = random.Random(seed), models.unit()
    placements = [
        [models.random_placement(g, rng, len(cluster.devices)) for g in unit.graphs] for _ in range(lanes)
    ]
    return make_plan([g.trace for g in unit.graphs], placements, unit.counts, cluster, slots=SLOTS)


def make_request(seed: int) -> UnitRequest:
    """A prompt."""
    workloads = [models.workload("prefill"), models.workload("decode")]
    return UnitRequest(workloads, workloads[0].make_inputs(seed), seed)


def weights() -> dict[str, torch.Tensor]:
    """The model's."""
    return models.workload("prefill").weights()


def wrong(results: Sequence[RunResult]) -> list[list[str]]:
    """What differs from the undivided run; request i has seed i."""
    reference = Undivided(models.unit(), weights(), CPU)
    found = (differing(reference.run(make_request(i)), r) for i, r in enumerate(results))
    return [names for names in found if names]


@pytest.mark.parametrize(("stretched", "sms"), [(False, 0), (True, 0), (False, 32)])
def test_scattered_launches_give_the_undivided_bits(stretched: bool, sms: int) -> None:
    """Every kind of device on one card: outputs of every run and the final state are equal."""
    plan = make_scattered(1, make_cuda_cluster(2, stretched, sms))
    with Captured([plan], weights()) as captured:
        results = CudaEngine(captured).run([make_request(i) for i in range(4)])

    assert [] == wrong(results)
    assert {0, 1} == {r.lane for r in results}


def test_the_undivided_run_has_the_models_own_bits() -> None:
    """What others are compared with is the model."""
    request = make_request(0)
    state = models.workload("prefill").make_state(0)
    outputs = models.workload("prefill").run(request.inputs(0, 0, {}), state)

    found = Undivided(models.unit(), weights(), CPU).run(request)
    assert all(torch.equal(outputs[n], found.outputs[0][n]) for n in outputs)


def test_plans_are_switched_between_requests() -> None:
    """Three plans over one set of weights and state; each request follows the one it was started under."""
    cluster = make_cuda_cluster()
    plans = [make_scattered(seed, cluster) for seed in range(3)]
    with Captured(plans, weights()) as captured:
        results = CudaEngine(captured).run([make_request(i) for i in range(6)], lambda number: number % 3)

    assert [] == wrong(results)


def test_programs_that_do_the_same_share_a_graph() -> None:
    """The same plan twice needs no more graphs than once."""
    plan = make_scattered(0, make_cuda_cluster())
    with Captured([plan], weights()) as once, Captured([plan, plan], weights()) as twice:
        assert once.num_graphs == twice.num_graphs


def test_a_profiled_run_has_a_span_for_every_launch_and_transfer() -> None:
    """Nothing that was run is missing from the timeline."""
    plan = make_scattered(2, make_cuda_cluster(), lanes=1)
    with Captured([plan], weights(), is_profiled=True) as captured:
        engine = CudaEngine(captured)
        engine.run([make_request(0)])
        timeline = engine.timeline()

    unit = models.unit()
    launches = sum(len(g.trace.launches) * n for g, n in zip(unit.graphs, unit.counts, strict=True))
    assert launches == sum(not s.is_transfer for s in timeline.spans)
    assert any(s.is_transfer for s in timeline.spans)
    assert 0.0 == timeline.spans[0].start_us


def test_measured_costs_are_measured_and_add_up() -> None:
    """Prices of launches are tagged with their source and sum to the step."""
    cluster = make_cuda_cluster()
    costs, times = measure(models.unit(), cluster, weights(), make_request(0))

    assert {Source.MEASURED} == {c.source for cost in costs for row in cost.costs for c in row}
    assert costs[1].total_us(0) == pytest.approx(times[0][1].whole_us, rel=0.01)


def test_state_that_is_kept_is_not_loaded_again() -> None:
    """A slot asked to keep its state starts the next request with it."""
    plan = whole_plan(models.unit(), make_cuda_cluster(), 0)
    with Captured([plan], weights()) as captured:
        CudaEngine(captured).run([make_request(0)])
        (name, storage), *_ = ((k, s) for k, s in captured.slots[0].state.items())
        before = storage.tolist()
        CudaEngine(captured, keeps_results=False, keeps_state=True).run([])
        assert before == captured.slots[0].state[name].tolist()


def test_plans_of_different_work_are_refused() -> None:
    """Graphs over the same state must be of the same steps."""
    one = make_scattered(0, make_cuda_cluster(2))
    other = make_scattered(0, make_cuda_cluster(3))

    with pytest.raises(MismatchError, match="different devices"):
        Captured([one, other], weights())


def test_what_does_not_fit_is_said_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the card, the need and what to lower."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1024, 1024))

    with pytest.raises(DeviceMemoryError, match=r"cuda:0: the run needs .* MiB a slot"):
        Captured([make_scattered(0, make_cuda_cluster())], weights()).__enter__()


def test_a_request_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that times out ends the run with the request, its lane and the devices."""
    monkeypatch.setattr(cuda_stub.Event, "query", lambda self: False)
    plan = whole_plan(models.unit(), make_cuda_cluster(), 0)

    with Captured([plan], weights()) as captured, pytest.raises(WorkerError, match=r"request 0 did not end"):
        CudaEngine(captured, timeout_s=0.05).run([make_request(0)])


class Failing:
    """Events may be asked so often; then the driver's error."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return True


def make_two_slots() -> Plan:
    """Everything on one device, two requests in flight."""
    return replace(whole_plan(models.unit(), make_cuda_cluster(), 0), slots=2)


def test_a_gpu_that_fails_names_the_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's first line, and who was in flight."""
    failing = Failing(0)
    monkeypatch.setattr(cuda_stub.Event, "query", failing.query)

    with Captured([make_two_slots()], weights()) as captured, pytest.raises(WorkerError) as raised:
        CudaEngine(captured).run([make_request(0)])
    assert "illegal memory access was encountered; requests 0 (lane 0)" in str(raised.value)


def test_every_request_that_a_failed_gpu_had_is_reported_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two had ended, two were in flight and two waited: the first two are right, the rest say why not."""
    failing = Failing(2)
    monkeypatch.setattr(cuda_stub.Event, "query", failing.query)
    with Captured([make_two_slots()], weights()) as captured:
        results = CudaEngine(captured).run([make_request(i) for i in range(6)], is_strict=False)

    assert [] == wrong(results[:2])
    assert all("illegal memory access" in r.error for r in results[2:])
    assert ["", ""] == [r.error for r in results[:2]]
    assert all("not run" in r.error for r in results[4:])


def test_results_that_went_down_with_the_gpu_are_reported_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had ended and cannot be read any more is no result."""

    def unreadable(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: unspecified launch failure")

    failing = Failing(1)
    monkeypatch.setattr(cuda_stub.Event, "query", failing.query)
    with Captured([make_two_slots()], weights()) as captured:
        engine = CudaEngine(captured)
        monkeypatch.setattr(torch.Tensor, "cpu", unreadable)
        results = engine.run([make_request(i) for i in range(3)], is_strict=False)

    assert all(r.error and not r.outputs for r in results)


def test_where_memory_runs_out_requests_in_flight_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third cannot be started; the two before it end well, and it is reported failed."""
    with Captured([make_two_slots()], weights()) as captured:
        engine = CudaEngine(captured)
        submit, left = engine.submit, [2]

        def short(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return submit(*args)

        monkeypatch.setattr(engine, "submit", short)
        results = engine.run([make_request(i) for i in range(4)], is_strict=False)

    assert [] == wrong(results[:2])
    assert ["", ""] == [r.error for r in results[:2]]
    assert all("out of memory" in r.error for r in results[2:])


def test_an_input_of_another_shape_is_refused() -> None:
    """Bytes that do not fit are not copied."""
    plan = whole_plan(models.unit(), make_cuda_cluster(), 0)
    request = make_request(0)
    wide = replace(request, first={**request.first, "tokens": torch.zeros(2, 99, dtype=torch.int64)})

    with Captured([plan], weights()) as captured, pytest.raises(WorkerError, match="input 'tokens'"):
        CudaEngine(captured).run([wide])
