"""From shares to a table of lanes."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from plan_factories import chain, layered_case, make_cluster, make_costs, make_unit
from tessera import ir
from tessera.execute.lanes import LaneShares, shares_of
from tessera.plan import PlanConfig, solve
from tessera.plan.problem import Mix, build, microbatch_counts, microbatch_table, rounded


def mix_of(*shares: float) -> Mix:
    """Lanes on either device in turn."""
    problem = build(*layered_case(1))
    columns = tuple(problem.column(np.full(problem.num_nodes, n % 2)) for n in range(len(shares)))
    return Mix(columns, shares)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (0.75, 0.25), (0.9, 0.08, 0.02), (1 / 3, 2 / 3)])
def test_microbatches_are_held_by_share_and_path(shares: tuple[float, ...]) -> None:
    """By Little's law, every lane at least one, none off by more than the lanes that were raised to one."""
    mix = mix_of(*shares)
    counts = microbatch_counts(mix, 8)
    held = np.array([s * c.path_us for s, c in zip(mix.shares, mix.columns, strict=True)])

    assert 8 == sum(counts)
    assert min(counts) >= 1
    assert np.abs(np.array(counts) - 8 * held / held.sum()).max() <= len(shares)


def test_a_mix_may_say_how_many_microbatches_follow_each() -> None:
    """Then the shares are not asked."""
    mix = replace(mix_of(0.9, 0.1), microbatches=(1, 3))

    assert Counter({0: 1, 1: 3}) == Counter(microbatch_table(mix, 4))


def test_of_more_lanes_than_microbatches_the_busiest_come_first() -> None:
    """Every lane is in the table once."""
    assert (2, 0, 1) == microbatch_table(mix_of(0.3, 0.2, 0.5), 2)


def test_table_is_smooth() -> None:
    """After any number of entries no lane is more than one ahead of its share."""
    table = microbatch_table(mix_of(0.6, 0.3, 0.1), 10)
    for stop in range(1, len(table) + 1):
        counted = Counter(table[:stop])
        for lane, share in Counter(table).items():
            assert counted[lane] <= share * stop / len(table) + 1


def test_rounding_keeps_the_sum() -> None:
    """Whole numbers, none of them zero."""
    counts = rounded(np.array([0.98, 0.01, 0.01]), 7)

    assert [5, 1, 1] == counts.tolist()


def test_a_microbatch_keeps_its_lane() -> None:
    """However often one lane's requests end, the microbatches stay divided as the table has them."""
    lanes = [ir.Lane(ir.Placement(((0,),)), rate) for rate in (1.0, 1.0)]
    table = LaneShares(shares_of(lanes, (0, 0, 0, 1)))
    running = [table.take() for _ in range(4)]
    for _ in range(400):
        ended = running.pop(0)
        table.give_back(ended)
        running.append(table.take())

        assert ended == running[-1]
        assert Counter({0: 3, 1: 1}) == Counter(running)


def test_more_microbatches_begin_the_table_again() -> None:
    """Twice as many microbatches hold every lane twice as often."""
    lanes = [ir.Lane(ir.Placement(((0,),)), 1.0) for _ in range(2)]
    table = LaneShares(shares_of(lanes, (1, 0, 0)))

    assert Counter({0: 4, 1: 2}) == Counter(table.take() for _ in range(6))


def test_sequence_without_a_table_follows_the_rates() -> None:
    """The same rule, unrounded."""
    assert [0, 0, 1, 0, 0, 1] == list(islice(ir.lane_sequence([2.0, 1.0]), 6))


def test_plan_carries_its_table() -> None:
    """And verification wants every lane in it."""
    plan = solve(*layered_case(), PlanConfig(ir.Objective.THROUGHPUT))

    assert set(plan.lane_table) == set(range(len(plan.lanes)))
    assert 0.0 <= plan.rounding_loss < 0.05


def test_shared_bus_counts_both_directions_in_one_row() -> None:
    """Links of one group have one row of busy time; the plan is no faster than with wires of their own."""
    unit = make_unit(chain(4, 450_000))
    wires = make_cluster(gbps=5.0)
    bus = ir.Cluster(
        wires.devices, tuple(ir.Link(x.src, x.dst, x.name, x.latency_us, x.gbps, "bus") for x in wires.links)
    )
    rows = [[[300.0, 100.0], [100.0, 300.0], [300.0, 100.0], [100.0, 300.0]]]
    costs = make_costs(unit, bus, rows)
    shared = build(unit, costs, bus).column(np.array([1, 0, 1, 0]))
    apart = build(unit, costs, wires).column(np.array([1, 0, 1, 0]))
    plans = [solve(unit, costs, c, PlanConfig(ir.Objective.THROUGHPUT)) for c in (bus, wires)]

    assert shared.busy_us[2:].max() == pytest.approx(apart.busy_us[2:].sum())
    assert plans[0].throughput_per_s < plans[1].throughput_per_s
    assert plans[0].throughput_per_s <= plans[0].bound_per_s < plans[1].bound_per_s
