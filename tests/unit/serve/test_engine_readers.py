"""Readers of answers: on any event loop, slow, gone or cancelled; and limits that an ask sets itself."""

import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from serving_factory import (
    GREEDY,
    Loss,
    Told,
    ToyStepper,
    expected,
    read,
    read_all,
    service_of,
    until,
    wait_for,
)
from tessera.serve.answer import LONGEST_S, Answer, AnswerBuffer, WakeUps
from tessera.serve.records import AnswerPiece, Ask, Finish, Sampling
from tessera.serve.text import END, ByteText

LONG = Ask((1, 2, 3), 45, GREEDY, ignores_end=True)


def ends_early() -> Ask:
    """An ask that the toy answers shortly."""
    asks = (Ask((n, 7), 40, GREEDY) for n in range(256))
    return next(ask for ask in asks if 2 <= len(expected(ask)[0]) < 20)


def test_several_event_loops_read_at_once() -> None:
    """Each thread has a loop of its own; every reader gets its own answer."""
    asks = [Ask((n,), 20, GREEDY, ignores_end=True) for n in range(12)]
    with service_of(ToyStepper()) as service, ThreadPoolExecutor(4) as pool:

        def part(number: int) -> list[Told]:
            return wait_for(read_all(service, asks[number::4]))

        found = list(pool.map(part, range(4)))

    for number in range(4):
        assert [expected(ask) for ask in asks[number::4]] == [told.what for told in found[number]]


def test_a_reader_whose_task_is_cancelled_gives_its_row_back() -> None:
    """As when a client's connection is closed."""
    with service_of(ToyStepper(step_s=0.005)) as service:

        async def cancelled() -> None:
            task = asyncio.ensure_future(read(service, LONG))
            while not service.snapshot().output_tokens:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        wait_for(cancelled())
        until(lambda: service.snapshot().finished.get("cancelled") == 1)

        assert 0 == service.snapshot().running


def opened() -> tuple[AnswerBuffer, Answer]:
    """An answer of one request, and where an engine puts its tokens."""
    buffer, answer = AnswerBuffer(), Answer()
    buffer.waiter = answer.waiter
    answer.add(buffer, lambda: None)
    return buffer, answer


def test_no_wake_up_is_lost_between_two_waits() -> None:
    """What comes when a reader is about to wait is found; what comes while it waits wakes it."""

    async def meet() -> list[str]:
        (buffer, answer), wake_ups, said = opened(), WakeUps(), []

        async def read_two() -> None:
            for _ in range(2):
                event = await anext(answer)
                assert isinstance(event, AnswerPiece)
                said.append(event.text)

        task = asyncio.ensure_future(read_two())
        buffer.put("before", None)
        wake_ups.buffers.add(buffer)
        wake_ups.flush(is_last=True)
        await asyncio.sleep(0.01)
        buffer.put("later", None)
        wake_ups.buffers.add(buffer)
        wake_ups.flush(is_last=True)
        await asyncio.wait_for(task, 5.0)
        return said

    assert ["before", "later"] == wait_for(meet())


def test_readers_get_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four have written, the next ones wait for as long as that took, but never long."""
    now_s = [0.0]
    monkeypatch.setattr("tessera.serve.answer.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def due_s(each_s: float) -> float:
        both, wake_ups = [opened() for _ in range(4)], WakeUps()
        buffers = [buffer for buffer, _ in both]

        async def write(answer: Answer) -> None:
            await anext(answer)
            now_s[0] += each_s

        tasks = [asyncio.ensure_future(write(answer)) for _, answer in both]
        await asyncio.sleep(0)
        for buffer in buffers:
            buffer.put("x", None)
        wake_ups.buffers.update(buffers)
        wake_ups.flush()
        await asyncio.gather(*tasks)
        wake_ups.buffers.update(buffers)
        return wake_ups.due_s

    assert pytest.approx(0.02) == wait_for(due_s(0.005)) <= LONGEST_S
    assert wait_for(due_s(0.03)) <= 0.0


def test_many_readers_are_woken_for_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next step wait until the others have written; the last ones of a service do not."""
    monkeypatch.setattr("tessera.serve.answer.LONGEST_S", 60.0)  # the next step's come within it
    buffers, wake_ups, left = [AnswerBuffer() for _ in range(100_000)], WakeUps(), []
    for is_last in (False, False, True):
        wake_ups.buffers.update(buffers)
        wake_ups.flush(is_last)
        left.append(len(wake_ups.buffers))

    assert [0, 100_000, 0] == left
    assert math.inf == wake_ups.due_s


