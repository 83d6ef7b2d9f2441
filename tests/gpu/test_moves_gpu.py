"""Homes and moves of pages on worker processes of one GPU: bits, modelled links, faults.

Processes on one card take turns unless CUDA MPS joins them; moves work either way.
"""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import home_factory as made
from reference_stepper import ReferenceStepper
from tessera.execute import driver
from tessera.execute.cuda.direct import MPS_PIPE
from tessera.execute.lanes import Lanes
from tessera.execute.processes import FORKSERVER
from tessera.execute.reference import InOrder
from tessera.execute.stepper import (
    DeviceBack,
    DeviceLost,
    Event,
    Moved,
    PageMove,
    StepCall,
    StepDone,
    Stepper,
)
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import Plan
from tessera.kernels import NEWEST, PAGE
from tessera.kernels.tensors import same_bits
from tessera.profile import parse_devices, wire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
alone = pytest.mark.skipif(
    bool(os.environ.get(MPS_PIPE)), reason="a process that dies takes its neighbours under CUDA MPS with it"
)
PARTS = "cuda:0/sm=64,cuda:0/sm=32"
DILATED = "cuda:0/as=a100,cuda:0/as=l40s"
HOMES = ("left", "right", "both")
# Pages of 64 KiB a layer.
LARGE = (1024, 1024)


def plans(devices: str, size: made.Size = made.SMALL) -> tuple[Plan, ...]:
    """A home on each device and one over both; and a plan of other steps at the first."""
    cluster = wire(parse_devices(devices), ["pcie4"])
    ways = (((2, 4), [0], "left"), ((4, 2), [1], "right"), ((2,), [0, 1], "both"), ((3,), [0], "left"))
    return tuple(
        made.plan_of(tokens, places, home, cluster=cluster, size=size, device="cuda:0")
        for tokens, places, home in ways
    )


def opened(
    devices: str, transport: str, size: made.Size = made.SMALL, timeout_s: float = 60.0
) -> WorkerStepper:
    """Workers with these plans."""
    found = plans(devices, size)
    return WorkerStepper(
        found, made.weights(size), transport=transport, timeout_s=timeout_s, method=FORKSERVER
    )


def in_order(devices: str) -> ReferenceStepper:
    """The launches one by one."""
    found = plans(devices)
    run = InOrder([graph.trace for graph in Lanes(found).graphs], made.weights(), driver.card(0))

    def state() -> dict[str, torch.Tensor]:
        return {name: t.to(driver.card(0)) for name, t in made.workload(2).make_state(0).items()}

    return ReferenceStepper(found, run, state)


def until(stepper: Stepper, *kinds: type, limit_s: float = 120.0) -> list[Event]:
    """Events up to one of each kind."""
    found: list[Event] = []
    end = time.monotonic() + limit_s
    while not all(any(isinstance(event, kind) for event in found) for kind in kinds):
        assert time.monotonic() < end, found
        event = stepper.take(1.0)
        if event is not None:
            found.append(event)
    return found


def step(stepper: Stepper, call: StepCall) -> StepDone:
    """One step."""
    stepper.start(call)
    return next(event for event in until(stepper, StepDone) if isinstance(event, StepDone))


def move(stepper: Stepper, source: int, destination: int, pairs: Sequence[tuple[int, int]]) -> Moved:
    """One move."""
    from_pages, to_pages = (tuple(pair[n] for pair in pairs) for n in (0, 1))
    stepper.move(PageMove(1, source, destination, from_pages, to_pages))
    return next(event for event in until(stepper, Moved) if isinstance(event, Moved))


def open_all(stepper: Stepper) -> None:
    """Microbatch n on plan n."""
    for number in range(4):
        stepper.open(number, stepper.lanes.open(number)[0].number)


