"""Sequences that go from group to group with their pages: answers stay right, and no page is lost."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from sampling import examples, some_of
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
    service_of,
    split_policy,
    toy_group,
    toy_policies,
    toy_policy,
    until,
    wait_for,
)
from tessera.ir import Role, ServicePlan
from tessera.kernels import PAGE
from tessera.serve.groups import batch_of
from tessera.serve.pages import listed
from tessera.serve.records import Ask, Shape
from tessera.serve.router import Router
from tessera.serve.sequences import SequenceBatch
from tessera.serve.service import Service

LONG = Ask(tuple(range(1, 20)), 28, GREEDY, ignores_end=True)
ROLES = (Role.ANSWERS, Role.MIXED)
# State in pages; and by row.
SHAPES = (
    SHAPE,
    replace(SHAPE, has_rows=True),
    replace(SHAPE, windows=(0, 6)),
)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=["pages", "rows", "windows"])
by_seed = pytest.mark.parametrize(
    ("shape", "seed"),
    some_of(
        [(SHAPE, 0), (SHAPE, 1), (SHAPE, 2), (SHAPES[1], 1), (SHAPES[2], 0), (SHAPES[2], 1)],
        [(SHAPE, 0), (SHAPES[1], 1), (SHAPES[2], 0)],
    ),
)


def router_of(service: Service) -> Router:
    return service._engine.scheduler


def users_of(router: Router) -> dict[int, Counter[int]]:
    """Pool -> page -> references by sequences, by reservations and by moves."""
    found: dict[int, Counter[int]] = {}
    for microbatch in router.microbatches.values():
        batch = batch_of(microbatch)
        for sequence in batch._begun:
            found.setdefault(id(batch.pool), Counter()).update(listed(sequence.pages))
        for step in batch._started:
            found.setdefault(id(batch.pool), Counter()).update(step.released)
    transits = {*router._transits.values(), *(move.transit for move in router._moves.values())}
    for transit in transits:
        if transit.pool is not None:
            found.setdefault(id(transit.pool), Counter()).update(listed(transit.pages))
    for move in router._moves.values():
        pool = batch_of(move.transit.source).pool
        found.setdefault(id(pool), Counter()).update(move.pages)
    return found


def check_work(batch: SequenceBatch) -> None:
    """Counts of work are those of its sequences, and what is read is not counted."""
    sequences = list(batch.by_request.values())
    assert batch.num_unread == sum(sequence.unread for sequence in sequences)
    assert batch.num_unanswered == sum(sequence.unanswered for sequence in sequences)
    for sequence in sequences if not batch._started else ():
        left = len(sequence.tokens) - (sequence.read if sequence.is_begun else 0)
        assert sequence.unread in (left, 0 if left <= 1 else left)


def check_pages(router: Router) -> None:
    """Every page is free, findable or used, and used as often as somebody has it."""
    for microbatch in router.microbatches.values():
        check_work(batch_of(microbatch))
    users = users_of(router)
    for pool in router.pools.values():
        used = users.get(id(pool), Counter())
        assert pool._users == [used[page] for page in range(pool.num_pages)]
        states = [*pool._blank, *pool._idle, *(page for page in range(pool.num_pages) if pool._users[page])]
        assert sorted(states) == list(range(1, pool.num_pages))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are counted after every event."""
    settle, moved = Router._settled, Router._moved

    def settled_and_checked(self: Router, microbatch: object) -> None:
        settle(self, microbatch)  # type: ignore[arg-type]
        check_pages(self)

    def moved_and_checked(self: Router, event: object) -> None:
        moved(self, event)  # type: ignore[arg-type]
        check_pages(self)

    monkeypatch.setattr(Router, "_settled", settled_and_checked)
    monkeypatch.setattr(Router, "_moved", moved_and_checked)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("role", "caching", "pages"),
    some_of(
        itertools.product(ROLES, (True, False), (5, 11)), [(Role.ANSWERS, True, 5), (Role.MIXED, False, 11)]
    ),
)
@by_shape
def test_answers_are_right_wherever_they_are_read(
    role: Role, caching: bool, pages: int, shape: Shape
) -> None:
    """Also with pages for hardly more than one sequence, where sequences are preempted."""
    shape, rng = replace(shape, pool_tokens=PAGE * pages), random.Random(pages)
    stepper = ToyStepper(shape, plans=(split_policy("split", role, shape),), seed=pages)
    asks = [random_ask(rng, shape.max_tokens) for _ in range(examples(24, 14))]
    with service_of(stepper, prefix_caching=caching) as service:
        told = wait_for(read_all(service, asks))
        snapshot, router = service.snapshot(), router_of(service)
        until(lambda: router.is_idle)
        check_pages(router)

    assert [expected(ask) for ask in asks] == [one.what for one in told]
    assert snapshot.pages_moved > 0
    assert [Role.PROMPTS, role] == [group.role for group in snapshot.groups]
    assert not router._transits
    assert 0 == sum(pool.num_used for pool in router.pools.values())


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("role", "pages"), [(Role.ANSWERS, 45), (Role.MIXED, 25)])
def test_windows_move_with_what_is_found(role: Role, pages: int) -> None:
    """Long prompts that begin alike, some of whose pages are where they answer, and some behind a window."""
    windows = replace(SHAPE, capacity=120, pool_tokens=PAGE * pages, windows=(0, 6, 20))
    stepper = ToyStepper(windows, plans=(split_policy("split", role, windows),), seed=pages)
    rng = random.Random(pages)
    begin = tuple(rng.randrange(1, 9) for _ in range(80))
    asks = []
    for _ in range(examples(30, 18)):
        rest = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 12)))
        asks.append(Ask(begin[: rng.randrange(80)] + rest, rng.randrange(2, 26), GREEDY, ignores_end=True))
    with service_of(stepper) as service:
        told = wait_for(read_all(service, asks))
        snapshot, router = service.snapshot(), router_of(service)
        until(lambda: router.is_idle)

    assert [expected(ask) for ask in asks] == [one.what for one in told]
    assert snapshot.pages_moved > 0
    assert snapshot.prefix_hits > 0
    assert 0 == sum(pool.num_used for pool in router.pools.values())


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("role", ROLES)
@by_shape
def test_failed_moves_change_no_answer(role: Role, shape: Shape) -> None:
    """A sequence whose pages do not arrive answers where it is."""
    rng = random.Random(3)
    stepper = ToyStepper(shape, plans=(split_policy("split", role, shape),))
    stepper.failing = set(range(0, 100, 2))
    asks = [random_ask(rng, SHAPE.max_tokens) for _ in range(examples(24, 14))]
    with service_of(stepper) as service:
        told = wait_for(read_all(service, asks))

    assert [expected(ask) for ask in asks] == [one.what for one in told]
    assert stepper.moves


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("role", ROLES)
@by_seed
def test_losses_of_either_side_change_no_answer(role: Role, seed: int, shape: Shape) -> None:
    """The devices are lost again and again, also while pages are on their way."""
    rng = random.Random(seed)
    losses = {rng.randrange(5, 400): Loss((rng.choice(TOYS),), 0.0, is_certain=False) for _ in range(12)}
    stepper = ToyStepper(shape, plans=(split_policy("split", role, shape),), losses=losses, seed=seed)
    asks = [random_ask(rng, SHAPE.max_tokens) for _ in range(examples(40, 20))]
    with service_of(stepper) as service:
        told = wait_for(read_all(service, asks))
        snapshot = service.snapshot()

    assert [expected(ask) for ask in asks] == [one.what for one in told]
    assert snapshot.pages_moved > 0


