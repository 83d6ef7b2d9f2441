"""What can be rented together, and what it cannot exceed."""

import numpy as np
import pytest

from plan_factories import layered_case
from tessera import ir
from tessera.plan import PlanConfig, solve
from tessera.plan.rent import Basket, Limit, Offer, baskets

OFFERS = (
    Offer("big", "N", (("east", 4.0), ("west", 3.0))),
    Offer("small", "N", (("east", 1.0),)),
    Offer("other", "A", (("east", 0.5),)),
)


def test_cheapest_first() -> None:
    """By rent, then by fewer GPUs."""
    rents = [b.usd_per_hour for b in baskets(OFFERS, 3)]

    assert rents == sorted(rents)
    assert Basket(("other",), "east", 0.5) == baskets(OFFERS, 3)[0]


def test_one_provider_and_one_maker_a_basket() -> None:
    """A mixed pair is priced where both are to be had; cards of two makers are not mixed."""
    found = {b.gpus: b for b in baskets(OFFERS, 2)}

    assert Basket(("big", "small"), "east", 5.0) == found["big", "small"]
    assert Basket(("big",), "west", 3.0) == found[("big",)]
    assert ("small", "other") not in found


def test_provider_can_be_chosen() -> None:
    """Only what it quotes."""
    assert {("big",), ("big", "big")} == {b.gpus for b in baskets(OFFERS, 2, "west")}


def test_basket_reads_well() -> None:
    """Repeats are counted."""
    assert "2 x big + small" == str(Basket(("big", "big", "small"), "east", 9.0))


def limit() -> tuple[Limit, ir.Plan]:
    """The limit of a pair, and the plan on it."""
    unit, costs, cluster = layered_case()
    load = np.concatenate([
        np.array([[cost.us * count for cost in row] for row in priced.costs])
        for priced, count in zip(costs, unit.counts, strict=True)
    ])  # fmt: skip
    made = solve(unit, costs, cluster, PlanConfig(ir.Objective.THROUGHPUT))
    return Limit({"g0": 0, "g1": 1}, load), made


def test_no_plan_exceeds_the_limit() -> None:
    """Free transfers and free spreading can only help; the quick figure is looser still."""
    found, made = limit()

    assert (
        made.throughput_per_s <= found.per_s(("g0", "g1")) <= found.per_s(("g0", "g1"), rounds=1) * (1 + 1e-9)
    )


def test_two_of_a_kind_are_twice_as_fast_at_most() -> None:
    """The limit of n equal cards is n times that of one."""
    found, _ = limit()

    assert found.per_s(("g0", "g0", "g0")) == pytest.approx(3 * found.per_s(("g0",)))
