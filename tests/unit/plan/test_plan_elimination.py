"""Pricing by elimination, kinds of device and the mixed-integer program, held against brute force."""

from itertools import product

import numpy as np
import pytest

from plan_factories import chain, layered_case, make_cluster, make_costs, make_unit, priced, random_case
from sampling import some_of
from tessera import ir
from tessera.plan import PlanConfig, solve
from tessera.plan.config import SearchConfig
from tessera.plan.pricing.milp import best_placement
from tessera.plan.pricing.pricer import Pricer, Prices
from tessera.plan.problem import Problem, build, kinds_of
from tessera.plan.search.task import Task


def some_prices(problem: Problem, seed: int) -> Prices:
    """Prices for all that can be priced."""
    rng = np.random.default_rng(seed)
    num = problem.num_devices
    return Prices(rng.uniform(0.1, 1, num), rng.uniform(0, 1, (num, num)), 0.2)


def cheapest(problem: Problem, prices: Prices) -> float:
    """By trying every placement."""
    every = product(range(problem.num_devices), repeat=problem.num_nodes)
    return min(priced(problem, prices, np.array(labels)) for labels in every)


@pytest.mark.parametrize("seed", some_of(range(8), range(3)))
def test_three_devices_are_priced_exactly(seed: int) -> None:
    """On narrow graphs elimination finds the cheapest placement, and its bound is that cost."""
    problem = build(*random_case(seed, num=3, devices=3))
    prices = some_prices(problem, seed)

    labels, bound = Pricer(problem).cheapest(prices)

    best = cheapest(problem, prices)
    assert priced(problem, prices, labels) == pytest.approx(best)
    assert bound == pytest.approx(best)


@pytest.mark.parametrize("seed", some_of(range(8), range(3)))
def test_split_buckets_still_give_a_bound(seed: int) -> None:
    """With tables too small for the graph the bound is at most the cheapest cost, and not absurdly low."""
    problem = build(*random_case(seed, num=4, devices=3))
    prices = some_prices(problem, seed)

    labels, bound = Pricer(problem, SearchConfig(max_entries=27)).cheapest(prices)

    best = cheapest(problem, prices)
    assert 0.5 * best < bound <= best * (1 + 1e-9)
    assert priced(problem, prices, labels) >= best * (1 - 1e-9)


def alike_case(counts: tuple[int, int]) -> tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]:
    """A chain on several devices of two kinds."""
    unit = make_unit(chain(6, 64))
    cluster = make_cluster(sum(counts))
    pairs = [(10.0, 30.0), (40.0, 12.0), (10.0, 25.0), (30.0, 15.0), (12.0, 30.0), (20.0, 20.0)]
    us = [[[a] * counts[0] + [b] * counts[1] for a, b in pairs]]
    return unit, make_costs(unit, cluster, us), cluster


def test_devices_of_a_kind_are_found() -> None:
    """Equal costs, memory and links make a kind."""
    kinds = kinds_of(build(*alike_case((2, 3))))

    assert kinds is not None
    assert ((0, 1), (2, 3, 4)) == kinds.members


def test_unlike_links_are_unlike_devices() -> None:
    """A device behind a slower link is of another kind."""
    unit, costs, cluster = alike_case((2, 2))
    slow = tuple(
        ir.Link(x.src, x.dst, "slow", 50.0, 1.0) if "d1" in (x.src, x.dst) else x for x in cluster.links
    )
    kinds = kinds_of(build(unit, costs, ir.Cluster(cluster.devices, slow)))

    assert kinds is not None
    assert (0,) in kinds.members
    assert (1,) in kinds.members


def test_twice_the_devices_give_twice_the_rate() -> None:
    """Two pairs of the same two kinds do twice the work of one, and the gap stays closed."""
    one = Task(build(*alike_case((1, 1))), 4).free
    two = Task(build(*alike_case((2, 2))), 4).free

    assert two.bound_per_s == pytest.approx(2 * one.bound_per_s, rel=1e-3)
    assert two.mix.rate_per_s == pytest.approx(two.bound_per_s, rel=1e-3)


@pytest.mark.parametrize("seed", some_of(range(4), range(3)))
def test_a_mix_is_never_below_the_best_single_placement(seed: int) -> None:
    """The mixed-integer program's placement is one column of many."""
    case = random_case(seed, num=5, devices=2)
    problem = build(*case)
    found = best_placement(problem)
    assert found is not None
    period = min(
        float(problem.column(np.array(x)).busy_us.max()) for x in product(range(2), repeat=problem.num_nodes)
    )

    assert float(found[0].busy_us.max()) == pytest.approx(period, rel=1e-3)
    assert solve(*case, PlanConfig(ir.Objective.THROUGHPUT)).throughput_per_s >= 1e6 / period * (1 - 1e-3)


def test_single_placement_is_a_policy() -> None:
    """It can be asked for by name, and has one lane."""
    plan = solve(*layered_case(2), PlanConfig(ir.Objective.THROUGHPUT, policy="single-placement"))

    assert 1 == len(plan.lanes)
    assert "single-placement" == plan.policy
