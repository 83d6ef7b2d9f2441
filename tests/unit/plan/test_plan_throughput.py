"""The linear program over placements."""

from itertools import product

import numpy as np
import pytest

from plan_factories import chain, layered_case, make_cluster, make_costs, make_unit, random_case
from sampling import some_of
from tessera.plan.pricing.throughput import Pool, generate, master
from tessera.plan.problem import build
from tessera.plan.search.task import Task


@pytest.mark.parametrize("seed", some_of(range(10), range(4)))
def test_column_generation_reaches_the_optimum_over_all_placements(seed: int) -> None:
    """With every placement listed, the linear program gives no more than column generation found."""
    problem = build(*random_case(seed, num=5))
    every = [problem.column(np.array(x)) for x in product((0, 1), repeat=problem.num_nodes)]
    best = 1e6 * float(master(Pool(problem, 4), every).rates.sum())

    found = Task(problem, 4).free

    assert best == pytest.approx(found.mix.rate_per_s, rel=2e-3)
    assert best <= found.bound_per_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", some_of(range(6), range(4)))
def test_depth_row_is_kept(seed: int) -> None:
    """With a depth limit, rate times path time stays within the requests in flight."""
    task = Task(build(*random_case(seed, num=6)), 4)
    assert task.free.mix.columns
    rates = master(task.pool, task.pool.columns, depth=1.5).rates
    path = sum(float(x) * c.path_us for x, c in zip(rates, task.pool.columns, strict=True))

    assert path <= 1.5 * (1 + 1e-6)


def test_depth_limits_cost_throughput() -> None:
    """Less depth never gives a higher rate within the limit, and one request in flight is one at a time."""
    task = Task(build(*layered_case()), 4)
    free = task.free.mix.rate_per_s
    shallow = generate(task.pool, depth=1.0)
    shortest = min(c.path_us for c in task.pool.columns)

    assert shallow.bound_per_s <= free * (1 + 1e-6)
    assert 1e6 / shortest == pytest.approx(shallow.bound_per_s, rel=2e-3)


def test_equal_devices_gain_nothing_over_replicas() -> None:
    """On equal devices data-parallel is optimal, and the linear program says so."""
    unit, cluster = make_unit(chain(5)), make_cluster()
    costs = make_costs(unit, cluster, [[[float(x)] * 2 for x in (5, 9, 20, 3, 7)]])
    task = Task(build(unit, costs, cluster), 4)
    replicas = task.coarse["data-parallel"]

    assert replicas is not None
    assert task.free.mix.rate_per_s == pytest.approx(replicas[0].rate_per_s)
    assert task.free.bound_per_s == pytest.approx(replicas[0].rate_per_s, rel=1e-4)


def test_few_lanes() -> None:
    """A mix has at most one lane per device and link."""
    task = Task(build(*layered_case(6)), 4)

    assert len(task.free.mix.columns) <= 4
    assert 1.0 == pytest.approx(sum(task.free.mix.shares))


def test_four_devices_stay_below_their_bound() -> None:
    """More than two devices: the mix beats replicas and respects the bound."""
    problem = build(*random_case(3, num=8, devices=4))
    task = Task(problem, 4)
    replicas = task.coarse["data-parallel"]

    assert replicas is not None
    assert replicas[0].rate_per_s <= task.free.mix.rate_per_s <= task.free.bound_per_s
