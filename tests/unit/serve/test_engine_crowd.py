"""How a crowd is seated: a batch that waits opens slots, a few that wait do not."""

import asyncio

import pytest

from serving_factory import GREEDY, ToyStepper
from tessera.execute.serving import Shape
from tessera.serve.records import Ask
from tessera.serve.service import Service
from tessera.serve.text import ByteText

SHAPE = Shape(slots=3, rows=4, capacity=48, chunk=4, vocab_size=258)


async def _ask_all(service: Service, num: int) -> None:
    """All of them wait before the engine begins."""
    answers = [service.answer(Ask((1, 2, 3, n), 5, GREEDY, ignores_end=True)) for n in range(num)]
    service.start()

    async def read(number: int) -> None:
        async for _ in answers[number]:
            pass

    await asyncio.gather(*(read(number) for number in range(num)))


class Timed(ToyStepper):
    """Remembers which slots were open before any step had ended."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.first: set[int] = set()

    def open(self, slot: int, policy: int) -> int:
        if not self.log:
            self.first.add(slot)
        return super().open(slot, policy)


@pytest.mark.parametrize(("num", "expected"), [(2, {0}), (12, {0, 1, 2})])
def test_slots_open_at_once_when_a_batch_waits(num: int, expected: set[int]) -> None:
    """Two requests share a slot; twelve begin in all three slots before any has a second one."""
    stepper = Timed()
    service = Service(stepper, ByteText())

    asyncio.run(_ask_all(service, num))
    service.stop()

    assert expected == stepper.first
