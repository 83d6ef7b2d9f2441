"""From shares to a table of lanes."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from plan_factories import chain, layered_case, make_cluster, make_costs, make_unit
from tessera import ir
from tessera.execute.schedule import LaneTable
from tessera.plan import PlanConfig, solve
from tessera.plan.lanes import GOOD, MAX_TABLE, lane_table, rounded
from tessera.plan.problem import Column, Mix, build


def mix_of(*shares: float) -> Mix:
    """Lanes on either device in turn."""
    problem = build(*layered_case(1))
    columns = tuple(problem.column(np.full(problem.num_nodes, n % 2)) for n in range(len(shares)))
    return Mix(columns, shares)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (0.75, 0.25), (0.9, 0.08, 0.02), (1 / 3, 2 / 3)])
def test_table_holds_every_lane_about_as_often_as_its_share(shares: tuple[float, ...]) -> None:
    """Each is there, and none is off by more than one entry."""
    table, _ = lane_table(mix_of(*shares))
    counted = Counter(table)

    assert len(table) <= MAX_TABLE
    assert set(counted) == set(range(len(shares)))
    assert all(abs(counted[n] - s * len(table)) <= 1 for n, s in enumerate(shares))


def test_simple_shares_make_short_tables_without_loss() -> None:
    """Three to one needs four entries."""
    table, loss = lane_table(mix_of(0.75, 0.25))

    assert 4 == len(table)
    assert 0.0 == loss


def test_loss_is_what_the_rounded_shares_cost() -> None:
    """The rate by busy time at the table's shares, against that at the best ones."""
    problem = build(*layered_case(1))
    fast, slow = (problem.column(np.full(problem.num_nodes, d)) for d in (1, 0))
    # So much slower that the best share is smaller than any entry of a table.
    dear = Column(slow.labels, slow.busy_us * 500, slow.path_us, 0.0)
    speeds = [1 / c.busy_us.max() for c in (fast, dear)]
    mix = Mix((fast, dear), tuple(x / sum(speeds) for x in speeds))
    table, loss = lane_table(mix)
    counted = Counter(table)
    shares = tuple(counted[n] / len(table) for n in range(2))

    assert loss == pytest.approx(1 - Mix(mix.columns, shares).rate_per_s / mix.rate_per_s)
    assert loss > GOOD


def test_table_is_smooth() -> None:
    """After any number of entries no lane is more than one ahead of its share."""
    table, _ = lane_table(mix_of(0.6, 0.3, 0.1))
    for stop in range(1, len(table) + 1):
        counted = Counter(table[:stop])
        for lane, share in Counter(table).items():
            assert counted[lane] <= share * stop / len(table) + 1


def test_rounding_keeps_the_sum() -> None:
    """Whole numbers, none of them zero."""
    counts = rounded(np.array([0.98, 0.01, 0.01]), 7)

    assert [5, 1, 1] == counts.tolist()


def test_scheduler_keeps_to_the_table() -> None:
    """In the long run each lane gets its entries' share of the requests, whatever the lanes' rates say."""
    lanes = [ir.Lane(ir.Placement(((0,),)), rate) for rate in (1.0, 1.0)]
    table = LaneTable(lanes, slots=4, table=(0, 0, 0, 1))
    running = [table.take() for _ in range(4)]
    counted = Counter(running)
    for _ in range(400):
        table.give_back(running.pop(0))
        running.append(table.take())
        counted[running[-1]] += 1

    assert counted[0] / counted.total() == pytest.approx(0.75, abs=0.02)


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
