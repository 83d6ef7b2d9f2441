"""Plans for a load: batch and microbatches are chosen, for the plan and for what it is compared with."""

from dataclasses import replace
from functools import cache

import pytest

from batches_factory import MB, at_batch
from plan_factories import Draft, Named, Told, make_cluster, make_costs, make_unit
from sampling import examples
from tessera import ir
from tessera.errors import MismatchError, PlanInfeasible
from tessera.execute.lower import lower
from tessera.plan import (
    LoadConfig,
    LoadPlan,
    PricedLoad,
    SearchConfig,
    Target,
    explain,
    plan_load,
)
from tessera.simulate import SteadyRates

BATCHES = (4, 16, 64)
# At most so many microbatches.
MOST = examples(4, 2)
# Bytes of state of one row.
ROW = 8 * MB


def variant_at(batch: int, cluster: ir.Cluster) -> ir.Variant:
    """Four launches: two read state and suit even devices, two read weights and suit odd ones."""
    flows = [(i, (i + 1,), batch * 1000) for i in range(3)]
    weights: Named = {f"w{i}": ((i,), 64 * MB) for i in (1, 3)}
    unit = at_batch(make_unit(Draft(4, flows, {"kv": ((0, 2), ROW * batch)}, weights)), batch)
    odd = [n % 2 for n in range(len(cluster.devices))]
    cost = {
        "state": [(15.0 if x else 5.0) * batch for x in odd],
        "weights": [200.0 + (1.0 if x else 4.0) * batch for x in odd],
    }
    us = [[cost["state"], cost["weights"], cost["state"], cost["weights"]]]
    return ir.Variant(unit, make_costs(unit, cluster, us))


