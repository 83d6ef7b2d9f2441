"""The planning problem as arrays."""

import math

import numpy as np
import pytest

from plan_factories import Draft, chain, make_cluster, make_costs, make_unit
from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible, RuleBroken
from tessera.plan.problem import MESSAGE_US, Problem, build, spread_us


def flat(unit: ir.WorkUnit, cluster: ir.Cluster, us: float = 10.0) -> tuple[ir.Costs, ...]:
    """Every launch costs the same everywhere."""
    rows = [[[us] * len(cluster.devices)] * len(g.trace.launches) for g in unit.graphs]
    return make_costs(unit, cluster, rows)


def problem_of(unit: ir.WorkUnit, cluster: ir.Cluster | None = None) -> Problem:
    """With flat costs."""
    cluster = cluster or make_cluster()
    return build(unit, flat(unit, cluster), cluster)


def test_value_is_paid_once_per_destination() -> None:
    """Two readers on one other device cost one transfer, readers on two other devices cost two."""
    unit = make_unit(Draft(3, [(0, (1, 2), 25_000)]))
    cluster = make_cluster(3, gbps=25.0)
    problem = problem_of(unit, cluster)

    together = problem.column(np.array([0, 1, 1]))
    apart = problem.column(np.array([0, 1, 2]))

    assert (1.0, 2.0) == (together.num_messages, apart.num_messages)
    assert 1.0 + MESSAGE_US == pytest.approx(together.busy_us[3:].sum())


def test_runs_of_a_step_repeat_its_work_and_its_transfers() -> None:
    """A step with a count of five loads devices and links five times."""
    unit = make_unit(chain(2, 25_000), counts=[5])
    column = problem_of(unit).column(np.array([0, 1]))

    assert [50.0, 50.0] == column.busy_us[:2].tolist()
    assert 5 * (1.0 + MESSAGE_US) == pytest.approx(column.busy_us[2 + 1])


def test_launches_that_share_state_are_one_node() -> None:
    """A group is placed whole."""
    unit = make_unit(Draft(4, [(0, (1,), 8)], states={"kv": ((1, 3), 64)}))
    problem = problem_of(unit)

    assert 3 == problem.num_nodes
    assert problem.node_of[0][1] == problem.node_of[0][3]


def test_immovable_launches_of_all_steps_are_one_node() -> None:
    """What may not move stays together on one common device."""
    unit = make_unit(Draft(3, immovable=[0, 2]), Draft(2, immovable=[1]))
    problem = problem_of(unit)
    stuck = {int(problem.node_of[0][0]), int(problem.node_of[0][2]), int(problem.node_of[1][1])}

    assert 1 == len(stuck)
    assert 3 == problem.num_nodes


def test_state_that_changes_home_between_steps_crosses_once_per_request() -> None:
    """Migration is priced with the buffer's size, however often the steps run."""
    draft = Draft(1, states={"kv": ((0,), 250_000)})
    problem = problem_of(make_unit(draft, draft, counts=[1, 32]))
    moved = problem.column(np.array([0, 1]))

    assert 1.0 == moved.num_messages
    assert 10.0 + MESSAGE_US == pytest.approx(moved.busy_us[2 + 1])
    assert 0.0 == problem.column(np.array([0, 0])).num_messages


def test_what_a_step_starts_with_is_free() -> None:
    """Weights and inputs cost no transfer wherever they are read."""
    graph = ir.WorkUnit((_given_input(),), (1,))
    problem = problem_of(graph)

    assert 0 == len(problem.values)


def _given_input() -> ir.Graph:
    base = make_unit(Draft(2)).graphs[0]
    buffers = (ir.Buffer("x", ir.BufferKind.INPUT, 64),)
    trace = ir.Trace(base.trace.step, base.trace.kernels, buffers, base.trace.launches, ())
    return ir.Graph(trace, (), (ir.Value(0, None, (0, 1), 0, 64),), ())


