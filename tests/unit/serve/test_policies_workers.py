"""Every policy on worker processes: the model's own answers, alone, sixteen at once, and through kills."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

import steps_factory
from own_code import reference
from serving_factory import GREEDY, Told, policies_of, read, read_all, until, wait_for
from steps_factory import Local, built, working
from tessera.serve.policies import POLICIES, SPLITS
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.text import ByteText

LIMIT_S = 120.0


def asks(num: int) -> list[Ask]:
    rng = random.Random(4)
    return [
        Ask(tuple(rng.randrange(256) for _ in range(rng.choice((3, 5, 7)))), 24, GREEDY, ignores_end=True)
        for _ in range(num)
    ]


@pytest.fixture(scope="module")
def own() -> list[list[int]]:
    """What the model itself answers."""
    model = built(steps_factory.prepared())
    with (
        reference(model, 1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText()) as service,
    ):
        return [told.numbers for told in wait_for(read_all(service, asks(16)), LIMIT_S)]


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    """All policies in one pair of workers."""
    with working(steps_factory.prepared("tiny-llama", *POLICIES)) as found:
        yield found


def service_on(local: Local, policy: str) -> Service:
    made = local.prepared
    given = (local.stepper, made.policies, made.model.shape, ByteText())
    return Service(*given, policy=policy, log=lambda line: None)


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_the_models_own(local: Local, own: list[list[int]], policy: str) -> None:
    with service_on(local, policy) as service:
        alone = wait_for(read(service, asks(1)[0]), LIMIT_S)
        together = wait_for(read_all(service, asks(16)), LIMIT_S)
        snapshot = service.snapshot()

    assert own[0] == alone.numbers
    assert own == [told.numbers for told in together]
    assert (policy in SPLITS) == (snapshot.pages_moved > 0)
    assert policy == snapshot.policy
    assert snapshot.groups


@pytest.mark.parametrize("policy", ["prefill-decode", "prefill-decode-fractional", "layer-pipeline"])
@pytest.mark.parametrize("device", ["emu:a100", "emu:l40s"])
def test_a_killed_worker_changes_no_answer(
    local: Local, own: list[list[int]], policy: str, device: str
) -> None:
    async def while_killed(service: Service) -> list[Told]:
        reading = asyncio.ensure_future(read_all(service, asks(16)))
        while service.snapshot().output_tokens < 20:
            await asyncio.sleep(0.002)
        pid = local.stepper.use().devices[device].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await reading

    with service_on(local, policy) as service:
        told = wait_for(while_killed(service), LIMIT_S)
        until(lambda: all(d.state == "ready" for d in local.stepper.use().devices.values()), 60.0)

    assert own == [one.numbers for one in told]
