"""Steps queued behind the running one on lanes over several devices."""

import functools
import itertools
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import cuda_stub
import engine_factory
import home_factory
from factories import make_cluster, make_plan
from models import random_placement
from tessera.analyze import build_graph
from tessera.capture import Workload, record
from tessera.execute.lanes import can_overlap
from tessera.execute.lower import lower
from tessera.execute.memory import _named
from tessera.execute.stepper import DeviceBack, DeviceLost, StepCall, StepDone, Stepper
from tessera.execute.worker_stepper import WorkerStepper
from tessera.ir import DeviceKind, Plan, Program, Recv, Run, Send, Step, Trace
from tessera.simulate.stepper import VirtualStepper

WIDTH, LAYERS, VOCABULARY = 16, 4, 50


class Chooser(torch.nn.Module):
    """Each layer adds to a sum that it keeps; the choice of a step is the next one's token."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator))

        self.table = make(VOCABULARY, WIDTH)
        self.layers = torch.nn.ParameterList(make(WIDTH, WIDTH) for _ in range(LAYERS))


@functools.cache
def workload(num: int) -> Workload:
    """A step of so many rows."""
    net = chooser()

    def call(
        inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        given, newest = inputs["tokens"], state["newest"]
        tokens = torch.where(given < 0, newest[:num], given)
        x = net.table[tokens]
        for index, weight in enumerate(net.layers):
            kept = state[f"kept.{index}"]
            kept.add_(x.sum(0))
            x = torch.tanh(x @ weight + kept)
        logits = x @ net.table.T
        chosen = logits.argmax(-1)
        newest[:num].copy_(chosen)
        return {"logits": logits, "chosen": chosen}

    def make_state(seed: int) -> dict[str, torch.Tensor]:
        kept = {f"kept.{index}": torch.zeros(WIDTH) for index in range(LAYERS)}
        return {"newest": torch.zeros(3, dtype=torch.int64), **kept}

    return Workload(
        Step("chooser", "decode", num, 8),
        net,
        call,
        lambda seed: {"tokens": torch.full((num,), -1)},
        make_state,
        lambda first, run, last: dict(first),
    )


@functools.cache
def chooser() -> Chooser:
    return Chooser()


@functools.cache
def traces() -> tuple[Trace, ...]:
    return tuple(record(workload(num)) for num in (2, 3))


def split_plan(seed: int, num_devices: int, kind: DeviceKind = DeviceKind.EMU) -> Plan:
    """Both steps alike on several devices, at random; a state's launches are together."""
    cluster = make_cluster(num_devices)
    cluster = replace(cluster, devices=tuple(replace(d, kind=kind) for d in cluster.devices))
    place = random_placement(build_graph(traces()[0]), random.Random(seed), num_devices)
    return make_plan(traces(), [[place, place]], cluster=cluster)


def expected(steps: Sequence[int]) -> list[torch.Tensor]:
    state = workload(2).make_state(0)
    found = list[torch.Tensor]()
    for step in steps:
        given = torch.full((step + 2,), -1) if found else torch.arange(step + 2)
        found.append(workload(step + 2).run({"tokens": given}, state)["logits"].clone())
    return found


def played(stepper: Stepper, steps: Sequence[int], microbatch: int = 0) -> list[torch.Tensor]:
    """Outputs of steps, each queued behind the one before."""
    stepper.open(microbatch, 0)
    found: list[torch.Tensor] = []
    for number, step in enumerate(steps):
        given = torch.full((step + 2,), -1) if number else torch.arange(step + 2)
        assert not number or stepper.can_queue(microbatch)
        stepper.start(StepCall(microbatch, step, {"tokens": given}))
        if number:
            found.append(ended(stepper))
    found.append(ended(stepper))
    stepper.close(microbatch)
    return found


def ended(stepper: Stepper) -> torch.Tensor:
    done = stepper.take(60.0)
    assert isinstance(done, StepDone), done
    logits: torch.Tensor = done.outputs["logits"]
    return logits


def uses(program: Program, trace: Trace, device: int, buffer: int) -> list[int]:
    """Positions of a device's list that name a buffer, or its end if the buffer is an output or sent on."""
    column = program.instructions[device]
    views = {view.buffer for _, view in trace.outputs}
    if buffer in views or any(t.src == device and t.buffer == buffer for t in program.transfers):
        return [len(column)]
    return [
        at for at, x in enumerate(column) if isinstance(x, Run | Recv) and buffer in _named(trace, program, x)
    ]


def is_safe(first: Program, second: Program, trace: Trace) -> bool:
    """By reachability over every instruction of both steps, one after the other on each device."""
    num = len(first.instructions)
    before: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for run, program in enumerate((first, second)):
        sent = {
            x.transfer: (run, device, at)
            for device, column in enumerate(program.instructions)
            for at, x in enumerate(column)
            if isinstance(x, Send)
        }
        for device, column in enumerate(program.instructions):
            for at in range(len(column) + 1):
                previous = [(run, device, at - 1)] if at else [(0, device, len(first.instructions[device]))]
                x = column[at] if at < len(column) else None
                received = [sent[x.transfer]] if isinstance(x, Recv) else []
                before[run, device, at] = [*(previous if at or run else []), *received]

    def ancestors(node: tuple[int, int, int]) -> set[tuple[int, int, int]]:
        found, left = {node}, [node]
        while left:
            for other in before[left.pop()]:
                if other not in found:
                    found.add(other)
                    left.append(other)
        return found

    for device in range(num):
        for at, x in enumerate(second.instructions[device]):
            if isinstance(x, Send):
                dst, seen = second.transfers[x.transfer].dst, ancestors((1, device, at))
                into = {t.buffer for t in first.transfers if (t.src, t.dst) == (device, dst)}
                if any((0, dst, use) not in seen for b in into for use in uses(first, trace, dst, b)):
                    return False
    return True


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_lane_queues_if_no_sender_can_be_ahead(num_devices: int) -> None:
    """The rule by what devices know says what reachability says."""
    told = []
    for seed in range(60):
        plan = split_plan(seed, num_devices)
        programs = lower(plan)[0]
        is_used = [{d for d, c in enumerate(p.instructions) if c} for p in programs]
        told.append(can_overlap(plan, plan.lanes[0]))
        pairs = [(one, other) for one in programs for other in programs]
        wanted = all(is_safe(one, other, plan.graphs[one.step].trace) for one, other in pairs)
        assert told[-1] == (wanted and is_used[0] == is_used[1]), seed
    assert {False, True} == set(told)


