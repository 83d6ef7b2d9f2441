"""The pace kernel: what it touches is proved by the analyzer, what it does is run by the interpreter."""

from typing import Any

import numpy as np
import pytest

from tessera.execute.cuda.pace import ENTRY, NO_TURN, PTX, Chain, Hold, key_of
from tessera_ptx import analyze
from tessera_ptx.errors import InterpreterFault
from tessera_ptx.interp import run


def turn(
    previous: list[int] | None,
    extra: int,
    queue: int | None,
    wants_next: bool,
    hold: int,
    waiting: tuple[int, ...] = (),
    key: int = 0,
) -> tuple[list[int], int | None, list[int]]:
    """One call, on the interpreter's clock, which moves at each look; (previous, queue, next) after it.

    `waiting`: keys at the places of a device's queue; the call's own place is the last one.
    """
    before = np.array(previous or [0] * 4, np.uint64)
    free = np.array([queue or 0, *waiting], np.uint64)
    record = np.zeros(4, np.uint64)
    args: list[Any] = [
        before if previous else np.uint64(0),
        np.uint64(extra),
        free if queue is not None else np.uint64(0),
        record if wants_next else np.uint64(0),
        np.uint64(hold),
        np.uint64(0),
        np.uint64(len(waiting)),
        np.uint64(max(0, len(waiting) - 1)),
        np.uint64(key),
        np.uint64(0),
    ]
    found: Any = run(PTX, ENTRY, 1, 1, args, max_steps=20_000).arrays
    return (
        [int(x) for x in found[0]] if previous else [],
        int(found[2][0]) if queue is not None else None,
        [int(x) for x in found[3]] if wants_next else [],
    )


def test_the_analyzer_proves_what_it_touches() -> None:
    """It reads and writes its two records and its queue, and nothing else."""
    (report,) = analyze(PTX)
    uses: dict[int, tuple[bool, bool]] = {}
    for access in report.accesses:
        read, write = uses.get(access.param, (False, False))
        uses[access.param] = (read or access.read, write or access.write or access.atomic)

    assert report.movable
    assert {0: (True, True), 2: (True, True), 3: (False, True)} == uses


def test_leaving_waits_until_the_record_is_due() -> None:
    """The end that was written is not before the one that was due, and hardly after it."""
    (_, _, ended, _), _, _ = turn([3, 40, 0, 0], 10, None, False, 0)

    assert 50 <= ended <= 52


def test_entering_takes_the_next_place_in_the_queue() -> None:
    """A device that is taken until 1000 is entered at 1000, and is then taken for the hold."""
    _, free, record = turn(None, 0, 1000, True, 25)

    assert (1025, [1000, 1025]) == (free, record[:2])


def test_a_free_device_is_entered_now() -> None:
    """A queue that has passed does not hold anybody up."""
    (_, _, ended, _), free, record = turn([0, 200, 0, 0], 0, 7, True, 25)

    assert ended <= record[0] <= ended + 3
    assert free == record[1] == record[0] + 25


def test_a_stamp_needs_no_queue() -> None:
    """Without a queue the record starts now and is due at once."""
    _, _, record = turn(None, 0, None, True, 0)

    assert record[0] == record[1] > 0


def test_the_least_key_has_its_turn_when_the_device_is_free() -> None:
    """A launch waits until 40, goes before a larger key, starts where the last one ended, and is gone."""
    _, free, record = turn(None, 0, 40, True, 25, (9, 0), 7)

    assert (65, [40, 65]) == (free, record[:2])


def test_a_smaller_key_that_waits_goes_first() -> None:
    """Against a smaller key the kernel never gets its turn; here nobody takes it away."""
    with pytest.raises(InterpreterFault):
        turn(None, 0, 40, True, 25, (3, 0), 7)


def test_a_key_never_is_zero_and_leaves_room_for_when_the_launch_came() -> None:
    """Zero means that nobody waits; whatever time is added, the time left counts first."""
    latest = ((1 << 24) - 1) << 1

    assert 0 < key_of(Hold(5)) <= key_of(Hold(5)) + latest < key_of(Hold(5, left_ns=1))
    assert key_of(Hold(5, left_ns=1 << 62)) + latest < 1 << 64


def test_of_equal_segments_the_one_that_came_first_goes_first() -> None:
    """Keys that others posted with a later time do not hold up a launch whose time left is the same."""
    later = key_of(Hold(5)) + (1 << 1)
    _, free, record = turn(None, 0, 40, True, 25, (later, 0), key_of(Hold(5)))

    assert (65, [40, 65]) == (free, record[:2])


class Calls:
    """Stands for the kernel."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int, Any, Any, int]] = []

    def __call__(self, *call: Any) -> None:
        self.seen.append(call)


class Places:
    """A device's queue with places for three microbatches."""

    def numel(self) -> int:
        """Its words."""
        return 4


def test_one_call_leaves_a_launch_and_enters_the_next() -> None:
    """Two launches in a row take three calls, not four."""
    calls: Any = Calls()
    queue: Any = Places()
    chain = Chain(calls, queue, 2)
    one: Any = "first"
    two: Any = "second"
    chain.enter(one, Hold(5))
    chain.enter(two, Hold(6))
    chain.settle()
    chain.settle()

    assert [
        (None, 0, queue, "first", 5, (3, 2, key_of(Hold(5)))),
        ("first", 0, queue, "second", 6, (3, 2, key_of(Hold(6)))),
        ("second", 0, None, None, 0, NO_TURN),
    ] == calls.seen


def test_a_launch_waits_for_the_latency_of_what_arrives() -> None:
    """A copy that has passed its wire is there a latency later; the receiver waits, the wire does not."""
    calls: Any = Calls()
    chain = Chain(calls, None)
    copied: Any = "copied"
    record: Any = "launch"
    chain.arrive(copied, 900)
    chain.enter(record, Hold(5))

    assert [("copied", 900, None, "launch", 5, NO_TURN)] == calls.seen
