"""Batch as a decision: mixes over several batches, their bound, memory and baselines."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

from batches_factory import at_batch, random_variants, unlike_memory
from plan_factories import Draft, make_cluster, make_costs, make_unit
from sampling import examples
from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible
from tessera.plan import Batched, PlanConfig, explain, solve, solve_batches
from tessera.plan.problem import Mix, build, microbatch_counts
from tessera.plan.search.task import Task, joined_task
from tessera.simulate import SteadyRates

CONFIG = PlanConfig(ir.Objective.THROUGHPUT, microbatches=examples(4, 2), shown_microbatches=())


def batched(variants: list[ir.Variant], cluster: ir.Cluster, config: PlanConfig = CONFIG) -> Batched:
    """Judged by simulation."""
    return solve_batches(variants, cluster, config, SteadyRates)


@cache
def unlike() -> Batched:
    """Where memory is unlike."""
    return batched(*unlike_memory())


def joint(variants: list[ir.Variant], cluster: ir.Cluster, microbatches: int = 4) -> Task:
    """The batches as one task, with their columns."""
    parts = tuple(Task(build(v.unit, v.costs, cluster), microbatches) for v in variants)
    for part in parts:
        assert part.free.mix.columns
    return joined_task(parts, microbatches, simulate=None)


def listed_per_s(task: Task) -> float:
    """The optimum by busy time over every placement of every batch, memory left out."""
    busy = np.array(
        [
            task.problem.column(np.array(labels), v).busy_us
            for v, part in enumerate(task.problem.problems)
            for labels in product(range(2), repeat=part.num_nodes)
        ]
    )
    listed = linprog(-np.ones(len(busy)), A_ub=busy.T, b_ub=np.ones(busy.shape[1]))
    assert listed.x is not None
    return 1e6 * float(listed.x.sum())


@pytest.mark.parametrize("seed", range(6))
def test_bound_is_the_optimum_over_all_placements_of_all_batches(seed: int) -> None:
    """Every placement of every batch listed in one linear program gives what column generation gives."""
    task = joint(*random_variants(seed))
    best = listed_per_s(task)

    assert task.free.bound_per_s >= best * (1 - 1e-9)
    assert task.free.bound_per_s == pytest.approx(best, rel=1e-3)
    assert task.free.mix.rate_per_s == pytest.approx(best, rel=1e-3)


def test_bound_is_finite_where_memory_leaves_a_device_idle() -> None:
    """Its time has no price then; the bound still holds, and is the optimum without memory here."""
    variants, cluster = unlike_memory(batches=(8, 6))
    task = joint(variants, cluster)

    assert task.free.bound_per_s >= listed_per_s(task) * (1 - 1e-9)
    assert task.free.bound_per_s == pytest.approx(listed_per_s(task), rel=0.05)


def test_devices_that_are_alike_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over kinds of device the joint program has the optimum that it has over all of them."""
    rng = np.random.default_rng(1)
    unit, cluster = make_unit(Draft(4, [(i, (i + 1,), 50_000) for i in range(3)])), make_cluster(4)
    fixed, per_row = rng.uniform(1, 40, (2, 4, 2))
    variants = []
    for batch in (1, 3):
        own, us = at_batch(unit, batch), np.repeat(fixed + batch * per_row, 2, axis=1)
        variants.append(ir.Variant(own, make_costs(own, cluster, [us.tolist()])))

    over_kinds = joint(variants, cluster)
    assert over_kinds.pool.kinds is not None
    bound, rate = over_kinds.free.bound_per_s, over_kinds.free.mix.rate_per_s
    monkeypatch.setattr("tessera.plan.pricing.throughput.kinds_of", lambda problem: None)
    over_all = joint(variants, cluster).free

    assert bound == pytest.approx(over_all.bound_per_s, rel=2e-3)
    assert rate == pytest.approx(over_all.mix.rate_per_s, rel=5e-3)
    assert bound >= over_all.mix.rate_per_s * (1 - 1e-9)


def test_bound_of_a_mix_is_above_that_of_every_batch() -> None:
    """A batch that is good on one device and one that is good on the other do more together than either."""
    unit, cluster = make_unit(Draft(1)), make_cluster(2)
    first, second = at_batch(unit, 1), at_batch(unit, 2)
    variants = [
        ir.Variant(first, make_costs(first, cluster, [[[10.0, 100.0]]])),
        ir.Variant(second, make_costs(second, cluster, [[[200.0, 20.0]]])),
    ]
    alone = [solve(v.unit, v.costs, cluster, CONFIG).bound_per_s * v.batch for v in variants]

    found = batched(variants, cluster).plan

    assert max(alone) == pytest.approx(110_000.0, rel=1e-3)
    assert found.rows_per_s == pytest.approx(200_000.0, rel=0.02)
    assert found.bound_per_s * found.batch == pytest.approx(200_000.0, rel=1e-3)
    assert {1, 2} == {found.batch_of(lane) for lane in found.lanes}


def test_unlike_memory_gets_unlike_batches() -> None:
    """The small device can only take the small batch and the large one gains from the large: both do."""
    found = unlike()

    plan = found.plan
    single = max(t.figure(ir.Objective.THROUGHPUT) for t in found.tried)
    assert {(8, 0), (2, 1)} == {(plan.batch_of(x), x.placement.devices[0][0]) for x in plan.lanes}
    assert plan.rows_per_s == pytest.approx(8e6 / 560 + 2e6 / 440, rel=0.02)
    assert plan.rows_per_s > 1.2 * single
    assert plan.bound_per_s >= plan.throughput_per_s >= plan.simulated_per_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(examples(3, 1)))
