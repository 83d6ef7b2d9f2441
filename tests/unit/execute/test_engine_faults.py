"""Faults: workers that are killed, stop, run out of memory or lose each other; nothing is lost silently."""

import dataclasses
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine_factory as made
from tessera.errors import WorkerError
from tessera.execute import Engine
from tessera.execute.hub import LocalHub
from tessera.ir import Plan

NAMED = re.compile(r"device d\d: .*(at instruction \d+ of \d+, \w+ of |before its share|with no work)")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process and no shared memory outlives a test."""
    children = {p.pid for p in multiprocessing.active_children()}
    shared = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    yield
    assert children == {p.pid for p in multiprocessing.active_children()}
    mine = {n for n in os.listdir("/dev/shm") if n.startswith("torch_")} if shared else set()
    assert not {n for n in mine - shared if f"_{os.getpid()}_" in n}


def process_of(device: int) -> int:
    """The process id of a device's worker."""
    name = f"tessera-d{device}"
    pid = next(p.pid for p in multiprocessing.active_children() if p.name == name)
    assert pid is not None
    return pid


def two_ways(seed: int) -> Plan:
    """A lane over devices 0 and 1, and one over 2 and 3."""
    rng = random.Random(seed)
    return made.plan_of([made.scattered(rng, [0, 1]), made.scattered(rng, [2, 3])], 4)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_worker_costs_no_request(seed: int, transport: str) -> None:
    """Whenever a worker is killed, its requests are finished on the other lane with the same bits."""
    rng = random.Random(seed)
    victim = rng.randrange(4)
    requests = made.make_requests(12)
    engine = Engine(two_ways(seed), made.workloads()[0].weights(), transport=transport, method="forkserver")
    with engine:
        engine.run(requests[:2])
        killer = threading.Timer(rng.random() * 0.1, os.kill, (process_of(victim), signal.SIGKILL))
        killer.start()
        results = engine.run(requests)
        killer.join()
        results += engine.run(requests)  # and it goes on without the device

    assert all(made.is_right(i % 12, r) for i, r in enumerate(results))
    assert [f"device d{victim}"] == [fault.place for fault in engine.faults]
    assert NAMED.search(str(engine.faults[0]))


def test_without_another_lane_requests_fail_and_are_counted() -> None:
    """The run ends with one message; each request has a result or a reason."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    requests = made.make_requests(6)
    with Engine(plan, made.workloads()[0].weights(), method="forkserver") as engine:
        done: list[int] = []

        def kill_after_two(number: int) -> None:
            done.append(number)
            if len(done) == 2:
                os.kill(process_of(1), signal.SIGKILL)

        results = engine.run(requests, kill_after_two, is_strict=False)
        with pytest.raises(WorkerError, match=r"device d1: .*0 of 6 requests were finished, 6 failed"):
            engine.run(requests)

    finished = [i for i, r in enumerate(results) if not r.error]
    assert sorted(done) == finished
    assert len(finished) >= 2
    assert all(made.is_right(i, results[i]) for i in finished)
    assert all("device d1" in r.error for r in results if r.error)


def test_a_worker_that_hangs_is_found_by_the_clock() -> None:
    """A stopped worker is blamed, killed and done without; the one that waits for it is not."""
    requests = made.make_requests(8)
    engine = Engine(two_ways(1), made.workloads()[0].weights(), timeout_s=1.0, method="forkserver")
    with engine:
        engine.run(requests[:2])
        os.kill(process_of(2), signal.SIGSTOP)
        results = engine.run(requests)

    assert all(made.is_right(i, r) for i, r in enumerate(results))
    assert ["device d2"] == [fault.place for fault in engine.faults]
    assert "no answer within 1 s" in str(engine.faults[0])


def test_a_device_without_memory_is_named_at_the_start() -> None:
    """More than the machine has cannot be taken: one message, before any request."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    huge = dataclasses.replace(plan.cluster.devices[0], memory_bytes=1 << 62)
    cluster = dataclasses.replace(plan.cluster, devices=(huge, plan.cluster.devices[1]))
    costs = tuple(dataclasses.replace(c, devices=cluster.devices) for c in plan.costs)
    engine = Engine(
        dataclasses.replace(plan, cluster=cluster, costs=costs),
        made.workloads()[0].weights(),
        method="forkserver",
    )
    assert isinstance(engine._hub, LocalHub)
    engine._hub.setups[0].slot_bytes = 1 << 46
    with pytest.raises(WorkerError, match=r"device d0: could not start: could not take [\d,]+ bytes"), engine:
        pass


def test_two_lost_devices_make_two_messages() -> None:
    """A third lane still stands when two others have lost a device each."""
    rng = random.Random(3)
    lanes = [made.scattered(rng, [d]) for d in range(3)]
    requests = made.make_requests(10)
    with Engine(made.plan_of(lanes, 3), made.workloads()[0].weights(), method="forkserver") as engine:
        for device in (0, 2):
            os.kill(process_of(device), signal.SIGKILL)
            time.sleep(0.02)
        results = engine.run(requests)

    assert all(made.is_right(i, r) for i, r in enumerate(results))
    assert {"device d0", "device d2"} == {fault.place for fault in engine.faults}
    assert {1} == {r.lane for r in results}
