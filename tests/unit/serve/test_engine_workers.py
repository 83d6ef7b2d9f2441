"""The engine on worker processes: the model itself's answers, also when workers are killed."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import steps_factory
from own_code import reference
from serving_factory import GREEDY, Told, policies_of, random_ask, read, read_all, wait_for, wait_for_masks
from tessera.execute.stepper import StepCall
from tessera.execute.worker_stepper import WorkerStepper
from tessera.kernels.choice import Number
from tessera.serve.engine import MAX_FAILURES
from tessera.serve.records import Ask, Sampling
from tessera.serve.service import Service
from tessera.serve.step_inputs import Steps
from tessera.serve.text import ByteText

What = tuple[list[int], str, str]


def model_answers(asks: Sequence[Ask]) -> list[What]:
    """What the model itself answers."""
    model = steps_factory.built(steps_factory.prepared())
    with (
        reference(model, 1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText()) as service,
    ):
        return [told.what for told in wait_for(read_all(service, asks))]


async def read_while_killing(
    service: Service, stepper: WorkerStepper, asks: Sequence[Ask], kills: int
) -> list[Told]:
    """Kills a worker after some tokens, and again."""
    rng = random.Random(kills)

    async def kill() -> None:
        for _ in range(kills):
            goal = service.snapshot().output_tokens + rng.randrange(5, 25)
            while service.snapshot().output_tokens < goal and not answers.done():
                await asyncio.sleep(0.002)
            devices = stepper.use().devices.values()
            pids = [device.pid for device in devices if device.state == "ready" and device.pid]
            if pids:
                os.kill(rng.choice(pids), signal.SIGKILL)

    answers = asyncio.gather(*(read(service, ask) for ask in asks))
    await asyncio.sleep(0.05)
    await kill()
    return list(await answers)


def test_no_request_is_lost_with_its_worker() -> None:
    """Killed once, nobody notices; killed again and again, each gets one finish, and it is right."""
    rng = random.Random(2)
    shape = steps_factory.prepared().model.shape
    asks = [random_ask(rng, shape.capacity, ignores_end=True) for _ in range(6)]
    wanted = model_answers(asks)
    made = steps_factory.prepared()
    with made.workers() as stepper, Service(stepper, made.policies, shape, ByteText()) as service:
        once = wait_for(read_while_killing(service, stepper, asks, 1))
        often = wait_for(read_while_killing(service, stepper, asks, 2))
        retried = service.snapshot().retried
        after = wait_for(read(service, Ask((1, 2), 5, GREEDY, ignores_end=True)))

    assert wanted == [told.what for told in once]
    assert retried > 0
    for told, right in zip(often, wanted, strict=True):
        if told.finish.reason == "error":
            assert "lost again" in told.finish.message
            assert right[0][: len(told.numbers)] == told.numbers
        else:
            assert right == told.what
    assert 5 == after.finish.output_tokens


@pytest.mark.parametrize("policies", [("data-parallel",), ("attention-ffn",)])
def test_forms_are_answered_by_steps_whose_masks_follow(
    policies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices beside one another and on divided ones, where the one that has the logits waits alone."""
    grammar = pytest.importorskip("tessera.serve.grammar")
    pytest.importorskip("llguidance")
    wait_for_masks(monkeypatch)
    made = steps_factory.prepared("tiny-llama", *policies)
    compiler = grammar.GrammarCompiler(ByteText(), made.model.shape.vocab_size)
    source = 'start: %json {"type": "array", "items": {"type": "boolean"}, "minItems": 9}'
    forms = (compiler.compile(source, "x"), None)
    asks = [Ask((n, 7), 20, Sampling(0.5, seed=n), grammar=forms[n % 3 == 2]) for n in range(6)]
    wanted, is_open = model_answers(asks), list[bool]()
    with made.workers() as stepper, Service(stepper, made.policies, made.model.shape, ByteText()) as service:
        monkeypatch.setattr(stepper, "start", noting(stepper.start, is_open))
        found = wait_for(read_all(service, asks))

    assert wanted == [told.what for told in found]
    assert sum(is_open) > 10


def noting(start: Callable[[StepCall], None], is_open: list[bool]) -> Callable[[StepCall], None]:
    def noted(call: StepCall) -> None:
        is_open.append(call.is_open)
        start(call)

    return noted


def test_an_open_step_ends_when_its_inputs_are_given() -> None:
    """Not before; with the outputs of one that was started with them."""
    made = steps_factory.prepared("tiny-llama", "data-parallel")
    steps, inputs = Steps.of(made.policies[0].plans[0]), steps_factory.script(steps_factory.built(made), 1)
    number, given = inputs[0]
    words = torch.randint(-(2**31), 2**31 - 1, given["masks"].shape, dtype=torch.int32)
    numbers = given["numbers"].clone()
    numbers[:, Number.MASK] = torch.arange(1, len(numbers) + 1)
    given = {**given, "numbers": numbers, "masks": words}
    found = []
    with made.workers() as stepper:
        for is_open in (False, True):
            steps_factory.opened(stepper, 0)
            late = {"masks": words} if is_open else {}
            call = steps.call(0, number, {n: t for n, t in given.items() if n not in late})
            stepper.start(replace(call, is_open=is_open))
            if is_open:
                assert stepper.take(0.3) is None
                stepper.give(0, late)
            found.append(dict(steps_factory.done(stepper).outputs))
            stepper.close(0)

    assert steps_factory.is_same(found[:1], found[1:])


def test_a_device_that_fails_again_and_again_is_planned_around() -> None:
    """Every lane needs it; its workers are killed as they come, and the service answers without it."""
    made, ask = steps_factory.over_both(), Ask((1, 2, 3), 9, GREEDY, ignores_end=True)
    said, killed = list[str](), set[int]()
    with made.workers() as stepper:
        given = (stepper, made.policies, made.model.shape, ByteText())
        service = Service(*given, planner=made.planner, log=said.append)
        with service:
            first = wait_for(read(service, ask))
            while len(killed) < MAX_FAILURES:
                pid = stepper.use().devices["emu:l40s"].pid
                if pid is not None and pid not in killed and os.path.exists(f"/proc/{pid}"):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                time.sleep(0.002)
            again = wait_for(read(service, ask))
            devices = {device.name: device for device in service.snapshot().devices}
            lanes = stepper.lanes.open()

    assert first.what == again.what
    assert {frozenset({"emu:a100"})} == {lane.devices for lane in lanes}
    assert MAX_FAILURES == devices["emu:l40s"].losses
    assert "plans without emu:l40s are in force" in said
