"""What has to fit on a device, and what is said when it does not."""

import numpy as np
import pytest

from plan_factories import Draft, MiB, chain, layered_case, make_cluster, make_costs, make_unit, random_case
from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan import PlanConfig, solve
from tessera.plan.memory import temporaries_of
from tessera.plan.problem import Problem, build

THROUGHPUT = PlanConfig(ir.Objective.THROUGHPUT)


def problem_of(unit: ir.WorkUnit, cluster: ir.Cluster | None = None) -> Problem:
    """Flat prices."""
    cluster = cluster or make_cluster()
    rows = [[[1.0] * len(cluster.devices)] * len(g.trace.launches) for g in unit.graphs]
    return build(unit, make_costs(unit, cluster, rows), cluster)


def peaks(draft: Draft, devices: list[int], num_devices: int = 2) -> list[float]:
    """Of one step whose launches are its nodes."""
    graph = make_unit(draft).graphs[0]
    nodes = np.arange(draft.num)
    found = temporaries_of(graph, nodes).peak_bytes(np.array(devices), num_devices)
    return [float(x) for x in found]


def test_chain_holds_two_temporaries_at_a_time() -> None:
    """What a launch reads and what it writes are there together, and nothing else is."""
    assert [7.0, 0.0] == peaks(chain(4, [1, 4, 3]), [0, 0, 0, 0])


def test_value_that_crosses_is_held_on_both_devices() -> None:
    """The sender keeps it until its last local use, the receiver from its first."""
    assert [5.0, 7.0] == peaks(chain(4, [1, 4, 3]), [0, 0, 1, 1])


def test_value_read_late_is_held_until_then() -> None:
    """A residual stays while the branch beside it runs."""
    draft = Draft(4, [(0, (3,), 10), (0, (1,), 1), (1, (2,), 1), (2, (3,), 1)])

    assert [12.0, 0.0] == peaks(draft, [0, 0, 0, 0])


def test_inputs_are_held_from_the_start_and_outputs_to_the_end() -> None:
    """Neither is freed while the step runs."""
    base = make_unit(chain(3, [1, 1])).graphs[0]
    kinds = {0: ir.BufferKind.OUTPUT, 1: ir.BufferKind.INPUT}
    buffers = tuple(ir.Buffer(b.name, kinds[n], 10) for n, b in enumerate(base.trace.buffers))
    trace = ir.Trace(base.trace.step, base.trace.kernels, buffers, base.trace.launches, ())
    found = temporaries_of(ir.Graph(trace, (), base.values, ()), np.arange(3))

    assert [20.0] == found.peak_bytes(np.zeros(3, dtype=np.int64), 1).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_peak_equals_a_walk_through_the_launches(seed: int) -> None:
    """The vectorised peak is what a device holds at its fullest, counted launch by launch."""
    graph = random_case(seed, num=9)[0].graphs[0]
    nodes = np.arange(9)
    labels = np.random.default_rng(seed).integers(0, 3, 9)
    touched = [[a.buffer for a in x.accesses] for x in graph.trace.launches]
    for device in range(3):
        mine = {
            b: [i for i in range(9) if labels[i] == device and b in touched[i]]
            for b, x in enumerate(graph.trace.buffers)
            if x.kind is ir.BufferKind.TEMPORARY
        }
        walk = [
            sum(graph.trace.buffers[b].size_bytes for b, at in mine.items() if at and at[0] <= now <= at[-1])
            for now in range(9)
        ]

        assert max(walk) == temporaries_of(graph, nodes).peak_bytes(labels, 3)[device]


@pytest.mark.parametrize("seed", range(6))
def test_no_placement_needs_more_than_everything_on_one_device(seed: int) -> None:
    """So where a whole replica fits everywhere, everything fits."""
    problem = build(*random_case(seed))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        column = problem.column(rng.integers(0, 2, problem.num_nodes))
        _, per_slot = problem.footprint((column,))
        states = problem.states.bytes_on(column.labels, 2)

        assert (per_slot - states <= problem.most_temporary_bytes).all()


def test_temporaries_count_once_per_slot() -> None:
    """What fits with one request in flight may not fit with three."""
    problem = problem_of(make_unit(chain(2, [100])), make_cluster(memory=[250, 250]))
    column = problem.column(np.array([0, 0]))

    assert problem.fits((column,), 2)
    assert not problem.fits((column,), 3)
    assert 2 == problem.slots_that_fit((column,))


def test_plan_says_how_many_slots_fit() -> None:
    """The count is the most that memory allows on the plan's lanes."""
    unit, cluster = make_unit(chain(3, [MiB, MiB])), make_cluster(memory=20 * MiB)
    costs = make_costs(unit, cluster, [[[10.0, 10.0]] * 3])

    assert 10 == solve(unit, costs, cluster, THROUGHPUT).max_slots


def test_model_too_large_for_all_devices_says_how_much_is_missing() -> None:
    """Weights and state against memory, in gigabytes, with a remedy."""
    unit = make_unit(Draft(2, weights={"w": ((0, 1), 30 * 10**9)}))
    cluster = make_cluster(memory=10**10)
    with pytest.raises(PlanInfeasible, match=r"weights take 30 GB .* together have 20 GB, 10 GB too little"):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_state_that_is_too_large_says_how_many_slots_would_fit() -> None:
    """Fewer requests in flight are the first thing to try."""
    unit = make_unit(Draft(2, states={"kv": ((0,), 10**9)}))
    cluster = make_cluster(memory=10**9)
    with pytest.raises(PlanInfeasible, match="Use at most 2 slots"):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_group_that_is_too_large_for_the_largest_device_is_named() -> None:
    """Launches that share state cannot be divided, however much memory there is in all."""
    unit = make_unit(Draft(2, states={"kv": ((0, 1), 10**9)}, kind="prefill"))
    cluster = make_cluster(memory=[3 * 10**9, 3 * 10**9])
    with pytest.raises(PlanInfeasible, match=r"launch 0 of prefill \(k\) .* need 4 GB; .* 1 GB too little"):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_temporaries_alone_can_refuse_a_plan() -> None:
    """Weights and state would fit; what a step holds meanwhile does not, and the message counts it."""
    unit, cluster = make_unit(chain(2, 10**9)), make_cluster(memory=3 * 10**9)
    with pytest.raises(PlanInfeasible, match=r"temporaries of 4 requests 4 GB; it has 3, 1 GB too little"):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_tight_memory_keeps_every_policy_within_it() -> None:
    """Whatever is planned, each device holds its weights and all slots at their peak."""
    temporary = 4 * 24 * MiB
    per_layer = 4 * 16 * MiB + 4 * 8 * MiB
    case = layered_case(4, memory=[3 * per_layer + temporary, 2 * per_layer + temporary])
    plan = solve(*case, THROUGHPUT)
    problem = build(*case)
    columns = [problem.column(problem.labels(lane.placement)) for lane in plan.lanes]

    assert (problem.excess_bytes(columns, plan.slots) <= 0).all()
