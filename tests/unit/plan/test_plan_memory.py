"""What has to fit on a device, and what is said when it does not."""

from itertools import product

import numpy as np
import pytest

from plan_factories import Draft, MiB, chain, layered_case, make_cluster, make_costs, make_unit, random_case
from sampling import examples, some_of
from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan import PlanConfig, solve
from tessera.plan.arrays import Temporaries
from tessera.plan.pricing.pricer import Pricer
from tessera.plan.pricing.throughput import Pool, seed
from tessera.plan.problem import Mix, Problem, build
from tessera.simulate import SteadyRates

THROUGHPUT = PlanConfig(ir.Objective.THROUGHPUT)


def problem_of(unit: ir.WorkUnit, cluster: ir.Cluster | None = None) -> Problem:
    """Flat prices."""
    cluster = cluster or make_cluster()
    rows = [[[1.0] * len(cluster.devices)] * len(g.trace.launches) for g in unit.graphs]
    return build(unit, make_costs(unit, cluster, rows), cluster)


def peaks(draft: Draft, devices: list[int], num_devices: int = 2) -> list[float]:
    """Peaks of one step whose launches are its nodes."""
    graph = make_unit(draft).graphs[0]
    nodes = np.arange(draft.num)
    found = Temporaries(graph, nodes).peak_bytes(np.array(devices), num_devices)
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
    found = Temporaries(ir.Graph(trace, (), base.values, ()), np.arange(3))

    assert [20.0] == found.peak_bytes(np.zeros(3, dtype=np.int64), 1).tolist()


@pytest.mark.parametrize("seed", some_of(range(6), range(3)))
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

        assert max(walk) == Temporaries(graph, nodes).peak_bytes(labels, 3)[device]


@pytest.mark.parametrize("seed", some_of(range(6), range(3)))
def test_no_placement_needs_more_than_everything_on_one_device(seed: int) -> None:
    """So where a whole replica fits everywhere, everything fits."""
    problem = build(*random_case(seed))
    rng = np.random.default_rng(seed)
    for _ in range(20):
        column = problem.column(rng.integers(0, 2, problem.num_nodes))
        _, (per_microbatch,) = problem.footprints((column,))
        states = problem.states.bytes_on(column.labels, 2)

        assert (per_microbatch - states <= problem.most_temporary_bytes).all()


def test_temporaries_count_once_per_microbatch() -> None:
    """What fits with one request in flight may not fit with three."""
    problem = problem_of(make_unit(chain(2, [100])), make_cluster(memory=[250, 250]))
    column = problem.column(np.array([0, 0]))

    assert problem.fits((column,), 2)
    assert not problem.fits((column,), 3)
    assert 2 == problem.microbatches_that_fit(Mix((column,), (1.0,)))


def test_plan_says_how_many_microbatches_fit() -> None:
    """The count is the most that memory allows on the plan's lanes: ten on either device."""
    unit, cluster = make_unit(chain(3, [MiB, MiB])), make_cluster(memory=20 * MiB)
    costs = make_costs(unit, cluster, [[[10.0, 10.0]] * 3])

    assert 20 == solve(unit, costs, cluster, THROUGHPUT).max_microbatches


def test_model_too_large_for_all_devices_says_how_much_is_missing() -> None:
    """Weights and state against memory, in gigabytes, with a remedy."""
    unit = make_unit(Draft(2, weights={"w": ((0, 1), 30 * 10**9)}))
    cluster = make_cluster(memory=10**10)
    with pytest.raises(
        PlanInfeasible, match=r"weights take 30.0 GB .* together have 20.0 GB, 10.0 GB too little"
    ):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_fewer_requests_are_in_flight_where_memory_has_no_room_for_more() -> None:
    """The number asked for is the most; each device holds the state of one."""
    unit = make_unit(Draft(2, states={"kv": ((0,), 10**9)}))
    cluster = make_cluster(memory=10**9)
    plan = solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)

    assert plan.microbatches == plan.max_microbatches == 2
    assert (0, 1) == plan.used


def test_more_microbatches_never_give_less() -> None:
    """A larger number asked for is met as far as memory goes, by the same plan or a better one."""
    case = layered_case(4, memory=[400 * MiB, 300 * MiB])
    rates = SteadyRates()
    given = [
        solve(*case, PlanConfig(ir.Objective.THROUGHPUT, microbatches), rates).simulated_per_s
        for microbatches in (2, examples(4, 3))
    ]

    assert given == pytest.approx(sorted(given), rel=5e-3)


