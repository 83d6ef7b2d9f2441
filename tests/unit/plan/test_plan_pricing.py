"""Cheapest placements at given prices."""

from itertools import product

import numpy as np
import pytest

from plan_factories import Draft, chain, make_cluster, make_costs, make_unit, priced, random_case
from sampling import some_of
from tessera.plan.pricing.pricer import Cut, Pricer, Prices
from tessera.plan.pricing.throughput import maximised
from tessera.plan.problem import Problem, build


def random_prices(seed: int, num: int) -> Prices:
    """Any prices."""
    rng = np.random.default_rng(seed)
    return Prices(rng.uniform(0, 1, num), rng.uniform(0, 1, (num, num)), float(rng.uniform(0, 0.3)))


def brute(problem: Problem, prices: Prices) -> float:
    """The cheapest of all placements."""
    every = product(range(problem.num_devices), repeat=problem.num_nodes)
    return min(priced(problem, prices, np.array(labels)) for labels in every)


@pytest.mark.parametrize("seed", some_of(range(40), range(6)))
def test_two_devices_are_priced_exactly(seed: int) -> None:
    """On two devices the cut's placement costs what the best of all placements costs, and proves it."""
    problem = build(*random_case(seed, num=5))
    prices = random_prices(seed, 2)
    best = brute(problem, prices)

    labels, bound = Pricer(problem).cheapest(prices)

    assert best == pytest.approx(priced(problem, prices, labels), rel=1e-6)
    assert best * (1 - 1e-6) <= bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", some_of(range(10), range(4)))
def test_resident_weights_are_priced_exactly(seed: int, devices: int) -> None:
    """A weight that several launches read is charged once per device that holds it."""
    rng = np.random.default_rng(seed)
    readers = {f"w{n}": (tuple(range(n, n + 3)), int(rng.integers(1, 100))) for n in range(4)}
    unit = make_unit(Draft(6, chain(6, 1000).flows, weights=readers))
    cluster = make_cluster(devices)
    costs = make_costs(unit, cluster, rng.uniform(1, 9, (1, 6, devices)).tolist())
    problem = build(unit, costs, cluster)
    prices = Prices(np.ones(devices), np.ones((devices, devices)), 0.0, rng.uniform(0, 0.2, devices))
    best = brute(problem, prices)

    labels, bound = Pricer(problem).cheapest(prices)

    assert best == pytest.approx(priced(problem, prices, labels), rel=1e-6)
    assert best == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("seed", some_of(range(8), range(4)))
def test_tree_on_three_devices_is_priced_exactly(seed: int) -> None:
    """Where values form a forest, any number of devices is exact."""
    rng = np.random.default_rng(seed)
    joins = [(0, (2,), 90_000), (1, (2,), 50_000), (2, (4,), 70_000), (3, (4,), 60_000), (4, (5,), 40_000)]
    unit, cluster = make_unit(Draft(6, joins)), make_cluster(3)
    problem = build(unit, make_costs(unit, cluster, rng.uniform(1, 9, (1, 6, 3)).tolist()), cluster)
    prices = random_prices(seed, 3)

    labels, bound = Pricer(problem).cheapest(prices)

    assert brute(problem, prices) == pytest.approx(priced(problem, prices, labels))
    assert brute(problem, prices) == pytest.approx(bound)


def test_three_devices_come_close() -> None:
    """On small random graphs placements are within 5 % of the best on average, never below the bound."""
    ratios = []
    for seed in range(12):
        problem = build(*random_case(seed, num=4, devices=3))
        prices = random_prices(seed, 3)
        labels, bound = Pricer(problem).cheapest(prices)
        best = brute(problem, prices)
        ratios.append(priced(problem, prices, labels) / best)
        assert bound <= best * (1 + 1e-9)

    assert float(np.mean(ratios)) < 1.05
    assert min(ratios) > 1 - 1e-9


def test_chain_is_cut_at_its_cheapest_edge() -> None:
    """Given one end that belongs here and one that belongs there, the smallest value is cut."""
    sizes = [4 << 20, 4 << 10, 4 << 20]
    unit, cluster = make_unit(chain(4, sizes)), make_cluster()
    us = [[[10.0, 900.0], [50.0, 50.0], [50.0, 50.0], [900.0, 10.0]]]
    problem = build(unit, make_costs(unit, cluster, us), cluster)

    found, _ = Pricer(problem).cheapest(Prices(np.ones(2), np.ones((2, 2))))

    assert [0, 0, 1, 1] == found.tolist()


def test_capacity_far_above_the_flow_is_never_cut() -> None:
    """An item that one side costs a million times more than the other stays off that side."""
    own = np.array([[1.0, 1e6], [1e-3, 2e-3]])
    shape = Cut(2, np.array([0]), np.array([0]), np.array([1]))

    side, bound = shape.solve(own, np.full((1, 2, 2), 1e-4), np.zeros((0, 2)))

    assert [0, 0] == side.tolist()
    assert 1.001 == pytest.approx(bound)


@pytest.mark.parametrize("seed", some_of(range(8), range(4)))
def test_a_small_program_has_the_optimum_and_the_prices_that_prove_it(seed: int) -> None:
    """Rates keep to every row, no column earns more than its prices, and both sum to the same figure."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0, 1, (6, 30)) * (rng.uniform(0, 1, (6, 30)) < 0.7)
    rows[0] += 0.1
    rows[-1] -= 0.4  # a row of memory: some columns are overfull, and nothing is left
    right = np.append(np.ones(5), 0.0)

    best, prices = maximised(np.ones(30), rows, right)

    assert (rows @ best <= right + 1e-9).all()
    assert (prices @ rows >= 1 - 1e-9).all()
    assert best.sum() == pytest.approx(prices @ right)
