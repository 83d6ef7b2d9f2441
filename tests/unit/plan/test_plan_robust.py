"""Plans under costs that are wrong."""

from dataclasses import replace

import numpy as np
import pytest

from plan_factories import chain, layered_case, make_cluster, make_unit
from tessera import ir
from tessera.plan import FULL, PlanConfig, solve
from tessera.plan.problem import Mix, build
from tessera.plan.search.robust import Sampler, robust_of

THROUGHPUT = PlanConfig(ir.Objective.THROUGHPUT)


def test_costs_without_errors_have_no_range() -> None:
    """Nothing is sampled where nothing is uncertain."""
    assert solve(*layered_case(), THROUGHPUT).robust is None


def test_range_surrounds_the_rate_and_grows_with_the_error() -> None:
    """A plan's own rate lies in its range; twice the error, a wider range."""
    small, large = (solve(*layered_case(rel_error=e), THROUGHPUT) for e in (0.05, 0.2))
    assert small.robust is not None
    assert large.robust is not None

    assert large.robust.p10_per_s < large.robust.p50_per_s < large.robust.p90_per_s
    assert small.robust.p10_per_s < small.throughput_per_s * 1.05
    assert (large.robust.p90_per_s - large.robust.p10_per_s) > 2 * (
        small.robust.p90_per_s - small.robust.p10_per_s
    )
    assert 0.0 <= small.robust.regret <= large.robust.regret + 0.01


def test_samples_are_the_same_every_time() -> None:
    """Seeded: equal inputs, equal ranges."""
    first, second = (solve(*layered_case(rel_error=0.1), THROUGHPUT) for _ in range(2))

    assert first.robust == second.robust


def test_repricing_is_exact() -> None:
    """A sample's rate is that of the mix under the sample's own costs."""
    unit, costs, cluster = layered_case(2, rel_error=0.3)
    problem = build(unit, costs, cluster)
    sampler = Sampler(problem, FULL.num_samples)
    column = problem.column(np.arange(problem.num_nodes) % 2)
    factors = sampler._factors[7]
    names = list(dict.fromkeys(g.trace.kernel_of(i).name for g in unit.graphs for i in range(12)))
    wrong = tuple(
        replace(
            listed,
            costs=tuple(
                tuple(
                    replace(cost, us=cost.us * factors[d, names.index(g.trace.kernel_of(i).name)])
                    for d, cost in enumerate(row)
                )
                for i, row in enumerate(listed.costs)
            ),
        )
        for g, listed in zip(unit.graphs, costs, strict=True)
    )
    again = build(unit, wrong, cluster).column(column.labels)

    assert sampler.rates_per_s(Mix((column,), (1.0,)))[7] == pytest.approx(1e6 / again.busy_us.max())
    assert FULL.num_samples == len(sampler._factors)


def test_equal_gpus_are_wrong_together() -> None:
    """A kernel that is mispriced on one card is mispriced on its twin."""
    factors = Sampler(build(*layered_case(1, rel_error=0.3)), FULL.num_samples)._factors

    assert np.allclose(factors[:, 0], factors[:, 1])


def test_of_two_equals_the_one_on_sure_ground_is_taken() -> None:
    """Same rate; one candidate rests on a kernel whose price may be half wrong, the other does not."""
    draft = chain(2, 8)
    draft.names = ["sure", "unsure"]
    unit, cluster = make_unit(draft), make_cluster(3)
    devices = tuple(replace(d, gpu=f"g{n}") for n, d in enumerate(cluster.devices))
    cluster = ir.Cluster(devices, cluster.links)

    def cost(us: float, error: float) -> ir.Cost:
        return ir.Cost(us, ir.Source.FITTED, error)

    rows = (
        (cost(100.0, 0.0), cost(100.0, 0.0), cost(100.0, 0.0)),
        (cost(100.0, 0.0), cost(100.0, 0.5), cost(100.0, 0.02)),
    )
    costs = (ir.Costs(unit.graphs[0].trace.digest, devices, rows),)
    problem = build(unit, costs, cluster)
    mixes = [Mix((problem.column(np.array([0, d])),), (1.0,)) for d in (1, 2)]
    unsure, sure = robust_of(Sampler(problem, FULL.num_samples), mixes, [m.rate_per_s for m in mixes])

    assert sure.regret < unsure.regret
    assert sure.p10_per_s > unsure.p10_per_s
