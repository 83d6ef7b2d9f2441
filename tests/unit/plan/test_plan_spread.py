"""Kernel-level placements of lanes: segments of a coarse placement that go to another device."""

from dataclasses import replace

import pytest

import home_factory
from factories import make_cluster, make_plan
from tessera.ir import Costs, Placement, WorkUnit
from tessera.plan.host import even_order
from tessera.plan.lanes import Spread, lane_plan, variants_of
from tessera.simulate import SteadyRates


def test_the_first_numbers_of_an_order_are_spread_evenly() -> None:
    assert [0] == even_order(1)
    assert [0, 4, 2, 6, 1, 5, 3, 7] == even_order(8)
    for num in (3, 7, 12):
        assert sorted(even_order(num)) == list(range(num))


def work() -> tuple[WorkUnit, tuple[Costs, ...], Placement]:
    """A step of two layers, whose launches without state alternate between devices."""
    trace = home_factory.trace(4)
    state = {n for n, b in enumerate(trace.buffers) if b.kind == "state"}
    bound = {n for n, x in enumerate(trace.launches) if any(a.buffer in state for a in x.accesses)}
    place = tuple(0 if n in bound else 1 for n in range(len(trace.launches)))
    plan = make_plan([trace], [[place]], cluster=make_cluster(2), microbatches=2)
    return plan.unit, plan.costs, plan.lanes[0].placement


def test_segments_without_state_leave_the_busiest_device() -> None:
    """One after the other, whole; those with state stay."""
    unit, _, placement = work()
    (place,) = placement.devices
    busy = [float(sum(d == device for d in place)) for device in range(2)]
    busiest = max((0, 1), key=busy.__getitem__)
    found = list(variants_of(unit.graphs[0], place, busy))

    for before, after in zip([place, *found], found, strict=False):
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert changed == list(range(changed[0], changed[-1] + 1))
        assert {busiest} == {before[n] for n in changed}
    if busiest == 1:
        assert set(found[-1]) == {0}
    assert not list(variants_of(unit.graphs[0], (0,) * len(place), [1.0, 0.0]))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_best_variant_is_the_one_of_the_highest_simulated_rate(microbatches: int) -> None:
    """Although most are not simulated."""
    unit, costs, placement = work()
    cluster, rates, asked = make_cluster(2), SteadyRates(), list[tuple[int, ...]]()
    alone = replace(unit, counts=(1,))

    def rate(step: int, devices: tuple[int, ...]) -> float:
        asked.append(devices)
        return rates(lane_plan(alone, costs, cluster, Placement((devices,)), microbatches, ""))

    best = Spread(unit, costs, rate).best_of([placement])
    num_asked = len(asked)
    (place,) = placement.devices
    busy = [float(sum(d == device for d in place)) for device in range(2)]
    every = [place, *variants_of(unit.graphs[0], place, busy)]

    assert rate(0, best.devices[0]) == max(rate(0, variant) for variant in every)
    assert num_asked <= len(every)