def test_never_below_one_batch_nor_a_coarse_policy(seed: int) -> None:
    """In rows a second, whatever the costs."""
    variants, cluster = random_variants(seed, batches=(1, 2, 4)[: examples(3, 2)])

    found = batched(variants, cluster)

    rows = found.plan.rows_per_s
    assert all(rows >= t.figure(ir.Objective.THROUGHPUT) * (1 - 1e-9) for t in found.tried)
    for tried in found.tried:
        assert isinstance(tried.made, ir.Plan)
        for baseline in tried.made.baselines:
            assert rows >= (baseline.throughput_per_s or 0.0) * tried.variant.batch * (1 - 1e-9)
    assert all(found.plan.simulated_per_s >= (b.throughput_per_s or 0.0) for b in found.plan.baselines)


def test_data_parallel_has_a_batch_a_device() -> None:
    """The baseline is not held to one batch, and the policy can be asked for."""
    best = unlike().plan
    asked = batched(*unlike_memory(), replace(CONFIG, policy="data-parallel")).plan

    baseline = next(b for b in best.baselines if b.name == "data-parallel")
    assert baseline.throughput_per_s is not None
    assert baseline.throughput_per_s * best.batch == pytest.approx(8e6 / 560 + 2e6 / 440, rel=0.02)
    assert [8, 2] == sorted((asked.batch_of(lane) for lane in asked.lanes), reverse=True)
    assert "data-parallel" == asked.policy


def test_weights_are_held_once_for_all_batches() -> None:
    """Two lanes on one device: one set of weights, and microbatches of the hungrier lane."""
    variants, cluster = unlike_memory()
    problem = joint(variants, cluster).problem
    whole = [np.zeros(part.num_nodes, dtype=np.int64) for part in problem.problems]

    weights, per_microbatch = problem.footprint(problem.column(x, v) for v, x in enumerate(whole))
    each = [part.footprint((part.column(x),)) for part, x in zip(problem.problems, whole, strict=True)]

    assert weights.tolist() == each[0][0].tolist() == each[1][0].tolist()
    assert per_microbatch.tolist() == np.maximum(each[0][1], each[1][1]).tolist()


def test_plan_fits_the_memory_of_every_device() -> None:
    """With every microbatch on its lane; the plan says how many would fit."""
    plan = unlike().plan

    assert plan.max_microbatches is not None
    assert plan.microbatches <= plan.max_microbatches
    for room in explain(plan).memory:
        assert room.weight_bytes < room.used_bytes <= room.capacity_bytes


def test_a_batch_that_fits_nowhere_is_left_out() -> None:
    """It is listed with the reason, and the others are planned."""
    variants, cluster = unlike_memory(batches=(2, 1000))

    found = batched(variants, cluster)

    assert isinstance(found.tried[1].made, PlanInfeasible)
    assert 2 == found.plan.batch
    assert () == found.plan.variants


def test_no_batch_fits() -> None:
    """The message speaks of the smallest batch."""
    variants, cluster = unlike_memory(batches=(1000, 2000))

    with pytest.raises(PlanInfeasible, match="no batch fits; at batch 1000"):
        batched(variants, cluster)


def test_a_batch_given_twice_is_refused() -> None:
    """There would be two variants of one name."""
    variants, cluster = unlike_memory()

    with pytest.raises(MismatchError, match="twice"):
        batched([*variants, variants[0]], cluster)


def test_microbatches_are_held_by_requests_of_either_batch() -> None:
    """By Little's law: half of the requests' number at twice the batch, each as long as its whole path."""
    variants, cluster = random_variants(0, batches=(1, 2))
    problem = joint(variants, cluster).problem
    columns = tuple(problem.column(np.full(p.num_nodes, v), v) for v, p in enumerate(problem.problems))

    counts = microbatch_counts(Mix(columns, (0.5, 0.5)), 40)
    paths = [p.column(c.labels).path_us for p, c in zip(problem.problems, columns, strict=True)]

    assert 2 * counts[0] / counts[1] == pytest.approx(2 * paths[0] / (paths[1] / 2), rel=0.1)


def test_other_objectives_choose_one_batch() -> None:
    """Latency is that of one request, so the smallest batch serves it best."""
    variants, cluster = unlike_memory()

    plan = batched(variants, cluster, replace(CONFIG, objective=ir.Objective.LATENCY)).plan

    assert 2 == plan.batch
    assert () == plan.variants


def test_explanation_of_unlike_batches() -> None:
    """Utilisation and shares are those of both lanes, each at its own batch."""
    variants, cluster = unlike_memory(rel_error=0.05)
    plan = batched(variants, cluster).plan

    found = explain(plan)

    assert all(0.95 < use.utilisation < 1.001 for use in found.devices)
    work = {plan.batch_of(x): x.rate_per_s * plan.batch_of(x) for x in plan.lanes}
    requests = {batch: rows / batch for batch, rows in work.items()}
    (kernel,) = found.kernels
    assert kernel.share[0] == pytest.approx(requests[8] / sum(requests.values()), rel=0.01)
    assert found.is_gain is False  # data-parallel with batches chosen is as good
    assert plan.robust is not None
