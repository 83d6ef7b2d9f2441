"""The engine on worker processes: the undivided model's answers, also when workers are killed."""

import asyncio
import random
from collections.abc import Sequence

import steps_factory
from serving_factory import GREEDY, Told, random_ask, read, read_all, wait_for
from tessera.serve.local import Local
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.text import ByteText
from tessera.serve.undivided import UndividedStepper

What = tuple[list[int], str, str]


def undivided(asks: Sequence[Ask]) -> list[What]:
    """What the model itself answers."""
    with (
        UndividedStepper(steps_factory.prepared().model, 1) as stepper,
        Service(stepper, ByteText()) as service,
    ):
        return [told.what for told in wait_for(read_all(service, asks))]


async def read_while_killing(service: Service, local: Local, asks: Sequence[Ask], kills: int) -> list[Told]:
    """Kills a worker after some tokens, and again."""
    rng = random.Random(kills)

    async def kill() -> None:
        for _ in range(kills):
            goal = service.snapshot().output_tokens + rng.randrange(5, 25)
            while service.snapshot().output_tokens < goal and not answers.done():
                await asyncio.sleep(0.002)
            processes = local.stepper._hub._processes  # type: ignore[attr-defined]
            alive = [process for process in processes if process.is_alive()]
            if alive:  # not between two crews
                rng.choice(alive).kill()

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
    plans = steps_factory.prepared().plans
    with local, Service(local.stepper, ByteText(), plans=plans, replace=local.replace) as service:
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
