"""Muster: in whatever order workers call, each device gets one that is for it, and nobody is forgotten."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import MismatchError
from tessera.execute.gate import Caller, Gate
from tessera.execute.messages import ANY_RANK, Hello
from tessera.execute.muster import Muster

NAMES = ("d0", "d1", "d2")
SECRET = b"a secret of more than sixteen bytes"


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """Where callers are put back."""
    found = Gate("127.0.0.1", 0, SECRET)
    yield found
    found.close()


@contextlib.contextmanager
def callers(*hellos: tuple[int, str]) -> Iterator[list[tuple[Caller, Connection]]]:
    """Callers that say this, and the other ends of their connections."""
    made = []
    for rank, digest in hellos:
        mine, theirs = multiprocessing.Pipe()
        made.append((Caller(mine, Hello(rank, digest, ""), "here"), theirs))
    yield made
    for caller, theirs in made:
        caller.pipe.close()
        theirs.close()


def muster(gate: Gate, started: frozenset[int] = frozenset(), keeps_gate: bool = True) -> Muster:
    """For three devices."""
    return Muster(gate, NAMES, range(3), "plans", started, keeps_gate)


@given(st.lists(st.integers(-1, 4), max_size=8), st.sets(st.integers(0, 2), max_size=2))
def test_each_device_gets_one_that_is_for_it(gate: Gate, ranks: list[int], started: set[int]) -> None:
    """Complete as soon as it can be; by rank before by chance; the rest waits at the gate again."""
    with callers(*[(rank, "") for rank in ranks]) as made:
        found, taken = None, muster(gate, frozenset(started))
        for caller, _ in made:
            taken.add(caller)
            found = found or taken.complete()
        open_ranks = {r for r in ranks if 0 <= r < 3}
        open_devices = [d for d in range(3) if d not in open_ranks and d not in started]
        can = started <= open_ranks and ranks.count(ANY_RANK) >= len(open_devices)
        taken.disperse()
        waiting = []
        while (caller_or_none := gate.take(0.0)) is not None:
            waiting.append(caller_or_none)

    assert can == (found is not None)
    for device, caller in (found or {}).items():
        assert caller.hello.rank in (ANY_RANK, device)
        assert not (device in started and caller.hello.rank == ANY_RANK)
    assert len(ranks) == len(waiting) + len(found or {})
    assert not {id(c) for c in waiting} & {id(c) for c in (found or {}).values()}


def test_one_that_left_is_no_worker(gate: Gate) -> None:
    """A device whose caller hung up waits for another."""
    with callers((0, ""), (1, ""), (2, ""), (1, "")) as made:
        taken = muster(gate)
        taken.add(made[0][0])
        taken.add(made[1][0])
        made[1][1].close()
        taken.add(made[2][0])
        assert taken.complete() is None
        assert [1] == taken.missing()
        taken.add(made[3][0])
        found = taken.complete()

    assert found is not None
    assert found[1] is made[3][0]


def test_two_of_one_rank_are_a_mistake_where_nobody_can_wait(gate: Gate) -> None:
    """As in `tessera run`: it ends with one line."""
    with callers((1, "plans"), (1, "plans")) as made:
        taken = muster(gate, keeps_gate=False)
        taken.add(made[0][0])
        with pytest.raises(
            MismatchError, match=r"two processes say they are rank 1. Give each its own --rank"
        ):
            taken.add(made[1][0])


def test_other_plans_end_a_run_and_no_service(gate: Gate) -> None:
    """A run cannot go on with them; a service sends the caller away and waits for another."""
    with callers((1, "other plans"), (1, "other plans")) as made:
        with pytest.raises(MismatchError, match="device d1: it has other plans"):
            muster(gate, keeps_gate=False).add(made[0][0])
        muster(gate).add(made[1][0])

    assert "it brought plans" in gate.complaints[-1]
