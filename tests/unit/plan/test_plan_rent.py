"""What can be rented together, and what it cannot exceed."""

import numpy as np
import pytest

from plan_factories import layered_case, random_case
from tessera import ir
from tessera.plan import PlanConfig, solve
from tessera.plan.latency import RequestTimer
from tessera.plan.problem import build
from tessera.plan.rent import Basket, Limit, Offer, alone_bytes, baskets, limit_of, shortest_us

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
    devices = tuple(ir.Device(d.name, d.kind, f"g{n}", d.memory_bytes) for n, d in enumerate(cluster.devices))
    priced = tuple(ir.Costs(c.trace_digest, devices, c.costs) for c in costs)
    made = solve(unit, priced, ir.Cluster(devices, cluster.links), PlanConfig(ir.Objective.THROUGHPUT))
    return limit_of(unit, priced), made


def test_no_plan_exceeds_the_limit() -> None:
    """Free transfers and free spreading can only help; the quick figure is looser still."""
    found, made = limit()

    assert (
        made.throughput_per_s
        <= found.per_s(("g0", "g1"))
        <= found.upper_bound_per_s(("g0", "g1")) * (1 + 1e-9)
    )


def test_two_of_a_kind_are_twice_as_fast_at_most() -> None:
    """The limit of n equal cards is n times that of one."""
    found, _ = limit()

    assert found.per_s(("g0", "g0", "g0")) == pytest.approx(3 * found.per_s(("g0",)))


def test_one_device_holds_weights_state_and_temporaries() -> None:
    """What a card needs to serve by itself: at least its weights and state."""
    unit, costs, cluster = random_case(0)
    alone = ir.Cluster(cluster.devices[:1], ())
    priced = tuple(ir.Costs(c.trace_digest, alone.devices, tuple(r[:1] for r in c.costs)) for c in costs)
    kinds = (ir.BufferKind.WEIGHT, ir.BufferKind.STATE)
    held = {b.name: b.size_bytes for g in unit.graphs for b in g.trace.buffers if b.kind in kinds}

    assert alone_bytes(unit, priced, alone) >= sum(held.values())


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_undercuts_the_shortest_time_of_a_step(seed: int) -> None:
    """On one device the shortest time is the step's own; any placement on two takes at least theirs."""
    unit, costs, cluster = random_case(seed)
    problem = build(unit, costs, cluster)
    clock = RequestTimer(problem)
    rng = np.random.default_rng(seed)
    for step, graph in enumerate(unit.graphs):
        both = shortest_us(graph, costs[step], (0, 1), 2)
        for labels in rng.integers(0, 2, (40, int(problem.node_of[-1].max()) + 1)):
            assert both <= clock.step_us(step, labels) * (1 + 1e-9)
        assert costs[step].total_us(0) == pytest.approx(shortest_us(graph, costs[step], (0,), 1))