def test_lanes_without_a_way_back_or_with_state_that_moves_do_not_queue() -> None:
    one_way = home_factory.plan_of((2, 4), [0, 1], "both")
    moving = engine_factory.plan_of([engine_factory.scattered(random.Random(2), [0, 1])], 2)
    assert len(lower(moving)[0]) > 2

    assert [False, False] == [can_overlap(plan, plan.lanes[0]) for plan in (one_way, moving)]


def seeds(num_devices: int, num: int) -> list[int]:
    """Seeds of plans over several devices that queue."""
    found = (s for s in range(200) if len(set(lower(split_plan(s, num_devices))[0][0].weights)) > 1)
    plans = ((seed, split_plan(seed, num_devices)) for seed in found)
    return list(itertools.islice((s for s, plan in plans if can_overlap(plan, plan.lanes[0])), num))


@pytest.mark.parametrize("transport", ["shm", pytest.param("host", marks=pytest.mark.slow)])
def test_queued_steps_give_the_bits_of_steps_one_by_one(transport: str) -> None:
    rng = random.Random(1)
    for num_devices in (2, 3):
        steps = [rng.randrange(2) for _ in range(40)]
        plan = split_plan(seeds(num_devices, 1)[0], num_devices)
        with WorkerStepper([plan], workload(2).weights(), transport=transport, timeout_s=60.0) as stepper:
            found = played(stepper, steps)

        assert all(torch.equal(one, other) for one, other in zip(expected(steps), found, strict=True))


def test_a_killed_worker_takes_queued_steps_on_several_devices_with_it() -> None:
    plan = split_plan(seeds(2, 1)[0], 2)
    with WorkerStepper([plan], workload(2).weights(), timeout_s=60.0) as stepper:
        for device in (0, 1):
            stepper.open(0, 0)
            for _ in range(2):
                stepper.start(StepCall(0, 0, {"tokens": torch.arange(2)}))
            pid = stepper.hub.status(device).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            events = [stepper.take(60.0)]
            while not isinstance(events[-1], DeviceBack):
                events.append(stepper.take(60.0))
            assert [(0,)] == [event.microbatches for event in events if isinstance(event, DeviceLost)]
        found = played(stepper, [0, 1, 0])

    assert all(torch.equal(one, other) for one, other in zip(expected([0, 1, 0]), found, strict=True))


def test_a_link_that_is_cut_under_queued_steps_is_opened_again() -> None:
    """Both runs end, told as one loss without proof."""
    plan = split_plan(seeds(2, 1)[0], 2)
    with WorkerStepper([plan], workload(2).weights(), timeout_s=60.0) as stepper:
        stepper.open(0, 0)
        for _ in range(2):
            stepper.start(StepCall(0, 0, {"tokens": torch.arange(2)}))
        stepper._cut(0, 1, "by hand")
        events = [stepper.take(60.0) for _ in range(2)]
        found = played(stepper, [0, 1, 0])

    assert [DeviceLost, DeviceBack] == [type(event) for event in events]
    assert all(torch.equal(one, other) for one, other in zip(expected([0, 1, 0]), found, strict=True))


def test_graphs_of_queued_steps_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stub.install(monkeypatch)
    threads = torch.get_num_threads()
    steps = [0, 1, 1, 0, 0, 1]
    plan = split_plan(seeds(2, 1)[0], 2, DeviceKind.CUDA)
    with WorkerStepper([plan], workload(2).weights(), timeout_s=60.0) as stepper:
        found = played(stepper, steps)
    torch.set_num_threads(threads)

    assert all(torch.equal(one, other) for one, other in zip(expected(steps), found, strict=True))


def test_what_is_not_given_of_an_input_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input given in part, in steps of either parity, and one that is empty."""
    cuda_stub.install(monkeypatch)
    threads = torch.get_num_threads()
    given = [[5, 7], [3], [9], [], [4], [8, 2], []]
    state, held, wanted = workload(2).make_state(0), [0, 0], []
    for tokens in given:
        held = [*tokens, *held[len(tokens) :]]
        wanted.append(workload(2).run({"tokens": torch.tensor(held)}, state)["logits"].clone())
    plan = split_plan(seeds(2, 1)[0], 2, DeviceKind.CUDA)
    with WorkerStepper([plan], workload(2).weights(), timeout_s=60.0) as stepper:
        stepper.open(0, 0)
        found = []
        for tokens in given:
            stepper.start(StepCall(0, 0, {"tokens": torch.tensor(tokens, dtype=torch.int64)}))
            found.append(ended(stepper))
        stepper.close(0)
    torch.set_num_threads(threads)

    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_a_virtual_stepper_queues_as_workers_do() -> None:
    for seed in range(10):
        plan = split_plan(seed, 2)
        stepper = VirtualStepper([plan])
        stepper.open(0, 0)
        assert stepper.can_queue(0) == (
            len(stepper.lanes.all[0].devices) == 1 or can_overlap(plan, plan.lanes[0])
        )
