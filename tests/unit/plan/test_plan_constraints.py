"""Pins and prohibitions bind every planner."""

from itertools import product

import numpy as np
import pytest

from plan_factories import (
    Draft,
    chain,
    layered,
    layered_case,
    make_cluster,
    make_costs,
    make_unit,
    random_case,
)
from sampling import some_of
from tessera import ir
from tessera.errors import PlanInfeasible, TesseraError, UnknownName
from tessera.plan import Constraint, PlanConfig, parse_constraint, solve
from tessera.plan.pricing.pricer import Pricer, Prices
from tessera.plan.problem import Problem, build


def config(
    *constraints: Constraint, objective: ir.Objective = ir.Objective.THROUGHPUT, policy: str = ""
) -> PlanConfig:
    """With constraints."""
    return PlanConfig(objective, policy=policy or None, constraints=constraints)


def placed(plan: ir.Plan, name: str) -> set[int]:
    """Devices that run a kernel in any lane."""
    return {
        lane.placement.devices[step][index]
        for lane in plan.lanes
        for step, graph in enumerate(plan.unit.graphs)
        for index in range(len(graph.trace.launches))
        if graph.trace.kernel_of(index).name == name
    }


@pytest.mark.parametrize("text", ["attention", "=d0", "mm=", "mm=d0,,d1"])
def test_text_that_is_no_constraint_is_refused(text: str) -> None:
    """A pattern, an equals sign, devices."""
    with pytest.raises(TesseraError, match=r"--pin: .* is not PATTERN=DEVICE"):
        parse_constraint(text, True)


def test_part_of_a_card_can_be_named() -> None:
    """Its name has an equals sign of its own."""
    assert Constraint("mm", ("cuda:0/sm=32",), True) == parse_constraint("mm=cuda:0/sm=32", True)


@pytest.mark.parametrize("objective", list(ir.Objective)[:2])
def test_pinned_kernel_runs_nowhere_else(objective: ir.Objective) -> None:
    """Attention on the device that is bad at it, because the user says so."""
    plan = solve(*layered_case(), config(parse_constraint("attention=d1", True), objective=objective))

    assert {1} == placed(plan, "attention")
    assert ("--pin attention=d1",) == plan.constraints


def test_forbidden_kernel_runs_elsewhere() -> None:
    """The other one of two devices is left."""
    assert {0} == placed(solve(*layered_case(), config(parse_constraint("up=d1", False))), "up")


@pytest.mark.parametrize(
    ("pattern", "kernels"),
    [
        ("model.layers.0.mlp", {"up", "down"}),
        ("model.layers.0.mlp.*", {"up", "down"}),
        ("mlp", {"up", "down"}),
        ("ou?", {"out"}),
        ("attention", {"qkv", "attention", "out"}),
    ],
)
def test_pattern_means_scopes_kernels_and_words(pattern: str, kernels: set[str]) -> None:
    """A module with all inside it, a part of a path, a kernel, or a word for many."""
    case = layered_case(1)
    problem = build(*case, (parse_constraint(f"{pattern}=d0", True),))
    assert problem.allowed is not None
    names = [case[0].graphs[0].trace.kernel_of(i).name for i in range(6)]
    bound = {n for n, ok in zip(names, problem.allowed[problem.node_of[0]], strict=True) if not ok.all()}

    assert kernels == bound


def test_step_can_be_pinned() -> None:
    """All of the decode on one device, the prefill anywhere."""
    plan = solve(*layered_case(), config(parse_constraint("decode=d0", True)))

    assert all({0} == set(lane.placement.devices[1]) for lane in plan.lanes)


def test_gemm_is_a_word() -> None:
    """Matrix multiplications by their names."""
    draft = chain(3)
    draft.names = ["aten.mm.default", "aten.silu.default", "triton_gemm_2"]
    unit, cluster = make_unit(draft), make_cluster()
    costs = make_costs(unit, cluster, [[[5.0, 1.0]] * 3])
    problem = build(unit, costs, cluster, (parse_constraint("gemm=d0", True),))

    assert problem.allowed is not None
    assert [False, True, False] == problem.allowed.all(axis=1).tolist()


def test_coarse_policy_that_contradicts_has_no_figures() -> None:
    """With attention pinned away, no device can do everything alone."""
    constraints = parse_constraint("attention=d1", True), parse_constraint("up=d0", True)
    found = {b.name: b.throughput_per_s for b in solve(*layered_case(), config(*constraints)).baselines}

    assert found["single"] is None
    assert found["data-parallel"] is None
    assert found["attention-ffn"] is not None


