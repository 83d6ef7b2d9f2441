"""Latency plans of any small graph, against trying everything."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_factories import Draft, make_cluster, make_costs, make_unit
from sampling import examples
from tessera.plan.config import FULL
from tessera.plan.latency import Course, Layout, RequestTimer, bound_us, non_dominated, solve
from tessera.plan.problem import Problem, build


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Chains of small blocks with branches, launches beside them and shared state; few enough to try all."""
    devices = draw(st.integers(2, 3))
    num = draw(st.integers(3, 8 if devices == 2 else 5))
    flows = []
    for producer in range(num - 1):
        readers = draw(st.sets(st.integers(producer + 1, min(num - 1, producer + 4)), max_size=3))
        if readers:
            flows.append((producer, tuple(sorted(readers)), draw(st.sampled_from([8, 50_000, 900_000]))))
    shared = tuple(sorted(draw(st.sets(st.integers(0, num - 1), min_size=1, max_size=2))))
    unit = make_unit(Draft(num, flows, states={"kv": (shared, 1000)}), counts=[draw(st.integers(1, 3))])
    cluster = make_cluster(devices, gbps=25.0, latency_us=draw(st.sampled_from([0.0, 2.0, 15.0])))
    us = st.sampled_from([1.0, 3.5, 20.0, 21.0, 60.0])
    rows = [[[draw(us) for _ in range(devices)] for _ in range(num)]]
    problem = build(unit, make_costs(unit, cluster, rows), cluster)
    return _forbidding(problem, draw(st.lists(st.integers(0, 99), max_size=3)))


def _forbidding(problem: Problem, cells: list[int]) -> Problem:
    """With some nodes not allowed on a device; every node is allowed on one at least."""
    allowed = np.ones((problem.num_nodes, problem.num_devices), dtype=np.bool_)
    for cell in cells:
        row = allowed[cell % len(allowed)]
        row[cell % len(row)] = row.sum() == 1 and row[cell % len(row)]
    return replace(problem, allowed=allowed)


def best_us(problem: Problem) -> float:
    """The least makespan of all placements."""
    clock = RequestTimer(problem)
    every = (np.array(x) for x in product(range(problem.num_devices), repeat=problem.num_nodes))
    return min(clock.makespan_us(labels) for labels in every if problem.is_allowed(labels))


@settings(max_examples=examples(120, 40), deadline=None)
@given(problems())
def test_bound_optimum_and_plan_are_in_order(problem: Problem) -> None:
    """On any small graph the bound is at most the optimum and the optimum at most what is found."""
    optimum = best_us(problem)

    found = solve(problem, (), lambda _: True, FULL)

    assert found.bound_us <= optimum * (1 + 1e-9)
    assert bound_us(problem, FULL) <= optimum * (1 + 1e-9)
    assert optimum <= found.latency_us * (1 + 1e-9)
    assert problem.is_allowed(found.labels)
    assert found.latency_us == pytest.approx(RequestTimer(problem).makespan_us(found.labels))


@settings(max_examples=examples(80, 30), deadline=None)
@given(problems())
def test_tails_are_below_the_optimum(problem: Problem) -> None:
    """No tail is longer than the fastest placement takes."""
    tails = Course(Layout(problem, 0)).tail_us

    assert tails.min(axis=1).max() * problem.unit.counts[0] <= best_us(problem) * (1 + 1e-9)


@pytest.mark.parametrize("num", [1, 2, 65, 200])
def test_rows_that_an_earlier_one_dominates_are_dropped(num: int) -> None:
    """With ties and infinite times."""
    rng = np.random.default_rng(num)
    flat = rng.integers(0, 6, (4, num)).astype(np.float64)
    flat[rng.random((4, num)) < 0.05] = np.inf

    kept = [
        row for row in range(num) if not any((flat[:, other] <= flat[:, row]).all() for other in range(row))
    ]

    assert kept == non_dominated(flat).tolist()
