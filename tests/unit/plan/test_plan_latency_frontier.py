"""Fronts of schedules: what they find and what they prove, against trying everything."""

from itertools import product

import numpy as np
import pytest

from plan_factories import Draft, Named, chain, layered_case, make_cluster, make_costs, make_unit
from sampling import some_of
from tessera.plan.config import FULL
from tessera.plan.latency import (
    NEVER_US,
    Course,
    Layout,
    RequestTimer,
    bound_us,
    front_bound_us,
    search,
    solve,
)
from tessera.plan.problem import Problem, build

WIDE = 1000


def random_problem(seed: int, devices: int = 2) -> Problem:
    """Small enough to try everything, with groups, forks and launches that read nothing."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(4, 8 if devices == 2 else 6))
    flows = []
    for i in range(num - 1):
        later = rng.permutation(np.arange(i + 1, num))[: rng.integers(0, 4)]
        if len(later):
            flows.append((i, tuple(sorted(later.tolist())), int(rng.integers(1, 10**6))))
    kv = tuple(sorted(rng.permutation(num)[:2].tolist()))
    unit = make_unit(Draft(num, flows, states={"kv": (kv, 1000)}))
    cluster = make_cluster(devices, gbps=25.0, latency_us=float(rng.uniform(0, 20)))
    return build(unit, make_costs(unit, cluster, rng.uniform(1, 60, (1, num, devices)).tolist()), cluster)


def course(problem: Problem) -> Course:
    """Course of the first step."""
    return Course(Layout(problem, 0))


def brute_us(problem: Problem, step: int = 0) -> float:
    """The least time of the step over all placements."""
    clock = RequestTimer(problem)
    every = product(range(problem.num_devices), repeat=problem.num_nodes)
    return min(clock.step_us(step, np.array(labels)) for labels in every)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("seed", some_of(range(12), range(4)))
def test_wide_front_is_exact(seed: int, devices: int) -> None:
    """A front that is never narrowed finds the fastest placement and proves that it is."""
    problem = random_problem(seed, devices)
    way, best = course(problem), brute_us(problem)

    found = search(way, WIDE, NEVER_US)

    assert found is not None
    assert best == pytest.approx(found[1])
    assert best == pytest.approx(front_bound_us(way, WIDE, 2 * best))


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", some_of(range(12, 32), range(12, 16)))
def test_narrow_front_stays_sound(seed: int, width: int) -> None:
    """However narrow the front, the bound is not above the best and the placement not below it."""
    problem = random_problem(seed)
    way, best = course(problem), brute_us(problem)

    found = search(way, width, NEVER_US)

    assert front_bound_us(way, width, 2 * best) <= best
    assert found is not None
    assert best <= found[1] * (1 + 1e-9)


@pytest.mark.parametrize("seed", some_of(range(8), range(4)))
def test_found_time_is_the_clocks(seed: int) -> None:
    """The end that the front gives its placement is what the clock measures, and groups stay together."""
    problem = random_problem(seed)
    found = search(course(problem), 2, NEVER_US)
    assert found is not None
    labels = np.zeros(problem.num_nodes, dtype=np.int64)
    labels[problem.node_of[0]] = found[0]

    assert found[0].tolist() == labels[problem.node_of[0]].tolist()
    assert found[1] == pytest.approx(RequestTimer(problem).step_us(0, labels))


def test_known_placement_that_is_best_is_proved() -> None:
    """Where nothing beats a known placement, the search says so and the bound is its time."""
    problem = random_problem(3)
    way, best = course(problem), brute_us(problem)

    assert search(way, WIDE, best) is None
    assert best == pytest.approx(front_bound_us(way, WIDE, best))


def test_forbidden_device_is_not_used() -> None:
    """A launch that may not run on the faster device runs on the other, and the bound knows."""
    unit, cluster = make_unit(chain(3, 1000)), make_cluster(latency_us=5.0)
    costs = make_costs(unit, cluster, [[[1.0, 50.0]] * 3])
    free = build(unit, costs, cluster)
    allowed = np.array([[True, True], [False, True], [True, True]])
    problem = Problem(**{f: getattr(free, f) for f in free.__dataclass_fields__} | {"allowed": allowed})

    found = search(course(problem), WIDE, NEVER_US)

    assert found is not None
    assert [0, 1, 0] == found[0].tolist()
    assert found[1] == pytest.approx(bound_us(problem, FULL))


def test_parallel_branches_are_exact() -> None:
    """Experts that all read one value and feed one sum are spread as well as can be, provably."""
    experts = tuple(range(1, 7))
    flows = [(0, experts, 4000), *((e, (7,), 4000) for e in experts)]
    unit, cluster = make_unit(Draft(8, flows)), make_cluster(latency_us=5.0)
    us = [[5.0, 6.0], *([20.0 + e, 33.0 - e] for e in experts), [3.0, 4.0]]
    problem = build(unit, make_costs(unit, cluster, [us]), cluster)

    found = solve(problem, (), lambda _: True, FULL)

    assert brute_us(problem) == pytest.approx(found.latency_us)
    assert found.bound_us == pytest.approx(found.latency_us)


def moving_problem(seed: int, steps: int) -> Problem:
    """Chains with a side reader, joined by two large states, small enough to try everything."""
    rng = np.random.default_rng(seed)
    num = 5 if steps == 2 else 3
    drafts = []
    for _ in range(steps):
        flows = [(i, (i + 1,), int(rng.integers(1, 10**5))) for i in range(num - 1)]
        flows.append((0, (num - 1,), int(rng.integers(1, 10**5))))
        states: Named = {f"kv{n}": ((n + 1,), int(rng.integers(1, 4 * 10**6))) for n in range(2)}
        drafts.append(Draft(num, flows, states=states))
    unit = make_unit(*drafts, counts=[1 + 3 * s for s in range(steps)])
    cluster = make_cluster(gbps=25.0, latency_us=2.0)
    return build(unit, make_costs(unit, cluster, rng.uniform(1, 90, (steps, num, 2)).tolist()), cluster)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("seed", some_of(range(15), range(4)))
def test_bound_holds_for_steps_joined_by_state(seed: int, steps: int) -> None:
    """With several steps and state that moves between them the bound is still below every placement."""
    problem = moving_problem(seed, steps)
    clock = RequestTimer(problem)
    every = product(range(2), repeat=problem.num_nodes)
    best = min(clock.makespan_us(np.array(labels)) for labels in every)

    assert bound_us(problem, FULL) <= best * (1 + 1e-9)
    assert best <= solve(problem, (), lambda _: True, FULL).latency_us * (1 + 1e-9)


def test_moving_state_is_paid_by_the_plan_and_not_by_the_bound() -> None:
    """Two steps that want their state in different places cannot both be served at their best."""
    draft = Draft(1, states={"kv": ((0,), 2_500_000)})
    unit, cluster = make_unit(draft, draft), make_cluster(gbps=25.0, latency_us=0.0)
    problem = build(unit, make_costs(unit, cluster, [[[10.0, 70.0]], [[80.0, 10.0]]]), cluster)

    found = solve(problem, (), lambda _: True, FULL)

    assert 80.0 == pytest.approx(found.latency_us)
    assert 20.0 == pytest.approx(found.bound_us)


def test_layers_with_residuals_are_near_their_bound() -> None:
    """On a decoder whose two steps share state, which the bound moves at no cost."""
    found = solve(build(*layered_case(8)), (), lambda _: True, FULL)

    assert found.bound_us <= found.latency_us <= 1.06 * found.bound_us
