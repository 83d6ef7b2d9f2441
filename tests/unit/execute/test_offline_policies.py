"""Several plans loaded at once: policies are switched between requests and nothing is drained."""

import dataclasses
import os
import random
import resource
import signal

import pytest

import engine_factory as made
from clocked_stepper import ClockedStepper
from factories import make_cluster, make_plan
from tessera.errors import MismatchError, TesseraError
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Plan


def policies() -> list[Plan]:
    """All on one device, all on the other, and scattered over both; different numbers in flight."""
    rng = random.Random(0)
    return [
        made.plan_of([made.scattered(rng, devices)], 2, microbatches)
        for devices, microbatches in (([0], 2), ([1], 3), ([0, 1], 4))
    ]


def test_a_hundred_requests_under_three_policies_are_right_and_memory_stays_flat() -> None:
    """Every output is the reference run's whatever the policy, and this process grows no more."""
    requests = made.make_requests(25)
    with WorkerStepper(policies(), made.workloads()[0].weights()) as stepper:

        def run() -> list[RunResult]:
            return run_offline(stepper, requests, policy=lambda num_done: num_done // 3 % 3).results

        results = run()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            results += run()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert all(made.is_right(i % 25, r) for i, r in enumerate(results))
    assert {0, 1, 2} == {r.policy for r in results}
    assert after - before < 8 << 10  # kilobytes


def test_a_switch_holds_for_requests_admitted_after_it() -> None:
    """What is in flight goes on under the policy it was started with."""
    requests = made.make_requests(6)
    with WorkerStepper(policies(), made.workloads()[0].weights()) as stepper:
        results = run_offline(stepper, requests, policy=lambda num_done: int(num_done > 0)).results

    assert [0, 0] == [r.policy for r in results[:2]]
    assert {1} == {r.policy for r in results[2:]}


def test_a_lost_device_sends_requests_to_another_policy() -> None:
    """Where a policy has no lane left, another policy's lane is taken."""
    plans = policies()
    with WorkerStepper(plans, made.workloads()[0].weights(), max_failures=1) as stepper:
        pid = stepper.use().devices["d0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        results = run_offline(stepper, made.make_requests(5)).results

    assert {1} == {r.policy for r in results}
    assert all(made.is_right(i, r) for i, r in enumerate(results))


def test_plans_for_other_devices_are_refused() -> None:
    """Policies share weights and state, so they must be for the same cluster."""
    one = policies()[0]
    traces = [g.trace for g in one.unit.graphs]
    other = make_plan(traces, [made.scattered(random.Random(0), [0])], made.COUNTS, make_cluster(3))

    with pytest.raises(MismatchError, match="other devices"):
        WorkerStepper([one, dataclasses.replace(other, policy="other")], made.workloads()[0].weights())


def test_an_unknown_policy_is_refused() -> None:
    """There are as many as there are plans."""
    with pytest.raises(TesseraError, match=r"policy must be 0 to 2, got 3"):
        run_offline(ClockedStepper(policies()), made.make_requests(1), policy=3)
