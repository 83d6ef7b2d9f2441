"""WorkerGroup: in whatever order workers call, each device gets one for it, and nobody is forgotten."""

import multiprocessing
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tessera.execute.remote import Caller, WorkerGroup

from tessera.execute.messages import ANY_RANK, Hello

PIPE, _ = multiprocessing.Pipe()


def callers(ranks: Sequence[int], digest: str = "") -> list[Caller]:
    """Callers that say these ranks."""
    return [Caller(PIPE, Hello(rank, digest, ""), "here") for rank in ranks]


@given(st.lists(st.integers(-1, 2), max_size=8), st.permutations([0, 1, 2]))
def test_each_device_gets_one_that_is_for_it(ranks: list[int], order: list[int]) -> None:
    """All are served as soon as they can be, by rank before by chance, whichever device looks first."""
    group, waiting = WorkerGroup(3, awaited={0, 1, 2}), callers(ranks)
    found: dict[int, Caller] = {}
    for device in order:
        caller = group.choose(device, waiting)
        if caller is not None:
            waiting = [c for c in waiting if c is not caller]
            found[device] = caller
            group.awaited.discard(device)

    assert all(caller.hello.rank in (ANY_RANK, device) for device, caller in found.items())
    assert {r for r in ranks if r >= 0} <= found.keys()
    left = {0, 1, 2} - set(ranks)
    if ranks.count(ANY_RANK) >= len(left):
        assert {0, 1, 2} == found.keys()
    else:
        assert left.isdisjoint(found)
    assert len(ranks) == len(waiting) + len(found)


def test_one_that_comes_back_takes_its_place() -> None:
    """Alone, when only its device has no worker; with a rank or without."""
    group = WorkerGroup(3, awaited={1})
    for rank in (1, ANY_RANK):
        (caller,) = callers([rank])
        assert caller is group.choose(1, [caller])
    assert group.choose(1, callers([2])) is None


@pytest.mark.parametrize(
    ("rank", "digest", "said"), [(3, "", "no rank 3"), (-2, "", "no rank -2"), (0, "others", "other plans")]
)
def test_one_that_cannot_be_needed_is_told_why(rank: int, digest: str, said: str) -> None:
    """By whichever device looks first."""
    group = WorkerGroup(3, "plans", {1})
    (caller,) = callers([rank], digest)
    refusal = group.refusal(caller.hello)

    assert caller is group.choose(1, [caller])
    assert refusal is not None
    assert said in refusal.message
