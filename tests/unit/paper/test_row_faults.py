"""Serving when something changes: another policy, a lost or slow device, wrong costs, too much load."""

from dataclasses import replace

import pytest
from benchmarks.row_service.metrics import LatencyLimit, poisson
from benchmarks.row_service.server import RequestLoad, SimulatedRun, SimulatedServer, load_of, move_s
from benchmarks.row_service.study import Scenario, checked, compare

from factories import make_chain, make_cluster, make_plan, make_trace
from online_factory import RUN_US, alone_plan, at_us, both_plans, serve, split_plan
from tessera.errors import ArrivalsError, MismatchError
from tessera.ir import BufferKind, Plan
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.stepper import Faults, Loss, Truth

STATE_BYTES = 64_000


def home_plan(device: int) -> Plan:
    """One launch that updates 64 KB of state, on one device."""
    trace = make_trace([[(0, 0, STATE_BYTES, "rw")]], {0: BufferKind.STATE}, size_bytes=STATE_BYTES)
    plan = make_plan([trace], [[[device]]])
    return replace(plan, policy=f"on{device}")


def served_with_switches(plans: list[Plan], requests: RequestLoad, *seconds: float) -> SimulatedRun:
    """Goes over from one plan to the other at given times."""
    server = SimulatedServer(plans, requests)
    for number, second in enumerate(seconds, start=1):
        server.at(second, lambda number=number: server.switch(plans[number % 2].policy))  # type: ignore[misc]
    return server.run()


def test_switching_back_and_forth_drains_nothing() -> None:
    """Every request gets all its tokens in one go, however often the policy changes."""
    arrivals = make_arrivals("poisson:20000", 300, 2, "geometric:1,8")
    requests = load_of(split_plan().unit, arrivals, 2)
    times = [n * 1e-3 for n in range(1, 15)]
    served = served_with_switches([alone_plan(), split_plan()], requests, *times)

    assert all(done >= 0.0 for done in served.ledger.done_us)
    assert 0 == served.ledger.num_restarted


def test_requests_keep_the_lane_they_were_admitted_to() -> None:
    """At a switch no state moves: one ends on d0, one that comes after the switch runs on d1."""
    requests = load_of(home_plan(0).unit, at_us(0.0, 20.0, outputs=[5, 2]), 1)
    served = served_with_switches([home_plan(0), home_plan(1)], requests, 15e-6)

    assert served.ledger.done_us == pytest.approx([50.0, 40.0])
    assert served.busy_us[:3] == pytest.approx([50.0, 20.0, 0.0])


def test_requests_go_on_from_what_they_have_when_their_microbatch_is_renewed() -> None:
    """After one decode of 10 us on d0 two requests go to d1, and have the other two there."""
    requests = load_of(home_plan(0).unit, at_us(0.0, 0.0, outputs=[3, 3]), 2)
    served = served_with_switches([home_plan(0), home_plan(1)], requests, 5e-6)

    assert served.ledger.done_us == pytest.approx([30.0, 30.0])
    assert served.busy_us[:2] == pytest.approx([10.0, 20.0])
    assert 0 == served.ledger.num_restarted


def reading_plan(device: int, microbatches: int) -> Plan:
    """A prefill of 10 us and decodes of 10 us with 64 KB of state, on one device."""
    accesses: list[list[tuple[int, int, int, str]]] = [[(0, 0, STATE_BYTES, "rw")]]
    kinds = {0: BufferKind.STATE}
    steps = [make_trace(accesses, kinds, size_bytes=STATE_BYTES, kind=kind) for kind in ("prefill", "decode")]
    plan = make_plan(steps, [[[device], [device]]], counts=[1, 4], microbatches=microbatches)
    return replace(plan, policy=f"on{device}")


def test_the_state_of_a_moved_request_crosses_the_link() -> None:
    """128 us for two; times are in sixteenths of a prefill."""
    plans = [reading_plan(0, microbatches=1), reading_plan(1, microbatches=1)]
    requests = load_of(plans[0].unit, at_us(0.0, 0.0, outputs=[4, 4]), 2)
    served = served_with_switches(plans, requests, 15e-6)
    moved_us = 2 * move_s(plans[0]) * 1e6

    # A short prefill and two decodes on d0, the move, then a decode on d1.
    assert served.ledger.done_us == pytest.approx([30.0 + moved_us] * 2, abs=3 * 10.0 / 16)
    assert 0 == served.ledger.num_restarted


def test_a_switch_to_fewer_microbatches_keeps_all_requests_going() -> None:
    """One of three full microbatches is renewed; the others go on beside it and take no more."""
    plans = [reading_plan(0, microbatches=3), reading_plan(1, microbatches=1)]
    requests = load_of(plans[0].unit, at_us(*[0.0] * 6, outputs=[50] * 6), 2)
    served = served_with_switches(plans, requests, 100e-6)
    alone = SimulatedServer(plans[:1], requests).run()

    assert max(served.ledger.done_us) < max(alone.ledger.done_us)
    assert served.busy_us[1] > 0.0


def test_a_lost_device_takes_down_only_what_runs_on_it() -> None:
    """One of two lanes is left; its request is not touched, the other starts anew there."""
    plan = make_plan([make_chain(4)], [[[0] * 4], [[1] * 4]])
    served = serve(plan, at_us(0.0, 0.0), faults=Faults(losses=(Loss("d1", 20e-6),)))

    assert 1 == served.ledger.num_restarted
    assert sorted(served.ledger.done_us) == pytest.approx([RUN_US, 2 * RUN_US])


