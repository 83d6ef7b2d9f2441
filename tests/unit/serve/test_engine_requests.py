"""The engine on a toy whose tokens depend on everything read: whatever else runs, answers stay the same."""

import asyncio
import gc
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import examples
from serving_factory import (
    GREEDY,
    SHAPE,
    TOYS,
    Loss,
    ToyStepper,
    expected,
    random_ask,
    read,
    read_all,
    read_some,
    service_of,
    toy_group,
    toy_logits,
    toy_policy,
    until,
    wait_for,
)
from tessera.errors import AskError, ServiceBusy, ServiceClosing, UnknownName
from tessera.serve.answer import ActiveRequest
from tessera.serve.records import Ask, Finish, Sampling, Shape
from tessera.serve.service import Service

BY_ROW = replace(SHAPE, sizes=(2, 3), is_flat=False)
WITH_ROWS = replace(SHAPE, has_rows=True)
# Too few pages for two long answers: somebody is put aside again and again.
TINY_POOL = replace(SHAPE, pool_tokens=16 * 4)
SHAPES = st.sampled_from([SHAPE, BY_ROW, WITH_ROWS, TINY_POOL])
LONG = Ask((1, 2, 3), 45, GREEDY, ignores_end=True)


@pytest.fixture
def service() -> Iterator[Service]:
    """On two microbatches of three rows."""
    with service_of(ToyStepper()) as made:
        yield made


@settings(max_examples=examples(12, 4), deadline=None)
@given(st.integers(0, 10**6), SHAPES, st.integers(1, 20))
def test_answers_do_not_depend_on_the_crowd(seed: int, shape: Shape, num: int) -> None:
    """Any mix of lengths, arrivals, samplings and stop strings gives what each ask gets alone."""
    rng = random.Random(seed)
    asks = [random_ask(rng, shape.max_tokens) for _ in range(num)]

    async def late(service: Service, ask: Ask) -> tuple[list[int], str, str]:
        await asyncio.sleep(rng.random() * 0.01)
        return (await read(service, ask)).what

    async def all_of(service: Service) -> list[tuple[list[int], str, str]]:
        return await asyncio.gather(*(late(service, ask) for ask in asks))

    with service_of(ToyStepper(shape, seed=seed)) as service:
        found = wait_for(all_of(service))

    assert [expected(ask) for ask in asks] == found


@settings(max_examples=examples(12, 4), deadline=None)
@given(st.integers(0, 10**6), SHAPES)
def test_cancelled_requests_harm_nobody(seed: int, shape: Shape) -> None:
    """Half of the readers go away at some point; the others get what they get alone, all rows are free."""
    rng = random.Random(seed)
    asks = [random_ask(rng, shape.max_tokens) for _ in range(10)]

    async def all_of(service: Service) -> list[tuple[list[int], str, str]]:
        going = [
            read_some(service, random_ask(rng, shape.max_tokens), rng.randrange(0, 9)) for _ in range(10)
        ]
        answers = asyncio.gather(*(read(service, ask) for ask in asks))
        await asyncio.gather(*going)
        return [told.what for told in await answers]

    with service_of(ToyStepper(shape, seed=seed)) as service:
        found = wait_for(all_of(service))
        until(lambda: sum(service.snapshot().finished.values()) == 20)
        last = service.snapshot()

    assert [expected(ask) for ask in asks] == found
    assert 0 == last.running + last.waiting


@settings(max_examples=examples(20, 6), deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.sampled_from([(), TOYS]),
    st.sampled_from([0.0, 0.05]),
    SHAPES,
)
def test_a_loss_costs_no_answer(
    seed: int, step: int, devices: tuple[str, ...], retry_s: float, shape: Shape
) -> None:
    """One device or all are lost at any step: every request is answered as if nothing had happened."""
    rng = random.Random(seed)
    asks = [random_ask(rng, shape.max_tokens) for _ in range(8)]
    toy = ToyStepper(shape, seed=seed, losses={step: Loss(devices, retry_s)})
    with service_of(toy) as service:
        found = wait_for(read_all(service, asks))

    assert [expected(ask) for ask in asks] == [told.what for told in found]


def num_requests() -> int:
    """Those in memory."""
    gc.collect()
    return sum(isinstance(found, ActiveRequest) for found in gc.get_objects())


def test_a_request_that_has_ended_is_not_kept() -> None:
    """Also one that was restarted and then ended by a stop string."""
    text, before = expected(LONG)[1], num_requests()
    with service_of(ToyStepper(losses={2: Loss()})) as service:
        told = wait_for(read(service, replace(LONG, stop=(text[20:24],))))
        assert (1, "stop") == (service.snapshot().retried, told.finish.reason)
        until(lambda: num_requests() <= before)


