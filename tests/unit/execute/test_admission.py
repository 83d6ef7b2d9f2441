"""Who is served next, and in which microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from benchmarks.row_service.admission import UsualCost, choose, slowdown_of, width_of
from hypothesis import given
from hypothesis import strategies as st

from factories import make_chain, make_cluster, make_plan
from tessera.errors import ServiceBusy
from tessera.execute.admission import FairQueue

ROWS = 3


def drained(queue: FairQueue[str]) -> str:
    """All that waits, in its order."""
    return "".join(iter(queue.pop, None))


def queue_of(*pushes: str, max_waiting: int = 99) -> FairQueue[str]:
    """Pushes such as "a1": client a, item 1."""
    made: FairQueue[str] = FairQueue(max_waiting)
    for push in pushes:
        made.push(push[0], push[1])
    return made


def test_clients_take_turns() -> None:
    """One that asks much does not hold up another that asks little."""
    assert "1542637" == drained(queue_of("a1", "a2", "a3", "a7", "b5", "c4", "b6"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers()), max_size=30))
def test_each_client_is_first_come_first_served(pushes: list[tuple[str, int]]) -> None:
    """One client's requests leave in the order in which they came; nothing is lost."""
    queue: FairQueue[tuple[str, int, int]] = FairQueue(99)
    for at, (client, item) in enumerate(pushes):
        queue.push(client, (client, item, at))
    left = list(iter(queue.pop, None))

    assert len(pushes) == len(left)
    for client in "abc":
        places = [at for who, _, at in left if who == client]
        assert sorted(places) == places


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_nobody_is_overtaken_twice(clients: list[str]) -> None:
    """Between two requests of a client, every other client that waits has one served."""
    queue: FairQueue[tuple[str, int]] = FairQueue(99)
    for at, client in enumerate(clients):
        queue.push(client, (client, at))
    left = [client for client, _ in iter(queue.pop, None)]

    for at, client in enumerate(left):
        again = left.index(client, at + 1) if client in left[at + 1 :] else None
        if again is not None:
            waiting = set(left[again:]) - {client}
            assert waiting <= set(left[at + 1 : again])


def test_a_full_queue_refuses() -> None:
    """The message says how many wait; what returns from a lost device is taken all the same."""
    queue = queue_of("a1", "a2", max_waiting=2)
    with pytest.raises(ServiceBusy, match="2 requests are already waiting"):
        queue.push("b", "3")
    queue.give_back("9")

    assert 3 == len(queue)
    assert "912" == drained(queue)


def test_a_request_can_leave_the_queue() -> None:
    """Wherever it is; and it is not there twice."""
    queue = queue_of("a1", "a2", "b3")
    queue.give_back("9")

    for client, item in (("a", "1"), ("a", "9"), ("b", "3"), ("b", "3")):
        queue.remove(client, item)
    assert "2" == drained(queue)


@dataclass
class Room:
    """Some rows."""

    num_used: int
    is_reading: bool = False

    @property
    def num_free(self) -> int:
        return ROWS - self.num_used

    @property
    def takes(self) -> bool:
        return self.num_free > 0 and not self.is_reading


@dataclass(eq=False)
class Place:
    """A microbatch of three rows, some of them taken."""

    number: int
    content: Room
    is_old: bool = False
    is_idle: bool = False
    # Tokens of the next request that it holds.
    held: int = 0
    costs: tuple[UsualCost, ...] = ()


def place(number: int, used: int, is_reading: bool = False, is_old: bool = False) -> Place:
    """So many requests in it."""
    return Place(number, Room(used, is_reading), is_old)


def chosen(
    places: Sequence[Place], width: int = 1, can_open: bool = True, waiting: int = 1, slowdown: float = 0.0
) -> Place | bool:
    """Where each microbatch more makes steps so much longer."""
    return choose(places, width, can_open, waiting, lambda _: slowdown, lambda place: place.held)


def test_one_is_opened_when_the_open_ones_are_full() -> None:
    """With a width of one, requests are packed."""
    one = place(0, 2)

    assert chosen([]) is True
    assert chosen([one]) is one
    assert chosen([place(0, 3)]) is True
    assert chosen([place(0, 3)], can_open=False) is False


def test_a_request_waits_for_the_one_that_reads_another() -> None:
    """There is a row, but nobody can begin now: nothing is opened for that, and no other one takes it."""
    reading, other = place(0, 2, is_reading=True), place(1, 1)

    assert chosen([reading]) is False
    assert chosen([reading, other]) is False
    assert chosen([reading, other], waiting=2) is other


def test_a_wide_policy_spreads_requests() -> None:
    """Up to its width microbatches are opened first, then the emptiest takes the next."""
    one, two = place(0, 2), place(1, 1)

    assert chosen([one], 2) is True
    assert chosen([one, two], 2) is two


