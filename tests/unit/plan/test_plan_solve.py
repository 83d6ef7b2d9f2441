"""From work and prices to a verified plan."""

from dataclasses import replace

import numpy as np
import pytest

from plan_factories import (
    Draft,
    MiB,
    Told,
    chain,
    layered_case,
    make_cluster,
    make_costs,
    make_unit,
    random_case,
)
from sampling import examples
from tessera import ir
from tessera.errors import PlanInfeasible, UnknownName
from tessera.plan import PlanConfig, solve
from tessera.plan.baselines import COARSE
from tessera.plan.latency import RequestTimer
from tessera.plan.problem import build
from tessera.simulate import SteadyRates

THROUGHPUT = PlanConfig(ir.Objective.THROUGHPUT)
LATENCY = PlanConfig(ir.Objective.LATENCY)


def little(plan: ir.Plan) -> float:
    """A stand-in for the simulator: busy time or Little's law, whichever is less."""
    problem = build(plan.unit, plan.costs, plan.cluster)
    alone = [RequestTimer(problem).makespan_us(problem.labels(lane.placement)) for lane in plan.lanes]
    shares = [lane.rate_per_s / plan.throughput_per_s for lane in plan.lanes]
    waits_us = sum(share * us for share, us in zip(shares, alone, strict=True))
    return min(plan.throughput_per_s, plan.microbatches * 1e6 / waits_us)


def rates(plan: ir.Plan) -> dict[str, float]:
    """Rates of the baselines that apply."""
    return {b.name: b.throughput_per_s for b in plan.baselines if b.throughput_per_s is not None}


@pytest.mark.parametrize("seed", range(0, 8, examples(1, 6)))
@pytest.mark.parametrize("judged", [False, True])
def test_throughput_plan_is_never_below_a_baseline(seed: int, judged: bool) -> None:
    """Bound >= throughput >= simulated >= every coarse policy under the same costs and the same judge."""
    plan = solve(
        *random_case(seed),
        PlanConfig(ir.Objective.THROUGHPUT, microbatches=2),
        Told(little) if judged else None,
    )

    assert plan.bound_per_s >= plan.throughput_per_s >= plan.simulated_per_s
    assert plan.simulated_per_s >= max(rates(plan).values())
    ir.verify(plan)


def test_unlike_devices_gain() -> None:
    """Devices of opposite strength together do more than any coarse split, within 0.1 % of the bound."""
    plan = solve(*layered_case(), THROUGHPUT)

    assert plan.throughput_per_s > 1.05 * max(rates(plan).values())
    assert plan.gap < 1e-3
    assert set(COARSE) == set(rates(plan))


def test_simulator_decides_between_candidates() -> None:
    """A judge that dislikes transfers gets a plan without any."""

    def no_moves(plan: ir.Plan) -> float:
        split = any(len({d for s in x.placement.devices for d in s}) > 1 for x in plan.lanes)
        return 1.0 if split else plan.throughput_per_s

    plan = solve(*layered_case(), THROUGHPUT, Told(no_moves))

    assert all(len({d for s in x.placement.devices for d in s}) == 1 for x in plan.lanes)
    assert plan.simulated_per_s == pytest.approx(rates(plan)["data-parallel"])
    assert 1.0 == rates(plan)["attention-ffn"]


def is_divided(plan: ir.Plan) -> bool:
    """Does a lane cross from one device to another?"""
    return any(len(set(lane.placement.devices[0])) > 1 for lane in plan.lanes)


class Tiring(SteadyRates):
    """Divided plans give half in the long run."""

    def settled(self, plan: ir.Plan) -> float:
        return self(plan) * (0.5 if is_divided(plan) else 1.0)


def test_plan_is_rated_by_what_it_gives_in_the_long_run() -> None:
    """One that would win at first and then gives half is not chosen."""
    first, later = (solve(*layered_case(), THROUGHPUT, made()) for made in (SteadyRates, Tiring))

    assert (True, False) == (is_divided(first), is_divided(later))
    assert 0.5 * first.simulated_per_s < later.simulated_per_s < first.simulated_per_s


