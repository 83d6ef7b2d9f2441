"""Gates and stretches: what they prove and what they give, against trying everything."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_factories import Draft, layered_case, make_cluster, make_costs, make_unit
from tessera.plan import latency_stretch
from tessera.plan.latency import Clock, bound_us, solve
from tessera.plan.latency_gates import gates_of, put_together, tails_of
from tessera.plan.latency_layout import Work, outline_of, work_of
from tessera.plan.latency_steps import best_of_step, frame_of
from tessera.plan.latency_stretch import Stretch, crossings_of, stretches_of
from tessera.plan.latency_unbeaten import unbeaten
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
    clock = Clock(problem)
    every = (np.array(x) for x in product(range(problem.num_devices), repeat=problem.num_nodes))
    return min(clock.makespan_us(labels) for labels in every if problem.is_allowed(labels))


def gated(problem: Problem, pairs: list[tuple[int, int]] | None = None) -> tuple[Work, list[Stretch]]:
    """The first step and what lies between its gates, or between those given."""
    outline = outline_of(problem, 0)
    work = work_of(problem, 0, outline)
    found = gates_of(outline, problem.cost_us[0]) if pairs is None else pairs
    return work, stretches_of(outline, found)


@settings(max_examples=120, deadline=None)
@given(problems())
def test_bound_optimum_and_plan_are_in_order(problem: Problem) -> None:
    """On any small graph the bound is at most the optimum and the optimum at most what is found."""
    optimum = best_us(problem)

    found = solve(problem, (), lambda _: True)

    assert found.bound_us <= optimum * (1 + 1e-9)
    assert bound_us(problem, Clock(problem)) <= optimum * (1 + 1e-9)
    assert optimum <= found.latency_us * (1 + 1e-9)
    assert problem.is_allowed(found.labels)
    assert found.latency_us == pytest.approx(Clock(problem).makespan_us(found.labels))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_tails_by_gates_are_below_the_optimum(problem: Problem) -> None:
    """Whatever gates are chosen, no tail is longer than the fastest placement takes."""
    work, stretches = gated(problem)
    above = work.outline.above
    chain = [0]
    for launch in range(1, len(above) - 1):
        if above[launch] >> chain[-1] & 1:
            chain.append(launch)
    for pairs in ([(s.members[0], s.members[-1]) for s in stretches], list(pairwise(chain[::2]))):
        _, some = gated(problem, pairs)
        tails = tails_of(work, some, crossings_of(work, some))

        assert tails.min(axis=1).max() * problem.unit.counts[0] <= best_us(problem) * (1 + 1e-9)


@pytest.mark.parametrize("limit", [1, 2, 128])
@pytest.mark.parametrize("seed", range(6))
def test_crossing_brackets_trying_everything(seed: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From gate to gate, on any devices, the bound is no more than the best and what is found no less."""
    monkeypatch.setattr(latency_stretch, "MOST_ROWS", limit)
    rng = np.random.default_rng(seed)
    branches = (1, 2, 3, 4)
    flows = [(0, branches, 200_000), *((b, (5,), int(rng.integers(1, 400_000))) for b in branches)]
    unit, cluster = make_unit(Draft(6, flows)), make_cluster(latency_us=4.0)
    us = rng.uniform(1, 60, (1, 6, 2))
    problem = build(unit, make_costs(unit, cluster, us.tolist()), cluster)
    work, stretches = gated(problem, [(0, 5)])

    (crossing,) = crossings_of(work, stretches)

    clock = Clock(problem)
    for first, last in product(range(2), repeat=2):
        every = (np.array([first, *x, last]) for x in product(range(2), repeat=4))
        best = min(clock.step_us(0, x) for x in every) - us[0, 0, first]
        assert crossing.least_us[first, last] <= best * (1 + 1e-9)
        assert best <= crossing.found_us[first, last] * (1 + 1e-9)
        if limit == 128:
            assert crossing.least_us[first, last] == pytest.approx(best)
        devices = crossing.devices[:, first, last]
        assert crossing.found_us[first, last] == pytest.approx(clock.step_us(0, devices) - us[0, 0, first])


def test_stretches_put_together_are_the_best() -> None:
    """Where nothing bypasses the gates, the stretches' placements make the fastest placement of the step."""
    problem = build(*layered_case(6))
    work, stretches = gated(problem)
    crossings = crossings_of(work, stretches)
    tails = tails_of(work, stretches, crossings)

    devices = put_together(stretches, crossings, tails)

    assert (devices >= 0).all()
    labels = np.zeros(problem.num_nodes, dtype=np.int64)
    labels[problem.node_of[0]] = devices
    assert Clock(problem).step_us(0, labels) == pytest.approx(best_of_step(frame_of(problem, 0), 1e15).us)


def test_repeated_layers_share_their_shape() -> None:
    """Layers of one structure are laid out once."""
    _, stretches = gated(build(*layered_case(8)))

    assert len({id(x.layout) for x in stretches}) < len(stretches)


@pytest.mark.parametrize("num", [1, 2, 30, 41, 64, 65, 200])
def test_many_rows_are_compared_as_few_are(num: int) -> None:
    """Bit sets keep the same rows as comparing each with each, with ties and infinite times."""
    rng = np.random.default_rng(num)
    flat = rng.integers(0, 6, (4, num)).astype(np.float64)
    flat[rng.random((4, num)) < 0.05] = np.inf

    kept = [
        row for row in range(num) if not any((flat[:, other] <= flat[:, row]).all() for other in range(row))
    ]

    assert kept == unbeaten(flat).tolist()
