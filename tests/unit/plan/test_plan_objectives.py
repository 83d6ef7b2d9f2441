"""Work per dollar and per joule, and which devices are worth having on."""

from dataclasses import replace

import pytest

from plan_factories import Told, chain, layered_case, make_cluster, make_costs, make_unit
from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan import PlanConfig, explain, solve
from tessera.plan.search.objectives import IDLE_SHARE

COST = PlanConfig(ir.Objective.COST)
ENERGY = PlanConfig(ir.Objective.ENERGY)

Case = tuple[ir.WorkUnit, tuple[ir.Costs, ...], ir.Cluster]


def rented(case: Case, usd: list[float | None], watts: list[float | None]) -> Case:
    """The case with prices and power."""
    unit, costs, cluster = case
    devices = tuple(
        replace(d, usd_per_hour=u, tdp_w=w) for d, u, w in zip(cluster.devices, usd, watts, strict=True)
    )
    return (
        unit,
        tuple(ir.Costs(c.trace_digest, devices, c.costs) for c in costs),
        ir.Cluster(devices, cluster.links),
    )


def alike(speeds: list[float], usd: list[float | None], watts: list[float | None]) -> Case:
    """A chain on devices that differ in speed only."""
    unit, cluster = make_unit(chain(6, 8)), make_cluster(len(speeds))
    costs = make_costs(unit, cluster, [[speeds] * 6])
    return rented((unit, costs, cluster), usd, watts)


def test_dear_device_is_not_rented() -> None:
    """Half as fast at a tenth of the price: the cheap one alone does most for a dollar."""
    plan = solve(*alike([10.0, 20.0], [10.0, 1.0], [None, None]), COST)

    assert (1,) == plan.used
    assert 1.0 == plan.usd_per_hour
    assert plan.usd_per_1k_units == pytest.approx(1.0 / 3.6 / plan.simulated_per_s)


def test_unlike_devices_are_rented_together_where_that_pays() -> None:
    """Opposite strengths at one price do more for a dollar together than either alone."""
    plan = solve(*rented(layered_case(), [1.0, 1.0], [None, None]), COST)

    assert (0, 1) == plan.used


def test_cost_plan_is_never_below_a_baseline_for_a_dollar() -> None:
    """Each coarse policy's dollars for the same work are at least the plan's."""
    plan = solve(*rented(layered_case(), [2.0, 1.0], [None, None]), COST)
    others = [b.usd_per_1k_units for b in plan.baselines if b.usd_per_1k_units is not None]

    assert plan.usd_per_1k_units is not None
    assert len(others) == len(plan.baselines)
    assert all(plan.usd_per_1k_units <= usd * (1 + 1e-9) for usd in others)
    assert "work per dollar" in explain(plan).verdict


def test_bound_of_a_cost_plan_is_that_of_the_devices_in_use() -> None:
    """What all devices together could do is no measure for a part of them."""
    plan = solve(*alike([10.0, 20.0], [10.0, 1.0], [None, None]), COST)

    assert plan.bound_per_s == pytest.approx(1e6 / 120.0, rel=1e-3)


def test_device_without_a_price_is_named() -> None:
    """Work per dollar cannot be known then."""
    with pytest.raises(PlanInfeasible, match="d1 has no price"):
        solve(*alike([10.0, 20.0], [1.0, None], [None, None]), COST)


def test_device_without_known_power_is_named() -> None:
    """Work per joule likewise."""
    with pytest.raises(PlanInfeasible, match="power of d0 is not known"):
        solve(*alike([10.0, 20.0], [None, None], [None, 100.0]), ENERGY)


def test_hungry_device_stays_off() -> None:
    """Twice as fast at ten times the power: the frugal one alone does most for a joule."""
    plan = solve(*alike([10.0, 20.0], [None, None], [1000.0, 100.0]), ENERGY)

    assert (1,) == plan.used
    assert plan.joules_per_unit == pytest.approx(120e-6 * 100.0)


def test_energy_of_waiting_is_counted() -> None:
    """Any plan that knows its devices' power says its joules: all of it when busy, a share when idle."""
    case = alike([10.0, 10.0], [None, None], [100.0, 300.0])
    plan = solve(*case, PlanConfig(ir.Objective.THROUGHPUT, policy="data-parallel"))
    # Both are busy all the time, each with half of the requests of 60 us.
    assert plan.joules_per_unit == pytest.approx(30e-6 * 400.0)

    slow = solve(
        *case, PlanConfig(ir.Objective.THROUGHPUT, policy="single"), Told(lambda p: p.throughput_per_s / 2)
    )
    watts = 100.0 if slow.used == (0,) else 300.0

    assert slow.joules_per_unit == pytest.approx(60e-6 * watts * (1 + IDLE_SHARE))


def test_without_prices_nothing_is_claimed() -> None:
    """Unknown is None, not zero."""
    plan = solve(*layered_case(), PlanConfig(ir.Objective.THROUGHPUT))

    assert plan.usd_per_hour is None
    assert plan.usd_per_1k_units is None
    assert plan.joules_per_unit is None


def test_more_microbatches_are_simulated_as_far_as_memory_goes() -> None:
    """What each number of microbatches gives, none beyond what fits."""
    unit, cluster = make_unit(chain(3, 1000)), make_cluster(memory=12_000)
    costs = make_costs(unit, cluster, [[[10.0, 10.0]] * 3])
    plan = solve(
        unit,
        costs,
        cluster,
        PlanConfig(ir.Objective.THROUGHPUT),
        Told(lambda p: p.throughput_per_s * p.microbatches / 99),
    )

    assert [1, 2, 4, 8] == [microbatches for microbatches, _ in plan.by_microbatches]
    assert [rate for _, rate in plan.by_microbatches] == sorted(rate for _, rate in plan.by_microbatches)
    assert plan.simulated_per_s == dict(plan.by_microbatches)[4]