def test_simulated_rate_above_busy_time_is_not_believed() -> None:
    """What a finite run shows beyond busy time is an artefact."""
    plan = solve(*layered_case(), THROUGHPUT, Told(lambda p: 2 * p.throughput_per_s))

    assert plan.simulated_per_s == plan.throughput_per_s


def test_without_a_simulator_both_figures_are_busy_time() -> None:
    """Nothing was simulated, so nothing else is claimed."""
    plan = solve(*layered_case(), THROUGHPUT)

    assert plan.simulated_per_s == plan.throughput_per_s


def test_lane_rates_add_up() -> None:
    """The lanes' rates sum to the plan's throughput."""
    plan = solve(*layered_case(), THROUGHPUT)

    assert sum(x.rate_per_s for x in plan.lanes) == pytest.approx(plan.throughput_per_s)


def test_tie_goes_to_the_simpler_plan() -> None:
    """Where splitting gains nothing, no transfers are made."""
    unit, cluster = make_unit(chain(6)), make_cluster()
    plan = solve(unit, make_costs(unit, cluster, [[[10.0, 10.0]] * 6]), cluster, THROUGHPUT)

    assert all(1 == len(set(x.placement.devices[0])) for x in plan.lanes)


def test_latency_plan_is_not_slower_than_any_baseline() -> None:
    """One request alone is fastest on the latency plan, which has one lane."""
    plan = solve(*layered_case(), LATENCY)

    assert 1 == len(plan.lanes)
    assert plan.latency_us <= min(b.latency_us for b in plan.baselines if b.latency_us is not None)


@pytest.mark.parametrize("name", COARSE)
def test_coarse_policy_can_be_asked_for(name: str) -> None:
    """A policy's plan reaches what the baseline of its name says."""
    plan = solve(*layered_case(), PlanConfig(ir.Objective.THROUGHPUT, policy=name))

    assert name == plan.policy
    assert plan.throughput_per_s == pytest.approx(rates(plan)[name])


def test_policy_that_does_not_apply_is_refused_when_asked_for() -> None:
    """Asking for a phase split of work without phases names the alternatives."""
    unit, cluster = make_unit(chain(2)), make_cluster()
    costs = make_costs(unit, cluster, [[[1.0, 1.0]] * 2])

    with pytest.raises(PlanInfeasible, match=r"'prefill-decode' does not apply.*data-parallel"):
        solve(unit, costs, cluster, PlanConfig(ir.Objective.THROUGHPUT, policy="prefill-decode"))


def test_policy_that_does_not_apply_has_no_figures() -> None:
    """Such a baseline is there, with None."""
    unit, cluster = make_unit(chain(2)), make_cluster()
    plan = solve(unit, make_costs(unit, cluster, [[[1.0, 1.0]] * 2]), cluster, THROUGHPUT)
    found = {b.name: b for b in plan.baselines}

    assert ir.Baseline("prefill-decode", None, None) == found["prefill-decode"]


def test_unknown_policy_is_refused_before_any_work() -> None:
    """The name is looked up first."""
    with pytest.raises(UnknownName, match="unknown policy 'fast'"):
        solve(*layered_case(), PlanConfig(ir.Objective.THROUGHPUT, policy="fast"))


def test_equal_inputs_give_equal_plans() -> None:
    """Planning is deterministic."""
    assert solve(*layered_case(), THROUGHPUT) == solve(*layered_case(), THROUGHPUT)


def test_immovable_launches_share_a_device_in_every_lane() -> None:
    """What may not move stays together, whatever it costs."""
    unit = make_unit(Draft(4, chain(4, 8).flows, immovable=[0, 3]))
    cluster = make_cluster()
    costs = make_costs(unit, cluster, [[[1.0, 50.0], [9.0, 9.0], [9.0, 9.0], [50.0, 1.0]]])
    plan = solve(unit, costs, cluster, THROUGHPUT)

    assert all(x.placement.devices[0][0] == x.placement.devices[0][3] for x in plan.lanes)