def test_too_few_pages_cost_no_answer() -> None:
    """Long answers take the pages of one another in turn; each is what it is alone, and it is counted."""
    asks = [replace(LONG, prompt=(1, 2, number)) for number in range(6)]
    with service_of(ToyStepper(TINY_POOL)) as service:
        found = wait_for(read_all(service, asks))
        snapshot = service.snapshot()

    assert [expected(ask) for ask in asks] == [told.what for told in found]
    assert snapshot.preemptions > 0
    assert 0 == snapshot.pages_used


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_beginning_that_was_read_is_not_read_again(is_caching: bool) -> None:
    """The second ask reads what it has of its own; switched off, all of it. The answers are the same."""
    prompt = tuple(range(40))
    asks = [Ask((*prompt, number), 2, GREEDY, ignores_end=True) for number in (1, 2)]
    stepper = ToyStepper(replace(SHAPE, microbatches=1))
    with service_of(stepper, prefix_caching=is_caching) as service:
        found = [wait_for(read(service, ask)) for ask in asks]
        snapshot = service.snapshot()

    assert [expected(ask) for ask in asks] == [told.what for told in found]
    hits = 32 if is_caching else 0
    assert hits == snapshot.prefix_hits
    assert 2 * (41 + 1) - hits == stepper.num_tokens


def test_a_microbatch_is_kept_for_what_it_holds() -> None:
    """It is opened once for asks that come one after another, and closed when the service ends."""
    stepper = ToyStepper()
    with service_of(stepper) as service:
        for _ in range(3):
            wait_for(read(service, LONG))
        opened = list(stepper.opened)

    assert 1 == len(opened)
    assert not stepper._spaces


def test_logprobs_of_a_prompt_are_those_of_its_tokens() -> None:
    """Each from all tokens before it; also when a device is lost on the way, and pages are few."""
    ask = Ask(tuple(range(30, 50)), 3, GREEDY, ignores_end=True, prompt_logprobs=2)
    with service_of(ToyStepper(TINY_POOL, losses={9: Loss()})) as service:
        told = wait_for(read(service, ask))

    assert expected(ask)[0] == told.numbers
    assert list(ask.prompt[1:]) == [token.number for token in told.finish.prompt]
    for number, token in enumerate(told.finish.prompt, 1):
        logs = toy_logits(ask.prompt[:number]).log_softmax(-1)
        assert token.logprob == pytest.approx(float(logs[token.number]))
        assert [int(index) for index in logs.topk(2).indices] == [index for index, _ in token.top]


def test_one_loss_too_many_is_told() -> None:
    """A request that loses its devices again and again ends with an error that names the device."""
    with service_of(ToyStepper(losses=dict.fromkeys((5, 10, 15, 20), Loss()))) as service:
        told = wait_for(read(service, LONG))
        after = wait_for(read(service, LONG))

    assert "error" == told.finish.reason
    assert "toy:" in told.finish.message
    assert "length" == after.finish.reason


def test_a_wrong_guess_is_not_counted() -> None:
    """Who was blamed without proof costs the requests none of their tries."""
    losses = dict.fromkeys(range(5, 40, 5), Loss(is_certain=False))
    with service_of(ToyStepper(losses=losses)) as service:
        told = wait_for(read(service, LONG))
        snapshot = service.snapshot()

    assert expected(LONG) == told.what
    assert (7, 7) == (snapshot.retried, sum(device.losses for device in snapshot.devices))


def test_requests_wait_for_devices_that_come_back() -> None:
    """All are lost: who is there waits, who comes waits too, and all are answered."""
    with service_of(ToyStepper(losses={9: Loss(TOYS, 0.4)})) as service:

        async def both() -> list[tuple[list[int], str, str]]:
            first = asyncio.ensure_future(read(service, LONG))
            while not all(device.is_lost for device in service.snapshot().devices):
                await asyncio.sleep(0.005)
            second = asyncio.ensure_future(read(service, LONG))
            await asyncio.sleep(0.1)
            assert 2 == service.snapshot().waiting
            return [(await first).what, (await second).what]

        found = wait_for(both())
        states = [(device.state, device.pid, device.restarts) for device in service.snapshot().devices]

    assert [expected(LONG)] * 2 == found
    assert [("ready", 7, 1)] * 2 == states


