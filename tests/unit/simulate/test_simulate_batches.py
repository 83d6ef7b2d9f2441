"""Lanes of unlike batches under the virtual clock: work is counted in work units, not in requests."""

from dataclasses import replace

import pytest

from batches_factory import mixed_plan
from tessera.ir import Plan
from tessera.simulate import SteadyRates, simulate, throughput_per_s


def alone(plan: Plan, lane: int) -> Plan:
    """A plan of one of its lanes, by itself."""
    chosen = plan.lanes[lane]
    variant = plan.every_variant[chosen.variant]
    only = replace(chosen, variant=0)
    return replace(plan, unit=variant.unit, costs=variant.costs, variants=(), lanes=(only,), lane_table=())


def test_steady_rate_counts_work_units() -> None:
    """Two devices apart do what each does alone, the smaller batch counted as a quarter."""
    plan, rates = mixed_plan(), SteadyRates()

    expected = SteadyRates()(alone(plan, 0)) + SteadyRates()(alone(plan, 1)) / 4

    assert rates(plan) == pytest.approx(expected, rel=0.02)
    assert rates.quick(plan) == pytest.approx(expected, rel=0.05)


def test_timeline_counts_work_units_too() -> None:
    """The throughput of a long run is the steady rate; requests carry their weights."""
    plan = mixed_plan()
    timeline = simulate(plan, 200)

    assert {1.0, 0.25} == set(timeline.weights)
    assert throughput_per_s(timeline) == pytest.approx(plan.simulated_per_s, rel=0.02)


def test_short_runs_count_work_units() -> None:
    """A run that is never full is measured over its whole time, by weight."""
    timeline = simulate(mixed_plan(), 2)

    assert throughput_per_s(timeline) == pytest.approx(1.25e6 / timeline.makespan_us)


def test_a_lane_runs_the_launches_of_its_own_batch() -> None:
    """Every span lasts as long as its lane's price list says."""
    timeline = simulate(mixed_plan(), 8)

    lasting = {
        track: {round(s.stop_us - s.start_us, 6) for s in timeline.spans if s.track == track}
        for track in ("d0", "d1")
    }

    assert {"d0": {140.0}, "d1": {110.0}} == lasting


def test_rates_of_one_plan_do_not_stick_to_another() -> None:
    """The same placements at another batch are other work."""
    mixed, rates = mixed_plan(), SteadyRates()
    plan = replace(mixed, lanes=mixed.lanes[:1], lane_table=(0,))
    other = replace(plan, lanes=(replace(plan.lanes[0], variant=1 - plan.lanes[0].variant),))

    assert rates(plan) != rates(other)