@pytest.mark.parametrize("seed", some_of(range(6), range(3)))
def test_with_little_memory_the_plan_is_at_least_the_best_placement_of_all(seed: int) -> None:
    """By busy time, every placement that fits enumerated."""
    rng = np.random.default_rng(seed)
    weights: dict[str, tuple[tuple[int, ...], int]] = {
        f"w{n}": ((n,), int(rng.integers(10, 100))) for n in range(8)
    }
    unit, cluster = make_unit(Draft(8, chain(8, 10).flows, weights=weights)), make_cluster(memory=[420, 360])
    case = unit, make_costs(unit, cluster, rng.uniform(1, 9, (1, 8, 2)).tolist()), cluster
    problem = build(*case)
    every = (problem.column(np.array(labels)) for labels in product((0, 1), repeat=8))
    fitting = [1e6 / float(c.busy_us.max()) for c in every if problem.fits((c,), 4)]
    plan = solve(*case, THROUGHPUT)

    assert plan.throughput_per_s >= max(fitting) * (1 - 1e-9)


def test_group_that_is_too_large_for_the_largest_device_is_named() -> None:
    """Launches that share state cannot be divided, however much memory there is in all."""
    unit = make_unit(Draft(2, states={"kv": ((0, 1), 10**9)}, kind="prefill"))
    cluster = make_cluster(memory=[8 * 10**8, 8 * 10**8])
    with pytest.raises(
        PlanInfeasible, match=r"launch 0 of prefill \(k\) .* need 1.00 GB; .* 200 MB too little"
    ):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_temporaries_alone_can_refuse_a_plan() -> None:
    """Weights and state would fit; what a step holds meanwhile does not, and the message counts it."""
    unit, cluster = make_unit(chain(2, 10**9)), make_cluster(memory=8 * 10**8)
    with pytest.raises(
        PlanInfeasible, match=r"temporaries of 1 request 1.00 GB; it has 800 MB, 200 MB too little"
    ):
        solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)


def test_tight_memory_keeps_every_policy_within_it() -> None:
    """Whatever is planned, each device holds its weights and all microbatches at their peak."""
    temporary = 4 * 24 * MiB
    per_layer = 4 * 16 * MiB + 4 * 8 * MiB
    case = layered_case(4, memory=[3 * per_layer + temporary, 2 * per_layer + temporary])
    plan = solve(*case, THROUGHPUT)
    problem = build(*case)
    columns = [problem.column(problem.labels(lane.placement)) for lane in plan.lanes]

    counts = [plan.lane_table[: plan.microbatches].count(lane) for lane in range(len(columns))]
    assert (problem.excess_bytes(columns, counts) <= 0).all()


def alike_layers(memory: list[int], us: list[float]) -> Problem:
    """Twelve layers of 10 MiB in a row."""
    draft = Draft(12, [(i, (i + 1,), 1000) for i in range(11)])
    draft.weights = {f"w{i}": ((i,), 10 * MiB) for i in range(12)}
    unit, cluster = make_unit(draft), make_cluster(len(memory), memory=[n * MiB for n in memory])
    return build(unit, make_costs(unit, cluster, [[us] * 12]), cluster)


def test_alike_layers_are_divided_where_memory_has_no_room_for_all_on_either_device() -> None:
    """At one price of bytes all of them would move at once; a placement that fits is found all the same."""
    problem = alike_layers([75, 55], [10.0, 20.0])

    assert problem.fits((Pool(problem, 2).fitting(2),), 2)


def test_a_model_that_needs_both_of_two_alike_devices_is_planned() -> None:
    """Though no placement on one device of each kind fits."""
    problem = alike_layers([55, 45, 45], [10.0, 20.0, 20.0])
    config = PlanConfig(ir.Objective.THROUGHPUT, microbatches=examples(4, 2))
    plan = solve(problem.unit, problem.costs, problem.cluster, config, SteadyRates())

    assert (0, 1, 2) == plan.used


def test_pools_of_a_problem_seek_placements_that_fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for fewer requests in flight takes those of a pool for more."""
    problem = build(*layered_case(memory=[200 * MiB, 260 * MiB]))
    first, second = Pool(problem, 8), Pool(problem, 2)
    assert first.is_tight
    seed(first)
    monkeypatch.setattr(Pricer, "cheapest", None)

    seed(second)

    assert second.columns
    assert set(second.columns) <= set(first.columns)
