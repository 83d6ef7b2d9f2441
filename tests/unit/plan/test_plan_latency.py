"""One request alone."""

from itertools import product

import numpy as np
import pytest

from plan_factories import Draft, chain, layered_case, make_cluster, make_costs, make_unit, random_case
from sampling import some_of
from tessera.plan.config import FULL
from tessera.plan.latency import Fastest, RequestTimer, solve
from tessera.plan.problem import Problem, build


def fastest(problem: Problem) -> Fastest:
    """Without further starts or limits."""
    return solve(problem, (), lambda _: True, FULL)


def brute_us(problem: Problem) -> float:
    """The least makespan of all placements."""
    clock = RequestTimer(problem)
    every = product(range(problem.num_devices), repeat=problem.num_nodes)
    return min(clock.makespan_us(np.array(labels)) for labels in every)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", some_of(range(6), range(3)))
def test_chain_is_exact(seed: int, devices: int) -> None:
    """On a chain the placement found is the fastest of all, and the bound proves it."""
    rng = np.random.default_rng(seed)
    unit = make_unit(chain(6, [int(x) for x in rng.integers(1, 10**6, 5)]), counts=[3])
    cluster = make_cluster(devices)
    us = rng.uniform(1, 60, (1, 6, devices)).tolist()
    problem = build(unit, make_costs(unit, cluster, us), cluster)

    found = fastest(problem)

    assert brute_us(problem) == pytest.approx(found.latency_us)
    assert found.bound_us == pytest.approx(found.latency_us)


def test_small_graphs_come_close_to_the_best() -> None:
    """On small random graphs the search is within 3 % of the best on average and never below the bound."""
    ratios = []
    for seed in range(12):
        problem = build(*random_case(seed, num=5))
        found, best = fastest(problem), brute_us(problem)
        ratios.append(found.latency_us / best)
        assert found.bound_us <= best * (1 + 1e-9)

    assert float(np.mean(ratios)) < 1.03


def test_never_slower_than_one_device() -> None:
    """Everything on the best single device is always a candidate."""
    problem = build(*layered_case())
    clock = RequestTimer(problem)
    alone = min(clock.makespan_us(np.full(problem.num_nodes, d)) for d in range(2))

    assert fastest(problem).latency_us <= alone


def test_independent_work_is_spread() -> None:
    """Two launches that do not depend on each other run at the same time."""
    unit, cluster = make_unit(Draft(2)), make_cluster()
    problem = build(unit, make_costs(unit, cluster, [[[100.0, 110.0], [100.0, 110.0]]]), cluster)

    assert 110.0 == pytest.approx(fastest(problem).latency_us)


def test_transfer_delays_its_reader() -> None:
    """A reader elsewhere starts latency plus wire time after the producer's end."""
    unit, cluster = make_unit(chain(2, 250_000)), make_cluster(gbps=25.0, latency_us=5.0)
    problem = build(unit, make_costs(unit, cluster, [[[10.0, 10.0], [10.0, 10.0]]]), cluster)

    assert 10.0 + 5.0 + 10.0 + 10.0 == pytest.approx(RequestTimer(problem).makespan_us(np.array([0, 1])))


def test_moved_state_delays_the_next_step() -> None:
    """State that changes its home is waited for once, not once per run."""
    draft = Draft(1, states={"kv": ((0,), 250_000)})
    unit, cluster = make_unit(draft, draft, counts=[1, 4]), make_cluster(gbps=25.0, latency_us=5.0)
    problem = build(unit, make_costs(unit, cluster, [[[10.0, 10.0]], [[10.0, 10.0]]]), cluster)

    assert 50.0 + 15.0 == pytest.approx(RequestTimer(problem).makespan_us(np.array([0, 1])))