@pytest.mark.parametrize("lost", [0, 1])
def test_one_device_serves_alone(lost: int) -> None:
    """Without the other, the group that is left reads and answers."""
    loss = Loss((TOYS[lost],), 3600.0)
    stepper = ToyStepper(plans=(split_policy("split", Role.ANSWERS),), losses={6: loss})
    with service_of(stepper) as service:
        told = wait_for(read_all(service, [LONG] * 7))

    assert [expected(LONG)] * 7 == [one.what for one in told]


def every_policy(shape: Shape) -> tuple[ServicePlan, ...]:
    return (
        *toy_policies(["parallel"], shape),
        split_policy("strict", Role.ANSWERS, shape),
        split_policy("fractional", Role.MIXED, shape, reader=1),
        toy_policy("single", toy_group("single", 1, shape=shape, microbatches=2)),
    )


@pytest.mark.usefixtures("checked")
@by_seed
def test_policies_are_switched_under_load(seed: int, shape: Shape) -> None:
    """Sequences stay where their pages are, or their pages move; nothing is read again that need not be."""
    rng = random.Random(seed)
    policies = every_policy(shape)
    stepper = ToyStepper(shape, plans=policies, seed=seed)
    asks = [random_ask(rng, SHAPE.max_tokens, ignores_end=True) for _ in range(examples(40, 20))]
    names = [policy.policy for policy in policies]

    async def run(service: Service) -> list[object]:
        answers = asyncio.gather(*(read(service, ask) for ask in asks))
        while not answers.done():
            service.switch(rng.choice(names))
            await asyncio.sleep(0.003)
        return [one.what for one in await answers]

    with service_of(stepper, policy="parallel") as service:
        told = wait_for(run(service))
        until(lambda: router_of(service).is_idle)
        snapshot = service.snapshot()

    assert [expected(ask) for ask in asks] == told
    assert snapshot.switches > 1
    assert snapshot.last_switch_ms is not None


