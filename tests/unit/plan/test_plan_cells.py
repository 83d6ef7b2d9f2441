"""Plans for many devices are never below plans for fewer, side by side."""

import pytest

from plan_factories import layered_case, make_cluster
from tessera import ir
from tessera.plan.problem import partitions
from tessera.plan.solve import PlanConfig, solve
from tessera.simulate import SteadyRates

Case = tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]


def many(first: int, second: int) -> Case:
    """So many devices of each of two kinds."""
    unit, costs, _ = layered_case(num_layers=1)
    cluster = make_cluster(first + second)
    kinds = [0] * first + [1] * second
    prices = (
        ir.Costs(c.trace_digest, cluster.devices, tuple(tuple(row[k] for k in kinds) for row in c.costs))
        for c in costs
    )
    return unit, tuple(prices), cluster


def rate(case: Case, microbatches: int) -> float:
    """Requests per second of the throughput plan, simulated."""
    rates = SteadyRates()
    config = PlanConfig(ir.Objective.THROUGHPUT, microbatches=microbatches, shown_microbatches=())
    return solve(*case, config, rates).simulated_per_s


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "second"), [(2, 2), pytest.param(4, 4, marks=SLOW), pytest.param(8, 8, marks=SLOW)]
)
def test_copies_of_a_pair_are_a_floor(first: int, second: int) -> None:
    """As many pairs as there are, each with its share of the microbatches."""
    each = 3

    assert rate(many(first, second), each * first) >= 0.9999 * first * rate(many(1, 1), each)


def test_pairs_and_what_is_left_over_are_a_floor() -> None:
    """Three and five: three pairs, and two cards alone."""
    pair, alone = rate(many(1, 1), 4), rate(many(0, 1), 2)

    assert rate(many(3, 5), 16) >= 0.9999 * (3 * pair + 2 * alone)


def test_cells_are_made_of_whole_kinds() -> None:
    """Every device is in one cell."""
    assert [(((0, 2), (1, 3)),)] == list(partitions([(0, 1), (2, 3)]))
    assert [(((0, 1), (3, 4)), ((2,),))] == [
        (pairs, *rest) for pairs, *rest in partitions([(0, 3), (1, 4, 2)])
    ]
    assert [((0, 2, 3), (1, 4, 5)), ((0, 2), (1, 3))] == [
        first for first, *_ in partitions([(0, 1), (2, 3, 4, 5)])
    ]
    assert [] == list(partitions([(0,), (1,)]))