def test_memory_counts_weights_once_and_state_per_microbatch() -> None:
    """Weights are resident once per device that reads them, state once per request in flight."""
    draft = Draft(2, states={"kv": ((0,), 100)}, weights={"w": ((0, 1), 1000)})
    problem = problem_of(make_unit(draft, draft), make_cluster(memory=[1400, 1000]))
    column = problem.column(problem.labels(ir.Placement(((0, 1), (0, 1)))))

    assert [0.0, 0.0] == problem.excess_bytes((column,), microbatches=4).tolist()
    assert [100.0, 0.0] == problem.excess_bytes((column,), microbatches=5).tolist()


def test_placement_and_labels_are_inverse() -> None:
    """A node placement survives the way to launches and back."""
    problem = problem_of(make_unit(Draft(4, states={"kv": ((1, 3), 64)}), Draft(2)))
    labels = np.array([0, 1, 0, 1, 1])

    assert labels.tolist() == problem.labels(problem.placement(labels)).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
def test_senseless_cost_is_named(bad: float) -> None:
    """A cost that is no duration is refused with its launch and device."""
    unit, cluster = make_unit(chain(2)), make_cluster()
    costs = make_costs(unit, cluster, [[[1.0, 1.0], [1.0, bad]]])

    with pytest.raises(RuleBroken, match=r"launch 1 on d1: .* us"):
        build(unit, costs, cluster)


def test_costs_of_another_trace_are_refused() -> None:
    """A price list belongs to one trace."""
    unit, other, cluster = make_unit(chain(2)), make_unit(chain(2, 7)), make_cluster()

    with pytest.raises(MismatchError, match="another trace"):
        build(unit, flat(other, cluster), cluster)


def test_costs_of_other_devices_are_refused() -> None:
    """A price list belongs to the cluster's devices."""
    unit = make_unit(chain(2))

    with pytest.raises(MismatchError, match="priced for devices d0, d1, d2"):
        build(unit, flat(unit, make_cluster(3)), make_cluster(2))


def test_missing_price_list_is_refused() -> None:
    """Every step needs its costs."""
    unit, cluster = make_unit(chain(2), chain(2)), make_cluster()

    with pytest.raises(MismatchError, match="2 steps but 1 price lists"):
        build(unit, flat(unit, cluster)[:1], cluster)


def test_missing_link_is_refused() -> None:
    """Devices must be joined."""
    unit, cluster = make_unit(chain(2)), make_cluster()
    lame = ir.Cluster(cluster.devices, cluster.links[:1])

    with pytest.raises(RuleBroken, match="joined in both directions"):
        build(unit, flat(unit, lame), lame)


def test_link_without_bandwidth_is_refused() -> None:
    """A wire that carries nothing is no wire."""
    unit, cluster = make_unit(chain(2)), make_cluster(gbps=0.0)

    with pytest.raises(RuleBroken, match="positive bandwidth"):
        build(unit, flat(unit, cluster), cluster)


def test_empty_unit_is_refused() -> None:
    """There must be something to place."""
    unit, cluster = make_unit(Draft(0)), make_cluster()

    with pytest.raises(PlanInfeasible, match="no launches"):
        build(unit, flat(unit, cluster), cluster)


def test_unit_without_steps_is_refused() -> None:
    """A work unit has a step."""
    with pytest.raises(RuleBroken, match="a work unit has a step"):
        build(ir.WorkUnit((), ()), (), make_cluster())


def test_work_without_cost_is_refused() -> None:
    """If every launch is free somewhere, no rate would be too high."""
    unit, cluster = make_unit(chain(2)), make_cluster()

    with pytest.raises(PlanInfeasible, match="costs nothing on d0 or d1"):
        build(unit, make_costs(unit, cluster, [[[0.0, 5.0], [5.0, 0.0]]]), cluster)


def test_spread_is_a_lower_bound_that_fractions_attain() -> None:
    """Two rows of opposite preference end no sooner than each on its own device."""
    assert 10.0 == pytest.approx(spread_us(np.array([[10.0, 30.0], [30.0, 10.0]])), rel=1e-6)
