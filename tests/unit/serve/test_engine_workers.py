"""The engine on worker processes: the model itself's answers, also when workers are killed."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence

import steps_factory
from own_code import reference
from serving_factory import GREEDY, Told, policies_of, random_ask, read, read_all, wait_for
from tessera.execute.worker_stepper import WorkerStepper
from tessera.serve.engine import MAX_FAILURES
from tessera.serve.records import Ask
from tessera.serve.service import Service
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
