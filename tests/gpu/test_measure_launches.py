"""Measuring on a real GPU: launches, whole steps, links."""

import functools
import os

import pytest
import torch

from tessera.analyze import build_graph
from tessera.capture import Workload, build, record
from tessera.capture.workload import on_device
from tessera.errors import CannotTime
from tessera.execute.cuda.direct import MPS_PIPE
from tessera.execute.cuda.timing import CudaTimer
from tessera.execute.link_times import time_transfers
from tessera.ir import Step, Trace, arg_views
from tessera.profile import parse_devices
from tessera.profile.store import timing, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WARM: frozenset[int] = frozenset()


@functools.cache
def step() -> tuple[Workload, Trace]:
    """A decode step of the tiny Llama on the GPU."""
    workload = on_device(build(Step("tiny-llama", "decode", 2, 16)), "cuda:0")
    return workload, record(workload)


def timer() -> CudaTimer:
    """A timer of that step on its own tensors."""
    workload, trace = step()
    given = {**workload.weights(), **workload.make_inputs(0), **workload.make_state(0)}
    return CudaTimer(trace, 0, lambda: (given, ()))


def test_launches_add_up_to_about_the_whole_step() -> None:
    """Sum and whole are within a factor of two of one another, for a step of very short launches."""
    mine, trace = timer(), step()[1]
    whole = timing(mine.whole(until(0.2))).us
    total = 0.0
    for launch in range(len(trace.launches)):
        try:
            total += timing(mine.time(launch, WARM, until(0.02))).us
        except CannotTime:
            pytest.fail(f"launch {launch} ({trace.kernel_of(launch).name}) could not be timed")
        mine.run(launch)

    assert 0.5 < total / whole < 2.0


def product(rows: int) -> Trace:
    """One product of a square weight with some rows, recorded on the GPU."""
    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16)
    from tessera.capture.record import capture

    return capture(torch.mm, x, weight)


def test_a_cold_weight_takes_no_less_than_memory_allows() -> None:
    """128 MB of weights at most at the data sheet's bandwidth of the fastest GPU known (8 TB/s)."""
    trace = product(1)
    views = [v for arg in trace.launches[-1].args for v in arg_views(arg)]
    cold = frozenset(v.buffer for v in views if v.shape == (8192, 8192))
    mine = CudaTimer(trace, 0, lambda: (None, ()))
    us = timing(mine.time(len(trace.launches) - 1, cold, until(0.2))).us

    assert us > 8192 * 8192 * 2 / 8e6


def test_the_clock_is_a_clock() -> None:
    """Between 0.2 and 4 GHz."""
    found = timer().clock_mhz()

    assert found is not None
    assert 200 < found < 4000


@pytest.mark.skipif(
    not os.environ.get(MPS_PIPE), reason=f"workers on one card take turns unless {MPS_PIPE} is set"
)
@pytest.mark.parametrize("transport", ["ipc", "host"])
def test_transfers_take_longer_the_more_they_move(transport: str) -> None:
    """Between two workers on one card."""
    a, b = parse_devices("cuda:0/as=a100,cuda:0/as=l40s")
    times = time_transfers(a, b, transport, (1 << 14, 1 << 26), build_graph).alone
    assert times[0][1] < times[1][1]