def test_a_loop_that_is_closed_stops_nobody() -> None:
    """Its reader never comes back; others are answered."""
    with service_of(ToyStepper(step_s=0.002)) as service:
        loop = asyncio.new_event_loop()
        answer = service.answer(LONG)
        task = loop.create_task(answer.__anext__())
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
        told = wait_for(read(service, LONG))

    assert expected(LONG) == told.what


def test_a_cancelled_answer_ends() -> None:
    """Nothing comes after it was closed, and closing it again does nothing."""
    with service_of(ToyStepper(step_s=0.002)) as service:

        async def closed() -> list[object]:
            answer = service.answer(LONG)
            await anext(answer)
            await answer.aclose()
            await answer.aclose()
            return [event async for event in answer]

        assert [] == wait_for(closed())


def test_finished_requests_leave_nothing_behind() -> None:
    """After many answers there are no more records of answers than before."""
    kinds = (Ask, Finish, AnswerPiece)
    with service_of(ToyStepper()) as service:
        wait_for(read_all(service, [LONG] * 5))
        gc.collect()
        before = sum(type(x) in kinds for x in gc.get_objects())
        wait_for(read_all(service, [LONG] * 50))
        gc.collect()
        after = sum(type(x) in kinds for x in gc.get_objects())

    assert after - before < 10


def test_an_answer_has_at_least_the_tokens_that_were_asked_for() -> None:
    """The end is not chosen before, and may be after; without a limit the toy ends early."""
    ask = ends_early()
    short = len(expected(ask)[0])
    longer = Ask(ask.prompt, 40, GREEDY, min_tokens=short + 5)
    drawn = Ask(ask.prompt, 40, Sampling(1.0, seed=3), min_tokens=30)
    with service_of(ToyStepper()) as service:
        free, least, random = (told.numbers for told in wait_for(read_all(service, [ask, longer, drawn])))

    assert short == len(free)
    assert END == free[-1]
    assert free[:-1] == least[: short - 1]
    assert len(least) > short + 4
    assert END not in least[: short + 5]
    assert END not in random[:30]


def test_stop_strings_count_only_behind_the_least_tokens() -> None:
    """Text before is not searched."""
    (word,) = {expected(LONG)[1][3]}
    with service_of(ToyStepper()) as service:
        asks = [
            Ask(LONG.prompt, 45, GREEDY, stop=(word,), ignores_end=True),
            Ask(LONG.prompt, 45, GREEDY, stop=(word,), ignores_end=True, min_tokens=44),
        ]
        soon, late = wait_for(read_all(service, asks))

    assert "stop" == soon.finish.reason
    assert word not in soon.text
    assert word in late.text
    assert late.finish.output_tokens >= 44


def test_a_stop_token_ends_the_answer_and_has_no_text() -> None:
    """Wherever it comes first; before the least tokens it is not chosen."""
    numbers = expected(LONG)[0]
    with service_of(ToyStepper()) as service:
        asks = [
            Ask(LONG.prompt, 45, GREEDY, stop_tokens=(numbers[5],), ignores_end=True),
            Ask(LONG.prompt, 45, GREEDY, stop_tokens=(numbers[5],), ignores_end=True, min_tokens=44),
        ]
        soon, late = wait_for(read_all(service, asks))

    assert "stop" == soon.finish.reason
    assert numbers[: numbers.index(numbers[5]) + 1] == soon.numbers
    assert ByteText().decode(soon.numbers[:-1]) == soon.text
    assert numbers[5] not in late.numbers[:44]


def test_penalties_follow_the_answer_through_a_lost_device() -> None:
    """What was chosen before a restart counts after it."""
    sampling = Sampling(0.8, seed=5, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2)
    asks = [Ask((n, 3), 30, sampling, ignores_end=True) for n in range(4)]
    with service_of(ToyStepper(losses={20: Loss()})) as service:
        found = wait_for(read_all(service, asks))
        retried = service.snapshot().retried

    assert retried
    assert [expected(ask) for ask in asks] == [told.what for told in found]


def test_going_on_past_the_end_shows_no_end() -> None:
    """The end token has no text."""
    ask = ends_early()
    with service_of(ToyStepper()) as service:
        told = wait_for(read(service, Ask(ask.prompt, 40, GREEDY, ignores_end=True)))

    assert END in told.numbers
    assert "length" == told.finish.reason
    assert ByteText().decode(told.numbers) == told.text


def test_logprobs_come_with_every_token() -> None:
    """As many alternatives as were asked for, the chosen one among them when greedy."""
    with service_of(ToyStepper()) as service:
        told = wait_for(read(service, Ask((9,), 10, Sampling(0.0, logprobs=3), ignores_end=True)))

    assert 10 == len(told.tokens)
    for token in told.tokens:
        assert 3 == len(token.top)
        assert (token.number, token.logprob) == token.top[0]
