"""Steps that no service runs: batch and microbatches are chosen, for the plan and for its rivals."""

from dataclasses import replace
from functools import cache

import pytest

from plan_factories import Draft, Named, make_cluster, make_costs, make_unit
from tessera import ir
from tessera.errors import PlanInfeasible
from tessera.plan import QUICK, Comparison, PlanConfig, explain
from tessera.plan.batches import BatchSearch, PricedUnit
from tessera.plan.comparison import Option
from tessera.simulate import SteadyRates

MB = 1 << 20
BATCHES, MICROBATCHES = (4, 16, 64), (1, 2)
# Bytes of state of one row.
ROW = 8 * MB


def unit_at(batch: int, cluster: ir.Cluster) -> PricedUnit:
    """Four launches: two read state and suit even devices, two read weights and suit odd ones."""
    flows = [(i, (i + 1,), batch * 1000) for i in range(3)]
    weights: Named = {f"w{i}": ((i,), 64 * MB) for i in (1, 3)}
    unit = make_unit(Draft(4, flows, {"kv": ((0, 2), ROW * batch)}, weights))
    graphs = (
        replace(g, trace=replace(g.trace, step=replace(g.trace.step, batch=batch))) for g in unit.graphs
    )
    unit = replace(unit, graphs=tuple(graphs))
    odd = [n % 2 for n in range(len(cluster.devices))]
    state = [(15.0 if x else 5.0) * batch for x in odd]
    read = [200.0 + (1.0 if x else 4.0) * batch for x in odd]
    return unit, make_costs(unit, cluster, [[state, read, state, read]])


def search(memory: tuple[int, ...], load: ir.Load) -> BatchSearch:
    cluster = make_cluster(len(memory), gbps=25.0, latency_us=5.0, memory=[m * MB for m in memory])
    config = PlanConfig(ir.Objective.THROUGHPUT, search=QUICK)
    return BatchSearch(lambda batch: unit_at(batch, cluster), cluster, load, config, SteadyRates)


@cache
def planned(
    memory: tuple[int, int] = (1200, 500), tpot_ms: float | None = None
) -> tuple[ir.Plan, Comparison]:
    """For two devices with so many megabytes."""
    return search(memory, ir.Load(1, 1, tpot_ms=tpot_ms)).best(BATCHES, MICROBATCHES)


def test_the_plan_is_the_best_point_and_fits() -> None:
    """Its figures are those of the plan that is written."""
    plan, found = planned()

    assert found.chosen.tokens_per_s == pytest.approx(plan.rows_per_s)
    assert {"single", "data-parallel"} <= {o.policy for o in found.baselines}
    for one in explain(plan).memory:
        assert one.weight_bytes + one.state_bytes + one.temporary_bytes <= one.capacity_bytes


def test_data_parallel_has_a_batch_of_its_own_on_every_device() -> None:
    """The device with less memory takes a smaller one; rates add up."""
    single, parallel = (
        next(o for o in planned()[1].baselines if o.policy == name) for name in ("single", "data-parallel")
    )

    assert parallel.batch["d0"] > parallel.batch["d1"] > 1
    assert parallel.tokens_per_s > single.tokens_per_s


def test_the_plan_follows_a_policy_that_found_a_better_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse policies are searched from the plan's batch on."""
    far = Option("layer-pipeline", 90_000.0, 1.0, 1.0, {"d0": 64, "d1": 64}, 2)
    monkeypatch.setattr(BatchSearch, "_coarse_options", lambda *_: [far])

    _, found = search((4000, 4000), ir.Load(1, 1)).best((4, 8))

    assert far.batch == found.chosen.batch
    assert found.chosen.tokens_per_s > far.tokens_per_s


@pytest.mark.slow
def test_the_plan_and_every_policy_are_near_the_best_of_all_batches() -> None:
    """A batch that lies between the first ones is found, for each of them by itself."""
    memory = (1000, 500)
    plan, found = planned(memory)
    best = dict.fromkeys([o.policy for o in found.baselines], 0.0)
    most = 0.0
    for batch in range(8, 113, 8):
        option = search(memory, ir.Load(1, 1)).best((batch,))[1]
        most = max(most, option.chosen.tokens_per_s)
        for rival in option.baselines:
            best[rival.policy] = max(best[rival.policy], rival.tokens_per_s)

    assert plan.batch not in BATCHES
    assert found.chosen.tokens_per_s >= 0.97 * most
    assert {o.policy: o.tokens_per_s for o in found.baselines if o.tokens_per_s < 0.97 * best[o.policy]} == {}


def test_less_time_per_token_means_smaller_batches() -> None:
    """The limit is kept by the plan and by every baseline."""
    (_, free), (_, bound) = planned(), planned(tpot_ms=1.0)

    assert bound.chosen.tpot_ms <= 1.0 < free.chosen.tpot_ms
    assert all(o.tpot_ms <= 1.0 for o in bound.baselines)
    assert bound.chosen.tokens_per_s < free.chosen.tokens_per_s


def test_a_limit_that_only_a_smaller_batch_keeps_is_kept() -> None:
    """No batch that is looked at first is quick enough; the smallest one is halved."""
    least = search((1200, 500), ir.Load(1, 1)).best((4,), (1,))[1].chosen.tpot_ms
    plan, _ = search((1200, 500), ir.Load(1, 1, tpot_ms=0.999 * least)).best(BATCHES, (1,))

    assert plan.batch < 4


@pytest.mark.parametrize(
    ("memory", "limit_ms", "message"),
    [((1200, 500), 1e-3, "the nearest takes"), ((40, 40), None, "memory|GB|MB")],
)
def test_what_cannot_be_planned_is_refused(
    memory: tuple[int, int], limit_ms: float | None, message: str
) -> None:
    with pytest.raises(PlanInfeasible, match=message):
        search(memory, ir.Load(1, 1, tpot_ms=limit_ms)).best(BATCHES)


def test_equal_cells_are_planned_once_and_copied() -> None:
    """Eight devices of two kinds: four times the figures of two, all devices used, for every policy."""
    pair, two = planned()
    whole, eight = search((1200, 500) * 4, ir.Load(1, 1)).best(BATCHES, [4 * num for num in MICROBATCHES])

    assert whole.used == tuple(range(8))
    assert whole.batch == pair.batch
    assert whole.simulated_per_s == pytest.approx(4 * pair.simulated_per_s)
    assert whole.bound_per_s == pytest.approx(4 * pair.bound_per_s)
    assert eight.chosen.tokens_per_s == pytest.approx(4 * two.chosen.tokens_per_s)
    assert eight.chosen.tpot_ms == pytest.approx(two.chosen.tpot_ms)
    single, *others = zip(two.baselines, eight.baselines, strict=True)
    assert single[0] == single[1]
    for small, large in others:
        assert large.tokens_per_s == pytest.approx(4 * small.tokens_per_s)
        assert len(large.batch) == 4 * len(small.batch)


@pytest.mark.slow
def test_cells_that_are_too_small_leave_the_whole_cluster() -> None:
    """Both weights need both larger devices."""
    memory = (100, 60)
    with pytest.raises(PlanInfeasible):
        search(memory, ir.Load(1, 1)).best((4,))

    assert search(memory * 2, ir.Load(1, 1)).best((4,))[0].used == (0, 2)
