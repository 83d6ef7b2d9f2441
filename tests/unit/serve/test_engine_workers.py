"""The engine on worker processes: the undivided model's answers, also when workers are killed."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence

import steps_factory
from serving_factory import GREEDY, Told, random_ask, read, read_all, wait_for
from tessera.serve.local import Local
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.steps import reference
from tessera.serve.text import ByteText

What = tuple[list[int], str, str]


def undivided(asks: Sequence[Ask]) -> list[What]:
    """What the model itself answers."""
    model = steps_factory.prepared().model
    with reference(model, 1) as stepper, Service(stepper, model.shape, ByteText()) as service:
        return [told.what for told in wait_for(read_all(service, asks))]


async def read_while_killing(service: Service, local: Local, asks: Sequence[Ask], kills: int) -> list[Told]:
    """Kills a worker after some tokens, and again."""
    rng = random.Random(kills)

    async def kill() -> None:
        for _ in range(kills):
            goal = service.snapshot().output_tokens + rng.randrange(5, 25)
            while service.snapshot().output_tokens < goal and not answers.done():
                await asyncio.sleep(0.002)
            devices = local.stepper.use().devices.values()
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
    wanted = undivided(asks)
    local = Local(steps_factory.prepared())
    with local, Service(local.stepper, shape, ByteText()) as service:
        once = wait_for(read_while_killing(service, local, asks, 1))
        often = wait_for(read_while_killing(service, local, asks, 2))
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