def test_policy_asked_for_against_the_constraints_is_refused() -> None:
    """It does not apply, because of them."""
    constraints = parse_constraint("attention=d1", True), parse_constraint("up=d0", True)
    with pytest.raises(
        PlanInfeasible, match="'single' does not apply to this work with these placement constraints"
    ):
        solve(*layered_case(), config(*constraints, policy="single"))


def test_contradiction_names_both_constraints_and_a_launch() -> None:
    """Two pins of one kernel to two devices cannot both hold."""
    constraints = parse_constraint("up=d1", True), parse_constraint("mlp=d0", True)
    with pytest.raises(PlanInfeasible, match=r"'--pin mlp=d0' contradicts --pin up=d1: launch 4 of prefill"):
        solve(*layered_case(), config(*constraints))


def test_forbidding_every_device_is_a_contradiction() -> None:
    """One constraint alone may leave no device."""
    with pytest.raises(PlanInfeasible, match="leaves no device"):
        solve(*layered_case(), config(parse_constraint("up=d*", False)))


def test_wish_that_matches_nothing_is_refused() -> None:
    """It is a typing error; kernels of the model are named."""
    with pytest.raises(TesseraError, match=r"no launch matches 'atention'.*prefill, decode.*attention"):
        solve(*layered_case(), config(parse_constraint("atention=d0", True)))


def test_wish_for_an_unknown_device_lists_the_known_ones() -> None:
    """The cluster's names."""
    with pytest.raises(UnknownName, match="unknown device 'd7'; known: d0, d1"):
        solve(*layered_case(), config(parse_constraint("up=d7", True)))


def test_launches_that_share_state_follow_the_one_that_is_pinned() -> None:
    """They cannot be apart."""
    draft = Draft(2, states={"kv": ((0, 1), 8)}, names=["a", "b"])
    unit, cluster = make_unit(draft), make_cluster()
    plan = solve(
        unit, make_costs(unit, cluster, [[[1.0, 9.0]] * 2]), cluster, config(parse_constraint("a=d1", True))
    )

    assert all((1, 1) == lane.placement.devices[0] for lane in plan.lanes)


def brute(problem: Problem, prices: Prices) -> float:
    """The cheapest placement that keeps the constraints, by trying all."""
    best = np.inf
    for choice in product(range(problem.num_devices), repeat=problem.num_nodes):
        labels = np.array(choice)
        if problem.is_allowed(labels):
            column = problem.column(labels)
            per_us = np.concatenate([prices.device, prices.link.ravel()])
            best = min(best, float(column.busy_us @ per_us) + prices.path * column.path_us)
    return best


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", some_of(range(5), range(2)))
def test_pricing_keeps_wishes_and_its_bound_holds(seed: int, devices: int) -> None:
    """The cheapest allowed placement: found exactly for two devices, never above its bound for more."""
    case = random_case(seed, num=4, devices=devices)
    unit, costs, cluster = case
    problem = build(unit, costs, cluster, (parse_constraint("prefill=d1", True),))
    rng = np.random.default_rng(seed)
    prices = Prices(rng.uniform(0.1, 1, devices), rng.uniform(0.1, 1, (devices, devices)), 0.3)
    labels, bound = Pricer(problem).cheapest(prices)
    column = problem.column(labels)
    per_us = np.concatenate([prices.device, prices.link.ravel()])
    cost = float(column.busy_us @ per_us) + prices.path * column.path_us

    assert problem.is_allowed(labels)
    assert bound <= brute(problem, prices) * (1 + 1e-9)
    if devices == 2:
        assert cost == pytest.approx(brute(problem, prices), rel=1e-6)


def test_wishes_cannot_make_a_plan_better() -> None:
    """A constraint costs or is free."""
    free = solve(*layered_case(), config())
    bound = solve(*layered_case(), config(parse_constraint("attention=d1", True)))

    assert bound.throughput_per_s < free.throughput_per_s
    assert bound.bound_per_s < free.bound_per_s


def test_layered_factory_has_what_the_patterns_name() -> None:
    """The tests above would be empty otherwise."""
    assert {"model.layers.0.mlp.up"} <= {x.scope for x in layered(1).graphs[0].trace.launches}
