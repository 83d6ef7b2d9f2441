"""How a crowd is seated: a batch that waits opens microbatches, a few that wait do not."""

import asyncio

import pytest

from serving_factory import GREEDY, ToyStepper, service_of, toy_group, toy_policy
from tessera.execute.stepper import Tensors
from tessera.serve.records import Ask, Shape
from tessera.serve.service import Service

SHAPE = Shape(microbatches=3, rows=4, capacity=48, sizes=(4, 16), pool_tokens=16 * 13, vocab_size=258)


async def _ask_all(service: Service, num: int) -> None:
    """All of them wait before the engine begins."""
    answers = [service.answer(Ask((1, 2, 3, n), 5, GREEDY, ignores_end=True)) for n in range(num)]
    service.start()

    async def read(number: int) -> None:
        async for _ in answers[number]:
            pass

    await asyncio.gather(*(read(number) for number in range(num)))


class Timed(ToyStepper):
    """Remembers which microbatches were open before any step had ended."""

    def __init__(self) -> None:
        super().__init__(SHAPE, plans=(toy_policy("one", toy_group("one", 0, shape=SHAPE, microbatches=3)),))
        self.first: set[int] = set()

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        if not self.log:
            self.first.add(microbatch)
        super().open(microbatch, lane, state)


@pytest.mark.parametrize(("num", "expected"), [(2, {0}), (12, {0, 1, 2})])
def test_microbatches_open_at_once_when_a_batch_waits(num: int, expected: set[int]) -> None:
    """Two requests share one; twelve begin in all three before any has a second one."""
    stepper = Timed()
    service = service_of(stepper)

    asyncio.run(_ask_all(service, num))
    service.stop()

    assert expected == stepper.first
