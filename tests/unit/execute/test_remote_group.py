"""WorkerGroup: in whatever order workers connect, each device gets one for it, and nobody is forgotten."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.execute.engine_connection import own_version
from tessera.execute.messages import ANY_RANK, Hello
from tessera.execute.rendezvous import WorkerGroup


def waiting_with(ranks: Sequence[int]) -> dict[Any, Hello]:
    """Workers with these ranks, by a number in place of their connection."""
    return {number: Hello(rank, "", own_version()) for number, rank in enumerate(ranks)}


@given(st.lists(st.integers(-1, 2), max_size=8), st.permutations([0, 1, 2]))
def test_each_device_gets_one_that_is_for_it(ranks: list[int], order: list[int]) -> None:
    """All are served as soon as they can be, by rank before by chance, whichever device looks first."""
    group, waiting, awaited = WorkerGroup(3), waiting_with(ranks), {0, 1, 2}
    found: dict[int, Hello] = {}
    for device in order:
        chosen = group.choose(device, waiting, awaited)
        if chosen is not None:
            found[device] = waiting.pop(chosen)
            awaited.discard(device)

    assert all(hello.rank in (ANY_RANK, device) for device, hello in found.items())
    assert {r for r in ranks if r >= 0} <= found.keys()
    left = {0, 1, 2} - set(ranks)
    if ranks.count(ANY_RANK) >= len(left):
        assert {0, 1, 2} == found.keys()
    else:
        assert left.isdisjoint(found)
    assert len(ranks) == len(waiting) + len(found)


def test_one_that_comes_back_takes_its_place() -> None:
    """Alone, when only its device has no worker; with a rank or without."""
    group = WorkerGroup(3)
    for rank in (1, ANY_RANK):
        assert group.choose(1, waiting_with([rank]), {1}) == 0  # type: ignore[comparison-overlap]
    assert group.choose(1, waiting_with([2]), {1}) is None


@pytest.mark.parametrize(
    ("rank", "digest", "said"), [(3, "", "no rank 3"), (-2, "", "no rank -2"), (0, "others", "other plans")]
)
def test_one_that_cannot_be_needed_is_told_why(rank: int, digest: str, said: str) -> None:
    """With the reason."""
    refusal = WorkerGroup(3, "plans").refusal(Hello(rank, digest, own_version()))

    assert refusal is not None
    assert said in refusal.message


def test_another_version_is_refused_with_both_named() -> None:
    """The worker is told which versions there are."""
    refusal = WorkerGroup(3).refusal(Hello(0, "", "9.9 (format 99)"))

    assert refusal is not None
    assert "9.9" in refusal.message
    assert own_version() in refusal.message