def request_at(batch: int, prefill: int, cluster: ir.Cluster) -> ir.Variant:
    """A prefill of some rows at a time, with large temporaries, and eight decodes of all of them."""
    steps = [
        Draft(2, [(0, (1,), rows * size)], {"kv": ((0,), ROW * rows)}, {"w": ((1,), 64 * MB)}, kind=kind)
        for kind, rows, size in (("prefill", prefill, 40 * MB), ("decode", batch, 1000))
    ]
    unit = make_unit(*steps, counts=(batch // prefill, 8))
    sized = (at_batch(ir.WorkUnit((g,), (1,)), n) for g, n in zip(unit.graphs, (prefill, batch), strict=True))
    unit = ir.WorkUnit(tuple(one.graphs[0] for one in sized), unit.counts)
    us = [
        [[10.0 + 60.0 * prefill, 10.0 + 30.0 * prefill]] * 2,
        [[100.0 + 2.0 * batch, 100.0 + 6.0 * batch]] * 2,
    ]
    return ir.Variant(unit, make_costs(unit, cluster, us))


class Tiring(SteadyRates):
    """Plans give a tenth in the long run."""

    def settled(self, plan: ir.Plan) -> float:
        return 0.1 * self(plan)


def planned(
    memory: tuple[int, int] = (1200, 500), tpot_ms: float | None = None, most: int = MOST
) -> LoadPlan:
    """For two devices with so many megabytes."""
    return _planned(memory, tpot_ms, most)


@cache
def _planned(memory: tuple[int, int], tpot_ms: float | None, most: int) -> LoadPlan:
    cluster = make_cluster(2, gbps=25.0, latency_us=5.0, memory=[m * MB for m in memory])
    target = Target(1, tpot_ms)
    load = PricedLoad(lambda b: variant_at(b, cluster), cluster, target, SteadyRates)
    return plan_load(load, LoadConfig(BATCHES, max_microbatches=most))


def test_the_plan_is_below_no_policy_at_its_own_best() -> None:
    """Each has a batch and a number of microbatches of its own."""
    found = planned()

    assert {"single", "data-parallel"} <= {o.policy for o in found.baselines}
    assert all(found.chosen.tokens_per_s >= o.tokens_per_s for o in found.baselines)
    assert found.chosen.tokens_per_s == pytest.approx(found.plan.rows_per_s)


def test_data_parallel_has_a_batch_of_its_own_on_every_device() -> None:
    """The device with less memory takes a smaller one."""
    parallel = next(o for o in planned().baselines if o.policy == "data-parallel")

    assert parallel.batch["d0"] > parallel.batch["d1"] > 1


def test_everything_fits_the_memory_there_is() -> None:
    """Weights once, and the state of every microbatch where its lane has it."""
    for memory in ((1200, 500), (400, 300))[: examples(2, 1)]:
        found = planned(memory)
        for room in explain(found.plan).memory:
            assert room.used_bytes <= room.capacity_bytes


def test_less_time_per_token_means_smaller_batches() -> None:
    """The limit is kept by the plan and by every baseline."""
    free, bound = planned(), planned(tpot_ms=1.0)

    assert bound.chosen.tpot_ms <= 1.0 < free.chosen.tpot_ms
    assert all(o.tpot_ms <= 1.0 for o in bound.baselines)
    assert bound.chosen.tokens_per_s < free.chosen.tokens_per_s


def test_a_first_token_that_only_one_row_has_in_time_is_planned_with_one() -> None:
    """Though no batch that is looked at first keeps to the limit."""
    cluster = make_cluster(2, gbps=25.0, latency_us=5.0, memory=[8000 * MB, 8000 * MB])
    target = Target(8, ttft_ms=0.12)

    config = LoadConfig((2, 8), max_microbatches=2)
    found = plan_load(PricedLoad(lambda b: request_at(b, b, cluster), cluster, target, SteadyRates), config)

    assert found.plan.batch == 1
    assert found.chosen.ttft_ms <= 0.12


def test_no_policy_is_better_on_the_curve_than_where_it_is_compared() -> None:
    """Within the limits; the plan neither."""
    for found, limit_ms in ((planned(), float("inf")), (planned(tpot_ms=1.0), 1.0)):
        best = {o.policy: o.tokens_per_s for o in found.baselines} | {"plan": found.chosen.tokens_per_s}

        assert all(o.tokens_per_s <= best[o.policy] for o in found.frontier if o.tpot_ms <= limit_ms)


def test_a_coarse_policy_is_compared_at_the_batch_that_is_best_when_simulated() -> None:
    """Large batches promise more, here what they do not reach."""
    cluster = make_cluster(2, gbps=25.0, latency_us=5.0, memory=[8000 * MB, 8000 * MB])
    made = SteadyRates()

    def simulate(plan: ir.Plan) -> float:
        return made(plan) * (0.1 if plan.batch > 16 else 1.0)

    load = PricedLoad(lambda b: request_at(b, b, cluster), cluster, Target(8), lambda: Told(simulate))
    found = plan_load(load, LoadConfig((4, 16, 32), (), 2, search=SearchConfig(max_simulated=1)))

    coarse = [o for o in found.baselines if o.policy not in ("single", "data-parallel")]
    assert coarse
    assert all(max(o.batch.values()) <= 16 for o in coarse)


@cache
def planned_requests(is_free: bool) -> LoadPlan:
    """Sixteen requests of prompts and answers together; prefilled in parts, or whole."""
    cluster = make_cluster(2, gbps=25.0, latency_us=5.0, memory=[500 * MB, 500 * MB])
    in_parts = (lambda batch, rows: request_at(batch, rows, cluster)) if is_free else None
    config = LoadConfig((16,), max_microbatches=2)
    return plan_load(
        PricedLoad(lambda b: request_at(b, b, cluster), cluster, Target(8), SteadyRates, in_parts), config
    )


def test_a_prefill_takes_some_of_the_rows_where_all_of_them_do_not_fit() -> None:
    """Its temporaries leave room for the state of the whole batch then."""
    with pytest.raises(PlanInfeasible, match="GB too little"):
        planned_requests(False)
    found = planned_requests(True)

    assert (16, 4) == (found.plan.batch, found.plan.unit.prefill_batch)
    assert {"d0": 4, "d1": 4} == found.chosen.prefill_batch
    assert all(room.used_bytes <= room.capacity_bytes for room in explain(found.plan).memory)


def test_replicas_may_prefill_unlike_parts_of_like_batches() -> None:
    """A row runs every step as often in both, so they are the same steps."""
    plan = planned_requests(True).plan
    other = request_at(plan.batch, 8, plan.cluster)
    half = replace(plan.lanes[0], rate_per_s=plan.throughput_per_s / 2)

    both = replace(plan, lanes=(half, replace(half, variant=1)), variants=(other,), lane_table=(0, 1))

    ir.verify(both)

    assert {0, 1} == {lane.variant for lane in both.lanes}


def test_a_plan_with_prefills_in_parts_is_not_run_and_says_how_to_plan_one_that_is() -> None:
    """In one line."""
    plan = planned_requests(True).plan

    with pytest.raises(MismatchError, match=rf"Plan with --batch {plan.batch} --prefill-batch {plan.batch}"):
        lower(plan)


def test_a_limit_that_nothing_keeps_says_what_is_fastest() -> None:
    """In milliseconds."""
    with pytest.raises(PlanInfeasible, match=r"no plan keeps to the limits: the fastest takes 0\.\d+ ms"):
        planned(tpot_ms=0.01)


def test_microbatches_are_at_most_what_was_asked_for() -> None:
    """One at a time leaves a device waiting, and gives less."""
    one, more = planned(most=1), planned()

    assert 1 == one.plan.microbatches or "data-parallel" == one.plan.policy
    assert one.chosen.tokens_per_s <= more.chosen.tokens_per_s


def test_a_model_that_fits_nowhere_is_refused() -> None:
    """With what is lacking."""
    with pytest.raises(PlanInfeasible, match="GB too little"):
        planned((60, 60))


def test_the_frontier_of_a_policy_rises() -> None:
    """More time per token gives more tokens per second, or the point is not on it."""
    found = planned()
    for policy in {o.policy for o in found.frontier}:
        points = [(o.tpot_ms, o.tokens_per_s) for o in found.frontier if o.policy == policy]
        assert points == sorted(points)
        assert [y for _, y in points] == sorted({y for _, y in points})


def test_within_any_time_per_token_data_parallel_has_what_its_devices_give() -> None:
    """So that what a plan adds is not shown against one device alone."""
    found = planned()
    for limit in {o.tpot_ms for o in found.options}:
        within = [o for o in found.options if o.tpot_ms <= limit]
        alone: dict[str, float] = {}
        for option in within:
            if option.policy == "single":
                (device,) = option.batch
                alone[device] = max(alone.get(device, 0.0), option.tokens_per_s)
        parallel = max((o.tokens_per_s for o in within if o.policy == "data-parallel"), default=0.0)
        assert sum(alone.values()) == pytest.approx(parallel)


def test_the_plan_is_recorded_beside_every_policy_at_its_own_best() -> None:
    """Rates are of work units of the plan, so that who reads the plan later sees the same comparison."""
    found = planned()

    assert {o.policy: pytest.approx(o.tokens_per_s / found.plan.batch) for o in found.baselines} == {
        b.name: b.throughput_per_s for b in found.plan.baselines
    }


@cache
def planned_on(num: int) -> LoadPlan:
    """Devices of two kinds in turn, with memory to spare."""
    cluster = make_cluster(num, gbps=25.0, latency_us=5.0, memory=[10_000 * MB] * num)
    config = LoadConfig((16,), max_microbatches=num)
    return plan_load(PricedLoad(lambda b: variant_at(b, cluster), cluster, Target(1), SteadyRates), config)


def test_many_devices_give_what_their_cells_give() -> None:
    """Two pairs twice what one gives, for the plan and for the policies, on devices of their own."""
    pair, both = planned_on(2), planned_on(4)

    assert both.chosen.tokens_per_s == pytest.approx(2 * pair.chosen.tokens_per_s)
    assert both.plan.rows_per_s == pytest.approx(both.chosen.tokens_per_s)
    assert (0, 1, 2, 3) == both.plan.used
    alone, together = ({o.policy: o.tokens_per_s for o in x.baselines} for x in (pair, both))
    assert together["data-parallel"] == pytest.approx(2 * alone["data-parallel"])
    assert together["single"] == pytest.approx(alone["single"])


def test_a_card_more_than_there_are_pairs_works_by_itself() -> None:
    """Five devices are two pairs and one."""
    alone, pair, five = (planned_on(num).chosen.tokens_per_s for num in (1, 2, 5))

    assert five == pytest.approx(2 * pair + alone)


def test_no_policy_and_no_plan_is_rated_by_what_it_gives_only_at_first() -> None:
    """Here they give less in the long run than a verdict sees; replicas, which nobody waits for, do not."""
    cluster = make_cluster(2, gbps=25.0, latency_us=5.0, memory=[1200 * MB, 500 * MB])
    load = PricedLoad(lambda b: variant_at(b, cluster), cluster, Target(1), Tiring)
    later = plan_load(load, LoadConfig(BATCHES, max_microbatches=MOST))

    assert planned().chosen.policy != "data-parallel"
    assert later.chosen.policy == later.plan.policy == "data-parallel"
    assert later.chosen.tokens_per_s < planned().chosen.tokens_per_s


def by(objective: ir.Objective, usd_per_hour: tuple[float | None, float | None]) -> LoadPlan:
    """For two devices of such rents, which draw 100 and 400 W."""
    cluster = make_cluster(2, gbps=25.0, latency_us=5.0, memory=[1200 * MB, 500 * MB])
    rows = zip(cluster.devices, usd_per_hour, (100.0, 400.0), strict=True)
    devices = tuple(replace(d, usd_per_hour=usd, tdp_w=watts) for d, usd, watts in rows)
    cluster = replace(cluster, devices=devices)
    config = LoadConfig(BATCHES, (), MOST, objective)
    return plan_load(PricedLoad(lambda b: variant_at(b, cluster), cluster, Target(1), SteadyRates), config)


def test_by_the_dollar_a_device_that_is_too_dear_is_not_used() -> None:
    """One that costs as much as the other is; in either case the plan is below no policy by the dollar."""
    dear, alike = by(ir.Objective.COST, (1.0, 50.0)), by(ir.Objective.COST, (1.0, 1.0))

    assert set(dear.chosen.batch) == {"d0"}
    assert set(alike.chosen.batch) == {"d0", "d1"}
    assert alike.plan.objective is ir.Objective.COST
    for found in (dear, alike):
        least = min(o.usd_per_million_tokens or 0.0 for o in found.baselines)
        assert 0.0 < (found.chosen.usd_per_million_tokens or 0.0) <= least


def test_by_the_joule_the_plan_is_below_no_policy() -> None:
    """Every policy on the devices that are best for it."""
    found = by(ir.Objective.ENERGY, (None, None))

    assert 0.0 < (found.chosen.joules_per_token or 0.0)
    assert all(found.ratio_to(o) >= 1.0 for o in found.baselines)


def test_a_device_without_a_price_cannot_be_planned_by_the_dollar() -> None:
    """It is named."""
    with pytest.raises(PlanInfeasible, match="d1 has no price"):
        by(ir.Objective.COST, (1.0, None))
