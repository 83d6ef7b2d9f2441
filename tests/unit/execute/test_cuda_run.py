"""Plans tried out and run from start to end, with a stand-in for the GPU."""

import pytest
import torch

import cuda_stub
import models
from factories import make_plan
from tessera.execute.cuda.captured import Captured
from tessera.execute.cuda.measure import measure
from tessera.execute.cuda.pick import try_plans
from tessera.execute.cuda.run import run_plans, try_out
from tessera.execute.engine import RunResult
from tessera.execute.pick import MARGIN, Trial, pick, rate_per_s
from tessera.flow import UnitRequest
from tessera.ir import Cluster, Device, DeviceKind, Link, Plan


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stub.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)


def make_whole(device: int, stretched: bool = False) -> Plan:
    """The tiny Llama wholly on one of two devices of a card."""
    devices = tuple(
        Device(f"cuda:0/{i}", DeviceKind.CUDA, "a100", 1 << 34, is_stretched=stretched) for i in range(2)
    )
    links = tuple(Link(a.name, b.name, "pcie4", 10.0, 25.0) for a in devices for b in devices if a is not b)
    unit = models.unit()
    placement = [[device] * len(g.trace.launches) for g in unit.graphs]
    return make_plan(
        [g.trace for g in unit.graphs], [placement], unit.counts, Cluster(devices, links), slots=2
    )


def make_request(seed: int) -> UnitRequest:
    """A prompt."""
    workloads = [models.workload("prefill"), models.workload("decode")]
    return UnitRequest(workloads, workloads[0].make_inputs(seed), seed)


def weights() -> dict[str, torch.Tensor]:
    """The model's."""
    return models.workload("prefill").weights()


@pytest.mark.parametrize("stretched", [False, True])
def test_a_run_is_compared_and_has_a_timeline(stretched: bool) -> None:
    """Two policies, switched every request: every bit right, spans on both devices, a rate and a scale."""
    plans = [make_whole(device, stretched) for device in range(2)]
    done: list[int] = []
    ran = run_plans(plans, weights(), [make_request(i) for i in range(4)], 1, True, on_done=done.append)

    assert ran.is_equal
    assert [0, 1, 2, 3] == sorted(done)
    assert all(us > 0.0 for us in ran.compute_us.values())
    assert (7, 7) == ran.peak_bytes
    assert (ran.scale.factor > 1.0) == stretched


def test_a_gpu_that_fails_is_told_with_the_results_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared or stamped on a GPU that is gone; every request has its own error."""

    def fail(self: object) -> bool:
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(cuda_stub.Event, "query", fail)
    ran = run_plans([make_whole(0)], weights(), [make_request(i) for i in range(3)], verify=True)

    assert all("device lost" in r.error for r in ran.results)
    assert (None, ()) == (ran.is_equal, ran.timeline.spans)
    assert 1 == len(ran.faults)


def test_plans_are_tried_out_with_enough_requests() -> None:
    """One request is asked for again and again; each plan gets a rate."""
    trials = try_out([make_whole(d) for d in range(2)], weights(), [make_request(0)])

    assert [0, 1] == [t.plan for t in trials]
    assert all(t.per_s > 0.0 for t in trials)


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose bits differ from the undivided run's is reported with what differs."""
    monkeypatch.setattr("tessera.execute.cuda.run.differing", lambda wanted, found: ["logits of run 0"])
    ran = run_plans([make_whole(0)], weights(), [make_request(0)], verify=True)

    assert {0: ["logits of run 0"]} == ran.wrong
    assert not ran.is_equal


def test_the_first_plan_is_kept_unless_another_is_clearly_faster() -> None:
    """A difference within the noise changes nothing."""
    slow, same, fast = Trial(0, "a", 10.0), Trial(1, "b", 10.0 * (1 + MARGIN / 2)), Trial(2, "c", 12.0)

    assert slow == pick([slow, same])
    assert fast == pick([slow, same, fast])


def test_every_plan_is_tried() -> None:
    """Plans loaded together each run all requests, and get a rate."""
    with Captured([make_whole(0), make_whole(1)], weights()) as captured:
        trials = try_plans(captured, [make_request(i) for i in range(3)])

    assert [0, 1] == [t.plan for t in trials]
    assert all(t.per_s > 0.0 for t in trials)


def test_the_rate_counts_neither_the_filling_nor_the_emptying() -> None:
    """Two slots, a second a request, but two for the first of each and half of one for the last."""
    starts = (0.0, 2.0, 3.0, 4.0, 5.0)
    stops = (2.0, 3.0, 4.0, 5.0, 5.5)
    times = list(zip(starts, stops, strict=True))
    results = [RunResult(0, start_s=a + s / 2, stop_s=b + s / 2, slot=s) for a, b in times for s in range(2)]

    assert rate_per_s(results) == pytest.approx(2.0)


def test_slots_with_few_requests_have_a_rate_too() -> None:
    """One request, and two in a row, of two seconds each: half a request a second for either slot."""
    times = ((0, 0.0), (1, 0.0), (1, 2.0))
    results = [RunResult(0, start_s=start, stop_s=start + 2.0, slot=slot) for slot, start in times]

    assert rate_per_s(results) == pytest.approx(1.0)


def test_parts_of_a_card_are_timed_beside_one_another() -> None:
    """Both times are kept: with the other part busy, which is the price, and with it idle."""
    plan = make_whole(0)
    costs, times = measure(plan.unit, plan.cluster, weights(), make_request(0))

    assert all(t.alone_us > 0.0 and t.whole_us > 0.0 for row in times for t in row)
    assert costs[0].total_us(1) == pytest.approx(times[1][0].whole_us, rel=0.01)
