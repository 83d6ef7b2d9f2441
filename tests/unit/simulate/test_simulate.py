"""The simulator: the executor's schedule on a virtual clock, checked where the answer is known."""

import pytest

from factories import make_chain, make_cluster, make_plan, make_trace
from tessera.ir import BufferKind, Clock
from tessera.simulate import simulate, throughput_per_s


def test_one_request_on_one_device_takes_the_sum_of_its_launches() -> None:
    """Five launches of 10 us end after 50 us."""
    timeline = simulate(make_plan([make_chain(5)], [[[0] * 5]]), 1)

    assert 50.0 == timeline.makespan_us
    assert Clock.SIMULATED is timeline.clock


def test_a_transfer_delays_its_reader_by_latency_and_wire_time() -> None:
    """64 bytes at 1 GB/s are 0.064 us on the wire, plus 1 us of latency."""
    timeline = simulate(make_plan([make_chain(2)], [[[0, 1]]]), 1)

    assert timeline.makespan_us == pytest.approx(10 + 0.064 + 1 + 10)


def test_two_lanes_on_two_devices_run_side_by_side() -> None:
    """Data parallelism over two equal devices halves the time."""
    plan = make_plan([make_chain(5)], [[[0] * 5], [[1] * 5]])

    assert 500.0 == simulate(plan, 20).makespan_us


def test_a_pipeline_hides_transfers_behind_other_requests() -> None:
    """With enough requests in flight a two-stage pipeline is as fast as its slower stage."""
    cluster = make_cluster(latency_us=5.0)
    plan = make_plan([make_chain(4)], [[[0, 0, 1, 1]]], cluster=cluster, microbatches=4)

    assert throughput_per_s(simulate(plan, 60)) == pytest.approx(1e6 / 20, rel=0.02)


def test_one_microbatch_leaves_transfers_in_the_open() -> None:
    """With one request in flight, the pipeline takes the sum of both stages and the wire."""
    cluster = make_cluster(latency_us=5.0)
    plan = make_plan([make_chain(4)], [[[0, 0, 1, 1]]], cluster=cluster, microbatches=1)

    assert throughput_per_s(simulate(plan, 20)) == pytest.approx(1e6 / (40 + 5.064), rel=0.01)


def test_a_busy_link_is_shared_in_order() -> None:
    """Two values on one link arrive one after the other."""
    trace = make_trace([[(0, 0, 64, "w"), (1, 0, 64, "w")], [(0, 0, 64, "r"), (1, 0, 64, "r")]])
    timeline = simulate(make_plan([trace], [[[0, 1]]]), 1)
    first, second = (s for s in timeline.spans if s.is_transfer)

    assert first.stop_us == second.start_us


def test_detail_changes_no_time() -> None:
    """Merging launches into segments gives the same completions."""
    plan = make_plan([make_chain(6)], [[[0, 1, 0, 0, 1, 1]], [[1] * 6]], microbatches=3)

    assert simulate(plan, 30, True).requests == simulate(plan, 30, False).requests


def test_simulation_is_deterministic() -> None:
    """The same plan gives the same timeline."""
    plan = make_plan([make_chain(6)], [[[0, 1, 0, 0, 1, 1]]], microbatches=3)

    assert simulate(plan, 10) == simulate(plan, 10)


def test_migrating_state_takes_the_wire() -> None:
    """Prefill and decode on different devices pay for the state in between, once."""
    first = make_trace([[(0, 0, 64, "rw")]], {0: BufferKind.STATE}, kind="prefill")
    second = make_trace([[(0, 0, 64, "rw")]], {0: BufferKind.STATE})
    timeline = simulate(make_plan([first, second], [[[0], [1]]], counts=[1, 3]), 1)

    assert timeline.makespan_us == pytest.approx(10 + 1.064 + 30)
