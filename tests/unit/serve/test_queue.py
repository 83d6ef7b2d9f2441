"""Who is served next, and in which slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_factory import GREEDY, SHAPE
from tessera.errors import ServiceBusy
from tessera.execute.serving import Shape
from tessera.serve.admission import choose_slot
from tessera.serve.queue import FairQueue
from tessera.serve.records import Ask
from tessera.serve.rows import MAX_CHUNKS, Request, Slot
from tessera.serve.text import ByteText


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
    """Of one client, requests leave in the order in which they came; nothing is lost."""
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
    with pytest.raises(ServiceBusy, match="2 requests wait"):
        queue.push("b", "3")
    queue.give_back("9")

    assert 3 == len(queue)
    assert "912" == drained(queue)


def test_a_request_can_leave_the_queue() -> None:
    """Wherever it is; and it is not there twice."""
    queue = queue_of("a1", "a2", "b3")
    queue.give_back("9")

    assert queue.remove("a", "1")
    assert queue.remove("a", "9")
    assert queue.remove("b", "3")
    assert not queue.remove("b", "3")
    assert "2" == drained(queue)


def slot_with(number: int, seated: int, policy: int = 0, is_reading: bool = False) -> Slot:
    """A slot of three rows, some of them taken."""
    slot = Slot(number, policy, SHAPE)
    for row in range(seated):
        slot.rows[row] = _request()
    if is_reading:
        slot.seat(_request())
    return slot


def _request() -> Request:
    return Request(Ask((1,), 1, GREEDY), ByteText().reader(), ())


def test_a_slot_is_opened_when_the_open_ones_are_full() -> None:
    """With a width of one, requests are packed."""
    one = slot_with(0, 2)

    assert choose_slot([], 0, 1, can_open=True) is True
    assert choose_slot([one], 0, 1, can_open=True) is one
    assert choose_slot([slot_with(0, 3)], 0, 1, can_open=True) is True
    assert choose_slot([slot_with(0, 3)], 0, 1, can_open=False) is False


def test_a_request_waits_for_the_slot_that_reads_another() -> None:
    """There is a row, but the spare row is taken: no slot is opened for that."""
    assert choose_slot([slot_with(0, 1, is_reading=True)], 0, 1, can_open=True) is False


def test_a_wide_policy_spreads_requests() -> None:
    """Up to its width slots are opened first, then the emptiest takes the next."""
    one, two = slot_with(0, 2), slot_with(1, 1)

    assert choose_slot([one], 0, 2, can_open=True) is True
    assert choose_slot([one, two], 0, 2, can_open=True) is two


def test_what_is_beyond_the_width_is_packed() -> None:
    """The fullest of the other slots is filled, so that the emptier ones can be closed."""
    full, some, more = slot_with(0, 3), slot_with(1, 1), slot_with(2, 2)

    assert choose_slot([full, some, more], 0, 1, can_open=True) is more


def test_an_open_slot_takes_what_would_wait_for_another() -> None:
    """The first reads a prompt; the second is open and at work anyway: nobody waits beside an empty row."""
    reading, other = slot_with(0, 1, is_reading=True), slot_with(1, 1)

    assert choose_slot([reading, other], 0, 1, can_open=True) is other


def test_slots_of_an_old_policy_are_renewed_one_by_one() -> None:
    """The emptiest takes nothing more, the others go on."""
    old, older = slot_with(0, 2), slot_with(1, 1)

    assert choose_slot([old, older], 1, 1, can_open=False) is old
    assert choose_slot([older], 1, 1, can_open=False) is False
    assert choose_slot([older], 1, 1, can_open=True) is True


def kinds_until_decode(slot: Slot, num_waiting: int) -> list[str]:
    """The steps that run before the next decode; new requests come in at once."""
    kinds: list[str] = []
    while True:
        if slot.takes:
            slot.seat(_request())
        begun = slot.begin(num_waiting)
        assert begun is not None
        kinds.append(begun[0])
        _, due = slot.end()
        for _, request in due:
            request.add(1)
        if kinds[-1] == "decode":
            return kinds


def test_empty_rows_are_filled_before_a_decode() -> None:
    """One answer, many rows, and requests that wait for them: several chunks come first, within a limit."""
    many = Slot(0, 0, Shape(1, 32, 48, 4, 258))
    many.rows[0] = _request()

    assert MAX_CHUNKS == kinds_until_decode(many, 99).count("chunk")


def test_nobody_who_waits_means_no_delay() -> None:
    """A single prompt beside a single answer takes turns with it, however many rows are empty."""
    many = Slot(0, 0, Shape(1, 32, 48, 4, 258))
    many.rows[0] = _request()

    assert 1 == kinds_until_decode(many, 0).count("chunk")