def test_nothing_left_is_told_to_all() -> None:
    """Devices that are given up: everybody gets an error, and who comes later is refused."""
    with service_of(ToyStepper(losses={9: Loss(TOYS, None)}, step_s=0.05)) as service:
        found = wait_for(read_all(service, [LONG] * 9))
        until(lambda: bool(service.failure))
        with pytest.raises(ServiceClosing, match="no lane avoids toy:0, toy:1"):
            service.answer(LONG)

    assert {"error"} == {told.finish.reason for told in found}


def test_a_bug_in_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine's thread dies, its requests end with an error."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    stepper = ToyStepper()
    monkeypatch.setattr(stepper, "_flat", None)
    with service_of(stepper) as service:
        told = wait_for(read(service, LONG))

    assert "error" == told.finish.reason


def test_answers_go_on_beside_long_prompts() -> None:
    """In a microbatch with an answer in progress, every step of a prompt has a token of it too."""
    # Slow steps: the second prompt comes long before the first answer ends.
    stepper = ToyStepper(replace(SHAPE, microbatches=1), step_s=0.02)
    with service_of(stepper) as service:
        wait_for(read_all(service, [LONG, Ask((7,) * 30, 2, GREEDY)]))
    begun = stepper.log.index((0, 2))

    assert (30 + 7 - 1) // 7 <= stepper.log[begun:].count((0, 2)) <= 9
    assert 45 + 1 >= len(stepper.log)


def test_few_requests_are_packed_into_one_microbatch() -> None:
    """Three requests, a row each: the second microbatch of the group stays closed."""
    stepper = ToyStepper(plans=(toy_policy("quick", toy_group("quick", 0, microbatches=2)),))
    with service_of(stepper) as service:
        wait_for(read_all(service, [Ask((n,), 9, GREEDY, ignores_end=True) for n in range(3)]))

    assert {0} == {microbatch for microbatch, _ in stepper.opened}


def test_too_many_are_refused() -> None:
    """What comes while too many wait is refused at once, and those that wait are served."""
    shape = replace(SHAPE, microbatches=1, rows=1)
    with service_of(ToyStepper(shape, step_s=0.02), max_waiting=2) as service:

        async def crowd() -> tuple[int, list[str]]:
            answers, refused = [], 0
            for _ in range(10):
                try:
                    answers.append(service.answer(LONG))
                except ServiceBusy:
                    refused += 1
            reasons: list[str] = []
            for answer in answers:
                events = [event async for event in answer]
                assert isinstance(events[-1], Finish)
                reasons.append(events[-1].reason)
            return refused, reasons

        refused, reasons = wait_for(crowd())

    assert refused in (7, 8)  # the engine may have seated one meanwhile
    assert ["length"] * (10 - refused) == reasons