def play(stepper: Stepper) -> list[torch.Tensor]:
    """Steps and moves at all homes; outputs, then the state of every home."""
    open_all(stepper)
    # (microbatch, step, tokens, written from, read from), or pages of one to pages of another
    script: list[tuple[Any, ...]] = [
        (0, 1, 4, PAGE, PAGE), (3, 0, 3, 2 * PAGE, PAGE), (1, 0, 4, PAGE, 2 * PAGE),
        (0, 1, [(1, 3), (2, 1)]), (1, 1, 2, 2 * PAGE, 3 * PAGE), (1, 2, [(3, 1), (2, 2)]),
        (2, 0, 2, 3 * PAGE, PAGE), (2, 0, [(1, 5), (3, 6)]), (0, 0, 2, 7 * PAGE, 5 * PAGE),
    ]  # fmt: skip
    found = []
    for seed, line in enumerate(script):
        if len(line) == 3:
            source, destination, pairs = line
            assert not move(stepper, source, destination, pairs).failure
        else:
            microbatch, number, tokens, first, read = line
            given = made.inputs(tokens, first, read, seed)
            found.append(step(stepper, StepCall(microbatch, number, given)).outputs["y"].cpu())
    for microbatch in (0, 1, 2):
        given = made.inputs(2, 4 * PAGE, 4 * PAGE)
        number = 1 if microbatch == 1 else 0
        state = step(stepper, StepCall(microbatch, number, given, wants_state=True)).state
        found += [state[name].cpu() for name in (*made.NAMES, NEWEST)]
    return found


@pytest.mark.parametrize("transport", ["ipc", "host"])
@pytest.mark.parametrize("devices", [PARTS, DILATED])
def test_homes_and_moves_have_the_bits_of_one_by_one(devices: str, transport: str) -> None:
    """Pages that microbatches share, that move between homes, and plans of different steps."""
    with in_order(devices) as reference:
        wanted = play(reference)
    with opened(devices, transport) as stepper:
        found = play(stepper)
        moved = stepper.use().moved

    assert all(same_bits(one, other) for one, other in zip(wanted, found, strict=True))
    assert sum(moved.values()) >= 6 * 2 * made.PAGE_BYTES


def test_a_large_move_takes_its_modelled_time_while_steps_go_on() -> None:
    """Some 60 MB, in pieces, at PCIe speed; steps at both ends do not wait for it."""
    width, num_pages = LARGE
    num = num_pages // 2
    num_bytes = num * 2 * PAGE * width * 4
    with opened(DILATED, "ipc", LARGE) as stepper:
        open_all(stepper)
        link = stepper.plans[0].cluster.link(0, 1)
        assert link is not None
        for microbatch, number in ((0, 1), (1, 0)):
            step(stepper, StepCall(microbatch, number, made.inputs(4, PAGE, PAGE, 7, LARGE)))
        pairs = [(n, num_pages - n) for n in range(1, num)]
        first = move(stepper, 0, 1, pairs)  # pins the staging memory
        stepper.move(PageMove(2, 0, 1, tuple(a for a, _ in pairs), tuple(b for _, b in pairs)))
        for microbatch, number in ((0, 1), (1, 0)):
            stepper.start(StepCall(microbatch, number, made.inputs(4, 2 * PAGE, PAGE, 8, LARGE)))
        events = until(stepper, Moved)
        second = next(event for event in events if isinstance(event, Moved))
        if sum(isinstance(event, StepDone) for event in events) < 2:
            until(stepper, StepDone)

        print(f"{second.num_bytes / 1e6:.0f} MB in {first.seconds * 1e3:.1f}, {second.seconds * 1e3:.1f} ms")
        assert not first.failure + second.failure
        assert num_bytes * (num - 1) / num == second.num_bytes
        assert second.seconds >= second.num_bytes / (link.gbps * 1e9)
        assert second.seconds < 1.0


@alone
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_during_a_move_ends_it(victim: int) -> None:
    """The other stays; when it is back the next move is right."""
    with opened(DILATED, "ipc") as stepper:
        open_all(stepper)
        name = stepper.plans[0].cluster.names[victim]
        pid = stepper.use().devices[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stepper.move(PageMove(7, 0, 1, (1,), (2,)))
        assert stepper.take(0.5) is None
        os.kill(pid, signal.SIGKILL)
        events = until(stepper, DeviceLost, Moved)
        failed = [event for event in events if isinstance(event, Moved)]
        assert [7] == [event.number for event in failed]
        assert name in failed[0].failure
        if not any(isinstance(event, DeviceBack) for event in events):
            until(stepper, DeviceBack)
        for number in range(4):
            if number not in stepper.opened:
                stepper.open(number, stepper.lanes.open(number)[0].number)
        first = made.inputs(4, PAGE, PAGE)
        wanted = step(stepper, StepCall(0, 1, first)).outputs["y"]
        assert not move(stepper, 0, 1, [(1, 5)]).failure
        again = step(stepper, StepCall(1, 0, made.inputs(4, 2 * PAGE, 5 * PAGE))).outputs["y"]
        assert wanted.shape == again.shape
        assert bool(torch.isfinite(again).all())