PER_LAYER = 4 * 16 * MiB + 8 * MiB


@pytest.mark.parametrize("config", [THROUGHPUT, LATENCY])
def test_model_too_large_for_each_device_is_split(config: PlanConfig) -> None:
    """Neither device holds all layers; the plan uses both and fits."""
    memory = [n * PER_LAYER + 24 * MiB for n in (3, 2)]
    plan = solve(*layered_case(4, memory=memory), config)
    found = {b.name: b.throughput_per_s for b in plan.baselines}

    assert found["single"] is None
    assert found["data-parallel"] is None
    assert found["layer-pipeline"] is not None
    for lane in plan.lanes:
        assert {0, 1} == {d for step in lane.placement.devices for d in step}
    assert all(resident <= size for resident, size in zip(_resident(plan), memory, strict=True))


def _resident(plan: ir.Plan) -> list[int]:
    """Bytes per device: weights of all lanes, state of all requests in flight on the lane that needs most."""
    weights: list[dict[str, int]] = [{} for _ in plan.cluster.devices]
    state = [0] * len(weights)
    for lane in plan.lanes:
        mine: list[dict[str, int]] = [{} for _ in weights]
        for graph, devices in zip(plan.unit.graphs, lane.placement.devices, strict=True):
            for launch, device in zip(graph.trace.launches, devices, strict=True):
                for access in launch.accesses:
                    buffer = graph.trace.buffers[access.buffer]
                    if buffer.kind is ir.BufferKind.WEIGHT:
                        weights[device][buffer.name] = buffer.size_bytes
                    if buffer.kind is ir.BufferKind.STATE:
                        mine[device][buffer.name] = buffer.size_bytes
        state = [max(s, sum(m.values())) for s, m in zip(state, mine, strict=True)]
    return [sum(w.values()) + plan.microbatches * s for w, s in zip(weights, state, strict=True)]


def test_model_too_large_for_all_devices_together_is_refused() -> None:
    """The message says what takes how much, how much is missing, and what to change."""
    with pytest.raises(PlanInfeasible, match=r"d0, d1 together have .* too little.* lower the batch"):
        solve(*layered_case(4, memory=PER_LAYER), THROUGHPUT)


def test_one_device_is_planned_too() -> None:
    """With one device there is one placement."""
    unit, cluster = make_unit(chain(3)), make_cluster(1)
    plan = solve(unit, make_costs(unit, cluster, [[[10.0]] * 3]), cluster, THROUGHPUT)

    assert 1e6 / 30.0 == pytest.approx(plan.throughput_per_s)
    assert plan.bound_per_s == pytest.approx(plan.throughput_per_s)


def test_three_devices_are_planned() -> None:
    """More than two devices: never below a baseline, and within the bound."""
    plan = solve(*random_case(5, devices=3), THROUGHPUT)

    assert plan.bound_per_s >= plan.throughput_per_s >= max(rates(plan).values())


def test_data_parallel_uses_fewer_microbatches_where_memory_is_short() -> None:
    """A card with room for two requests takes part with two in flight, and its rate counts in full."""
    problem = build(*layered_case(4))
    weights, (microbatch,) = problem.footprints([problem.column(np.ones(problem.num_nodes, dtype=np.int64))])
    case = layered_case(4, memory=[64 * 2**30, int(weights[1] + 2.5 * microbatch[1])])
    rates = SteadyRates()
    config = replace(THROUGHPUT, policy="data-parallel")
    plan = solve(*case, config, rates)

    assert 1 <= plan.lane_table[: plan.microbatches].count(1) <= 2
    assert (0, 1) == plan.used
    assert plan.simulated_per_s == pytest.approx(plan.throughput_per_s)


def test_replicas_are_rated_at_their_whole_rate() -> None:
    """Devices that never wait do as much in simulation as by busy time, wherever the window ends."""
    rates = SteadyRates()
    plan = solve(*layered_case(), replace(THROUGHPUT, policy="data-parallel"), rates)

    assert plan.simulated_per_s == pytest.approx(plan.throughput_per_s, rel=1e-6)
