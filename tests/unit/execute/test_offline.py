"""Lists of requests on real worker processes, compared bit for bit with the model itself."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import models
import slices_model
from factories import make_cluster, make_plan
from sampling import some_of
from tessera.analyze import build_graph
from tessera.capture import record
from tessera.errors import WorkerError
from tessera.execute.offline import RunResult, run_offline
from tessera.execute.stepper import SpanLog
from tessera.execute.worker_stepper import WorkerStepper
from tessera.flow import UnitRequest, run_reference
from tessera.ir import Plan, Step
from tessera.kernels.tensors import same_bits


def make_requests(num: int) -> list[UnitRequest]:
    """Prompts of the tiny Llama."""
    workloads = [models.workload("prefill"), models.workload("decode")]
    return [UnitRequest(workloads, workloads[0].make_inputs(i), i) for i in range(num)]


def make_random_plan(seed: int, num_devices: int, lanes: int = 2, microbatches: int = 3) -> Plan:
    """Launches scattered at random: the worst case for transfers."""
    rng = random.Random(seed)
    graphs = models.unit().graphs
    placements = [[models.random_placement(g, rng, num_devices) for g in graphs] for _ in range(lanes)]
    traces = [g.trace for g in graphs]
    cluster = make_cluster(num_devices)
    return make_plan(traces, placements, models.unit().counts, cluster, microbatches=microbatches)


def make_sliced() -> tuple[Plan, UnitRequest]:
    """A step without transformers, whose import takes seconds, on two devices at random."""
    workload = slices_model.step(Step("slices_model:step", "decode", 1, 8))
    graph = build_graph(record(workload))
    placement = models.random_placement(graph, random.Random(0), 2)
    plan = make_plan([graph.trace], [[placement]], [1], make_cluster(2))
    return plan, UnitRequest([workload], workload.make_inputs(0), 0)


def assert_equal_to_reference(requests: Sequence[UnitRequest], results: Sequence[RunResult]) -> None:
    """Every output of every run, and the state at the end."""
    for request, result in zip(requests, results, strict=True):
        reference = run_reference(models.unit(), request)
        for one, other in zip(reference.outputs, result.outputs, strict=True):
            assert one.keys() == other.keys()
            assert all(same_bits(one[name], other[name]) for name in one)
        assert all(same_bits(t, result.state[name]) for name, t in reference.state.items())


@pytest.mark.parametrize("num_devices", some_of((1, 2, 3), (3,)))
def test_scattered_launches_give_the_reference_bits(num_devices: int) -> None:
    """However launches are scattered over workers, tokens, logits and state do not change by a bit."""
    requests = make_requests(5)
    plan = make_random_plan(num_devices, num_devices)
    with WorkerStepper([plan], requests[0].workloads[0].weights()) as stepper:
        results = run_offline(stepper, requests).results
        assert_equal_to_reference(requests, results)
        log = stepper.spans = SpanLog(plan)
        again = run_offline(stepper, requests, spans=log).results  # microbatches can be used again
        assert_equal_to_reference(requests, again)
        timeline = log.timeline()
    assert {0, 1} == {r.lane for r in results}
    assert set(plan.cluster.names) == {s.track for s in timeline.spans if not s.is_transfer}
    assert (num_devices > 1) == any(s.is_transfer for s in timeline.spans)


def test_same_bits_sees_a_single_flipped_bit() -> None:
    """The comparison itself can fail."""
    one = torch.ones(8)
    other = one.clone()
    other.view(torch.uint8)[5] ^= 1

    assert same_bits(one, one.clone())
    assert not same_bits(one, other)


def test_a_killed_worker_is_named_and_nothing_is_left() -> None:
    """A device that is given up ends the run with its name; no process survives."""
    plan = make_random_plan(0, 2)
    requests = make_requests(4)
    before = {p.pid for p in multiprocessing.active_children()}
    weights = requests[0].workloads[0].weights()
    with WorkerStepper([plan], weights, max_failures=1) as stepper:
        victim = next(p for p in multiprocessing.active_children() if p.name == "tessera-d1")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        run = run_offline(stepper, requests)
        with pytest.raises(WorkerError, match=r"device d1: the worker process ended.*exit code -9"):
            run.raise_failures()
    assert before == {p.pid for p in multiprocessing.active_children()}


INTERRUPTED = """
import signal, sys, time
sys.path[:0] = {path!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import test_offline as t
from tessera.execute.offline import run_offline
from tessera.execute.worker_stepper import WorkerStepper

if __name__ == "__main__":
    plan, request = t.make_sliced()
    with WorkerStepper([plan], request.workloads[0].weights()) as stepper:
        print(*(p.pid for p in t.multiprocessing.active_children()), flush=True)
        while True:
            run_offline(stepper, [request])
"""


def is_alive(pid: int) -> bool:
    """True while a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow  # by default the parent is killed, which leaves it less time: test_worker_faults
def test_workers_do_not_outlive_who_started_them(tmp_path: Path) -> None:
    """Ctrl-C leaves no worker behind."""
    here = os.path.dirname(os.path.abspath(__file__))
    script = os.path.join(tmp_path, "interrupted.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(INTERRUPTED.format(path=[here, os.path.dirname(os.path.dirname(here))]))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert 2 == len(pids)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert not any(is_alive(pid) for pid in pids)