def test_what_is_beyond_the_width_is_packed() -> None:
    """The first of the others is filled, so that the last ones can be closed."""
    full, some, more = place(0, 3), place(1, 1), place(2, 2)

    assert chosen([full, some, more]) is some


def test_a_slow_lane_takes_what_others_have_no_place_for() -> None:
    """Also if it is empty and the others end a step first; lanes of like speed are filled evenly."""
    slow, like = (replace(place(0, 0), costs=(UsualCost(frozenset(), seconds),)) for seconds in (0.1, 0.015))
    quick, full, reading = (
        replace(place(1, used, is_reading), costs=(UsualCost(frozenset(), 0.01),))
        for used, is_reading in ((2, False), (3, False), (2, True))
    )

    assert chosen([slow, quick], 2) is quick
    assert chosen([slow, reading], 2) is False
    assert chosen([slow, full], 2) is slow
    assert chosen([like, quick], 2) is like


def test_the_usual_time_of_a_step_is_a_mean() -> None:
    """A step alone once does not hide that a lane is slow beside others."""
    cost = UsualCost(frozenset("a"), 0.01)
    for seconds in (0.02, *([0.1] * 50)):
        cost.seen(seconds)

    assert 0.02 == cost.alone_s
    assert 0.1 == pytest.approx(cost.usual_s, rel=0.01)


def test_one_more_is_opened_when_enough_wait_for_it() -> None:
    """As many as make up for what everybody who is seated loses by it."""
    full = [place(number, 3) for number in range(5)]

    assert chosen(full, waiting=5, slowdown=1.0) is False
    assert chosen(full, waiting=6, slowdown=1.0) is True
    assert chosen(full, waiting=1, slowdown=0.0) is True


def test_old_ones_are_renewed_one_by_one() -> None:
    """The emptiest takes nothing more, the others go on."""
    old, older = place(0, 2, is_old=True), place(1, 1, is_old=True)

    assert chosen([old, older], can_open=False) is old
    assert chosen([older], can_open=False) is False
    assert chosen([older]) is True


def test_old_ones_are_renewed_together_where_others_have_room() -> None:
    """Who waits has a place in a new one."""
    old, older, new = place(0, 2, is_old=True), place(1, 1, is_old=True), place(2, 0)

    assert chosen([old, older, new], can_open=False) is new
    assert chosen([old, older, place(2, 3)], can_open=False) is old


def test_a_slowdown_is_what_a_plan_says_of_microbatches_in_flight() -> None:
    """Twice as many at the same rate take twice as long each; between the points, in proportion."""
    plan = make_plan([make_chain(2)], [[(0, 1)]], (63,), make_cluster(2), microbatches=4)
    slowdown = slowdown_of(replace(plan, by_microbatches=((1, 10.0), (2, 20.0), (4, 30.0))))

    assert [0.0, pytest.approx(0.2), pytest.approx(1 / 9)] == [slowdown(num) for num in (1, 2, 3)]
    assert pytest.approx(1 / 4) == slowdown(4)
    assert 0.0 == slowdown_of(plan)(1)


def test_a_width_is_what_keeps_the_devices_busy() -> None:
    """More microbatches than nearly reach the best rate of those there are bring nothing."""
    plan = make_plan([make_chain(2)], [[(0, 1)]], (63,), make_cluster(2), microbatches=4)
    wide = replace(plan, by_microbatches=((1, 23.0), (2, 44.0), (4, 52.0), (8, 60.0)))
    quick = replace(plan, by_microbatches=((1, 30.0), (2, 30.5), (4, 30.5), (8, 30.5)))

    assert (4, 1, 1) == (width_of(wide), width_of(quick), width_of(plan))


def test_an_idle_one_is_taken_before_one_is_opened() -> None:
    """Where nobody is, the one that holds most of the request comes first."""
    blank, known = replace(place(0, 0), is_idle=True), replace(place(1, 0), is_idle=True, held=32)

    assert known is chosen([blank, known])


def test_an_idle_one_counts_as_closed() -> None:
    """While the one that is open has places, it is not used."""
    busy, idle = place(0, 1), replace(place(1, 0), is_idle=True)

    assert busy is chosen([idle, busy])


def test_a_request_goes_where_its_beginning_is() -> None:
    """Also if another microbatch is somewhat emptier."""
    emptier, known = place(0, 0), replace(place(1, 1), held=32)

    assert known is chosen([emptier, known], width=2)


def test_a_known_beginning_does_not_fill_one_microbatch_alone() -> None:
    """A microbatch that is much fuller is left alone."""
    emptier, known = place(0, 0), replace(place(1, 2), held=32)

    assert emptier is chosen([emptier, known], width=2)


def test_who_is_next_can_be_looked_at() -> None:
    """It stays where it is, and is the one that is served then."""
    queue = queue_of("a1", "b2")
    queue.give_back("9")

    assert ("9", 3) == (queue.peek(), len(queue))
    assert "912" == drained(queue)