@pytest.mark.parametrize(
    ("ask", "place"),
    [
        (Ask((), 5), "prompt"),
        (Ask((1,) * 48, 1), "prompt"),
        (Ask((1,), 48), "max_tokens"),
        (Ask((258,), 5), "prompt"),
        (Ask((-1,), 5), "prompt"),
        (Ask((1,), 5, stop_tokens=(258,)), "stop_token_ids"),
        (Ask((1,), 5, Sampling(logit_bias=((258, 1.0),))), "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused(service: Service, ask: Ask, place: str) -> None:
    """The error names the field."""
    with pytest.raises(AskError) as error:
        service.answer(ask)

    assert place == error.value.place


def test_what_leaves_no_token_is_refused(service: Service) -> None:
    """Every token is an end, and none may come yet: the ask is at fault, not the model."""
    asked = Ask((1,), 5, GREEDY, stop_tokens=tuple(range(SHAPE.vocab_size)), min_tokens=1)
    (told,) = wait_for(read_all(service, [asked]))

    assert told.finish.is_refused
    assert told.finish.message.endswith("Lower min_tokens.")


def test_what_the_pages_cannot_hold_is_refused() -> None:
    """A request that would never fit is told so at once."""
    with (
        service_of(ToyStepper(replace(SHAPE, pool_tokens=48))) as service,
        pytest.raises(AskError, match="maximum is 32"),
    ):
        service.answer(Ask((1,) * 30, 3))


def test_stopping_finishes_what_was_taken() -> None:
    """Running and waiting requests are answered; what comes is refused."""
    with service_of(ToyStepper(step_s=0.001)) as service:

        async def stopped() -> tuple[bool, list[str]]:
            tasks = [asyncio.ensure_future(read(service, LONG)) for _ in range(9)]
            await asyncio.sleep(0.01)
            done = asyncio.ensure_future(asyncio.to_thread(service.stop, 30.0))
            await asyncio.sleep(0.01)
            with pytest.raises(ServiceClosing):
                service.answer(LONG)
            return await done, [(await task).finish.reason for task in tasks]

        is_clean, reasons = wait_for(stopped())

    assert is_clean
    assert ["length"] * 9 == reasons


def test_a_deadline_ends_what_is_not_done() -> None:
    """After the grace every request in progress gets an error, soon."""
    with service_of(ToyStepper(step_s=0.02)) as service:

        async def cut() -> tuple[bool, str]:
            task = asyncio.ensure_future(read(service, LONG))
            await asyncio.sleep(0.1)
            is_clean = await asyncio.to_thread(service.stop, 0.0)
            return is_clean, (await task).finish.reason

        assert (False, "cancelled") == wait_for(cut())


def test_a_slow_reader_gets_everything_in_one_piece(service: Service) -> None:
    """Pieces that nobody took are joined; nothing waits for the reader."""

    async def slow() -> tuple[int, list[int]]:
        answer = service.answer(LONG)
        until(lambda: service.snapshot().finished.get("length") == 1)
        events = [event async for event in answer]
        assert not isinstance(events[0], Finish)
        return len(events), [token.number for token in events[0].tokens]

    num_events, numbers = wait_for(slow())

    assert 2 == num_events
    assert expected(LONG)[0] == numbers


def test_an_answer_that_is_forgotten_is_cancelled() -> None:
    """Nobody holds it any more, so nobody can read it."""
    with service_of(ToyStepper(step_s=0.005)) as service:
        service.answer(LONG)
        until(lambda: service.snapshot().finished.get("cancelled") == 1)

        assert 0 == service.snapshot().running


def test_an_unknown_policy_is_refused() -> None:
    """The message lists those that there are."""
    with pytest.raises(UnknownName, match="auto, quick, wide"):
        service_of(ToyStepper(), policy="fast")


def test_a_policy_by_name_is_kept() -> None:
    """All microbatches are opened under it."""
    stepper = ToyStepper()
    with service_of(stepper, policy="wide") as service:
        wait_for(read_all(service, [LONG] * 5))

        assert "wide" == service.snapshot().policy
    assert {"wide"} == {stepper.plans[policy].policy for _, policy in stepper.opened}


def test_the_next_step_is_started_while_one_runs() -> None:
    """One request alone: every step but its first was queued behind another, and one ran in vain at most."""
    stepper = ToyStepper(replace(SHAPE, microbatches=1))
    with service_of(stepper) as service:
        told = wait_for(read(service, LONG))

    assert expected(LONG) == told.what
    assert len(told.what[0]) - 2 <= stepper.num_queued
    assert len(told.what[0]) == len(stepper.log)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, seed=3),
        Sampling(0.9, 0.9, 20, seed=4, logprobs=3, min_p=0.01),
        Sampling(1.2, seed=5, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3),
    ],
)
def test_the_next_step_is_started_before_a_drawn_token_is_known(sampling: Sampling) -> None:
    """Also where the next choice counts that token."""
    drawn = replace(LONG, sampling=sampling, min_tokens=20)
    stepper = ToyStepper(replace(SHAPE, microbatches=1))
    with service_of(stepper) as service:
        told = wait_for(read(service, drawn))

    assert expected(drawn) == told.what
    assert len(told.what[0]) - 2 <= stepper.num_queued


def test_prompt_logprobs_beside_steps_ahead() -> None:
    """Who waits for its step harms nobody, and gets what it gets alone."""
    noted = Ask(tuple(range(12)), 5, GREEDY, ignores_end=True, prompt_logprobs=2)
    with service_of(ToyStepper(replace(SHAPE, microbatches=1))) as service:
        alone = wait_for(read(service, noted))
        crowd = wait_for(read_all(service, [noted, *(replace(LONG, prompt=(n, 7)) for n in range(3))]))

    assert 11 == len(alone.finish.prompt)
    assert alone.finish.prompt == crowd[0].finish.prompt
    assert alone.what == crowd[0].what


def test_an_answer_that_is_over_has_read_one_token_too_many() -> None:
    """The end was not foreseen; what the queued step gave is nobody's, and the next request is answered."""
    ends = next(a for n in range(1, 9) if len(expected(a := Ask((n,), 45, GREEDY))[0]) < 45)
    stepper = ToyStepper(replace(SHAPE, microbatches=1))
    with service_of(stepper) as service:
        told = [wait_for(read(service, ask)) for ask in (ends, LONG)]

    assert [expected(ends), expected(LONG)] == [one.what for one in told]