def test_a_switch_moves_pages_and_reads_nothing_again() -> None:
    """From two devices to one: the answers of the other go on there behind their pages."""
    policies = (toy_policies(["parallel"])[0], toy_policy("single", toy_group("single", 1, microbatches=2)))
    stepper = ToyStepper(plans=policies, step_s=0.005)

    async def run(service: Service) -> list[object]:
        answers = asyncio.gather(*(read(service, LONG) for _ in range(4)))
        while service.snapshot().output_tokens < 62:
            await asyncio.sleep(0.002)
        service.switch("single")
        return [one.what for one in await answers]

    with service_of(stepper, policy="parallel", prefix_caching=False) as service:
        told = wait_for(run(service))
        snapshot = service.snapshot()

    assert [expected(LONG)] * 4 == told
    assert snapshot.pages_moved > 0
    # Every token is read once, but those of queued steps at the switch.
    assert stepper.num_tokens <= 4 * (19 + 28) + 8


def test_a_prefix_at_the_destination_is_not_sent_again() -> None:
    """The second request with the same prompt finds its pages."""
    stepper = ToyStepper(replace(SHAPE, sizes=(3, 8)), plans=(split_policy("split", Role.ANSWERS),))
    prompt = Ask(tuple(range(1, 41)), 4, GREEDY, ignores_end=True)
    with service_of(stepper) as service:
        first = wait_for(read(service, prompt))
        moved = service.snapshot().pages_moved
        again = wait_for(read(service, prompt))
        more = service.snapshot().pages_moved - moved

    assert expected(prompt) == first.what == again.what
    assert moved == 3
    assert more <= 1


@by_shape
def test_cancelled_requests_leave_nothing_behind(shape: Shape) -> None:
    """Whenever they go, also while their pages move."""
    stepper = ToyStepper(shape, plans=(split_policy("split", Role.ANSWERS, shape),))

    async def run(service: Service) -> None:
        rng = random.Random(1)
        for _ in range(60):
            answer = service.answer(LONG)
            await asyncio.sleep(rng.random() * 0.004)
            await answer.aclose()

    with service_of(stepper) as service:
        wait_for(run(service))
        router = router_of(service)
        until(lambda: router.is_idle)
        check_pages(router)

    assert 0 == sum(pool.num_used for pool in router.pools.values())
    assert not router._transits


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("seed", some_of(range(3), range(1)))
def test_nobody_waits_forever_with_few_pages(role: Role, seed: int) -> None:
    """Requests that come one after the other, with pages for hardly more than one sequence."""
    shape, chance = replace(SHAPE, pool_tokens=PAGE * 5), random.Random(seed)
    stepper = ToyStepper(shape, plans=(split_policy("split", role, shape),), seed=seed)
    rng = random.Random(5)
    asks = [random_ask(rng, shape.max_tokens) for _ in range(examples(24, 14))]

    async def late(service: Service, ask: Ask) -> object:
        await asyncio.sleep(0.05 * chance.random())
        return (await read(service, ask)).what

    async def run(service: Service) -> list[object]:
        return list(await asyncio.gather(*(late(service, ask) for ask in asks)))

    with service_of(stepper, prefix_caching=True) as service:
        told = wait_for(run(service))

    assert [expected(ask) for ask in asks] == told


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]], ids=["pages", "rows"])
def test_a_sequence_without_pages_moves_where_there_are_some(shape: Shape) -> None:
    """In place of preemption: all began on one device while the other was away."""
    shape = replace(shape, pool_tokens=PAGE * 9)
    stepper = ToyStepper(shape, plans=toy_policies(["parallel"], shape), step_s=0.003)
    stepper.lose(TOYS[1], Loss((), 3600.0))

    async def run(service: Service) -> list[object]:
        answers = asyncio.gather(*(read(service, LONG) for _ in range(3)))
        while service.snapshot().output_tokens < 10:
            await asyncio.sleep(0.001)
        stepper.bring_back(TOYS[1])
        return [one.what for one in await answers]

    with service_of(stepper, policy="parallel", prefix_caching=False) as service:
        told = wait_for(run(service))
        router = router_of(service)
        until(lambda: router.is_idle)
        snapshot = service.snapshot()
        check_pages(router)

    assert [expected(LONG)] * 3 == told
    assert (1, 0) == (snapshot.evictions, snapshot.preemptions)
    assert not router._transits