def test_requests_wait_for_a_device_that_comes_back() -> None:
    """Without another lane the one that ran starts anew when its device is there again."""
    faults = Faults(losses=(Loss("d1", 20e-6, 100e-6),))
    served = serve(split_plan(), at_us(0.0), faults=faults)

    assert served.ledger.done_us == pytest.approx([100.0 + 50.0], abs=0.1)
    assert (1, 0) == (served.ledger.num_restarted, served.ledger.num_failed)


def test_no_request_is_lost_silently_when_no_lane_is_left() -> None:
    """Without a monitor, requests that no lane can serve are counted as failed, and the report says why."""
    setting = Scenario(poisson(10_000, 50), Faults(losses=(Loss("d1", 1e-3),)), rows=1)
    (report,) = compare([("throughput", split_plan())], setting)

    assert 50 == report.num_finished + report.num_failed
    assert report.num_failed > 0
    assert "never served" in report.notes[0]


def test_a_slow_device_takes_longer_from_then_on() -> None:
    """Four requests in a row of which the last two run at half the speed."""
    faults = Faults(slowdowns=(("d0", 1.5 * RUN_US * 1e-6, 2.0),))
    served = serve(alone_plan(1), at_us(*[0.0] * 4), faults=faults)

    assert served.ledger.done_us == pytest.approx([RUN_US, 2 * RUN_US, 4 * RUN_US, 6 * RUN_US])


def test_noise_misprices_a_kernel_type_alike_everywhere() -> None:
    """The factor depends on seed, kernel and device, and on nothing else."""
    truth = Truth(alone_plan(), 0.2, 3)

    assert truth.factor("gemm", "d0") == Truth(split_plan(), 0.2, 3).factor("gemm", "d0")
    assert truth.factor("gemm", "d0") != truth.factor("gemm", "d1")
    assert 1.0 == Truth(alone_plan()).factor("gemm", "d0")


def test_a_load_past_saturation_is_called_so() -> None:
    """Twice what a plan can do ends, with a sentence that says that the queue grew."""
    setting = Scenario(poisson(2 / RUN_US * 1e6, 500), rows=1)
    (report,) = compare([("latency", alone_plan())], setting)

    assert report.is_saturated
    assert report.capacity_per_s == pytest.approx(1e6 / RUN_US, rel=0.05)
    assert "past saturation" in report.notes[0]


def test_a_load_below_saturation_is_not() -> None:
    """Half of what a plan can do raises no alarm."""
    (report,) = compare([("latency", alone_plan())], Scenario(poisson(0.5 / RUN_US * 1e6, 500), rows=1))

    assert not report.is_saturated
    assert () == report.notes


def test_an_impossible_limit_is_refused() -> None:
    """No request can have its token sooner than alone on an idle system."""
    setting = Scenario(poisson(1000, 10), limits=(LatencyLimit("ttft", 1e-6),), rows=1)

    with pytest.raises(
        ArrivalsError, match=r"ttft of 0.001 ms cannot be met: one request alone takes 0.04 ms"
    ):
        compare([("latency", alone_plan())], setting)


def test_attainment_counts_requests_within_all_limits() -> None:
    """The second of two requests on one microbatch has waited a run too long."""
    setting = Scenario(at_us(0.0, 0.0), limits=(LatencyLimit("latency", 1.5 * RUN_US * 1e-6),), rows=1)
    (report,) = compare([("latency", alone_plan(1))], setting)

    assert 0.5 == report.slo_attainment


def test_a_plan_for_a_device_that_is_not_there_is_refused() -> None:
    """A policy's devices are devices of the machine."""
    three = make_plan([make_chain(4)], [[[0, 1, 2, 2]]], cluster=make_cluster(3))

    with pytest.raises(MismatchError, match="other devices"):
        SimulatedServer([alone_plan(), three], load_of(three.unit, at_us(0.0), 1))


def test_plans_with_different_costs_are_not_chosen_among() -> None:
    """A monitor compares like with like."""
    other = make_plan([make_chain(4)], [[[0, 0, 1, 1]]], cluster=make_cluster(latency_us=10.0), us=11.0)

    with pytest.raises(MismatchError, match="different costs"):
        checked([("a", alone_plan()), ("b", other)], Scenario(poisson(1.0, 3)))


def test_losing_an_unknown_device_is_a_mistake() -> None:
    """The message lists the devices that there are."""
    setting = Scenario(poisson(1.0, 3), Faults(losses=(Loss("d7", 1.0),)))

    with pytest.raises(ArrivalsError, match=r"no device 'd7'\. Its devices: d0, d1"):
        compare(both_plans(), setting)


def test_comparison_has_one_row_a_plan_on_the_same_requests() -> None:
    """Rows differ by policy and agree on what was asked."""
    rows = compare(both_plans(), Scenario(make_arrivals("batch:40"), rows=1))

    assert ["latency", "throughput"] == [r.policy for r in rows]
    assert {40} == {r.num_finished for r in rows}
    assert rows[1].requests_per_s > 1.3 * rows[0].requests_per_s
