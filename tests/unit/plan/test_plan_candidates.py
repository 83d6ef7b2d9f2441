"""What is proposed for judgement."""

from collections import Counter

import numpy as np
import pytest

from plan_factories import MiB, layered_case
from tessera import ir
from tessera.plan import throughput
from tessera.plan.candidates import NUM_FINALISTS, throughput_mixes
from tessera.plan.even import even_mixes, neighbours
from tessera.plan.joined import splices
from tessera.plan.judge import Judge
from tessera.plan.limits import limits_of
from tessera.plan.policies import Task
from tessera.plan.problem import Mix, build
from tessera.simulate import SteadyRates


def test_without_a_judge_only_the_optimum_is_proposed() -> None:
    """Nothing else can win by busy time."""
    task = Task(build(*layered_case()), 4, is_judged=False)

    assert (task.free.mix,) == throughput_mixes(task)


def judged_task() -> Task:
    """A task whose search looks at simulated rates."""
    task = Task(build(*layered_case()), 4, is_judged=True)
    rates = SteadyRates()
    task.glance = Judge(task, ir.Objective.THROUGHPUT, "throughput", rates, rates.glance).quick_rate
    return task


def test_finalists_differ_and_move_less_than_the_optimum_by_busy_time() -> None:
    """The search leaves few candidates, all different, with fewer transfers where that simulates better."""
    task = judged_task()
    mixes = throughput_mixes(task)
    keys = {
        tuple(sorted((c.key, round(s, 6)) for c, s in zip(m.columns, m.shares, strict=True))) for m in mixes
    }

    assert 0 < len(mixes) == len(keys) <= NUM_FINALISTS[0]
    assert min(m.num_messages for m in mixes) < task.free.mix.num_messages


def test_finalists_simulate_better_than_the_optimum_by_busy_time() -> None:
    """Busy time alone would have chosen a plan that few requests in flight cannot keep up."""
    task = judged_task()
    assert task.glance is not None

    best = max(task.glance(mix) for mix in throughput_mixes(task))

    assert best > 1.02 * task.glance(task.free.mix)


def test_search_looks_at_placements_balanced_in_every_step() -> None:
    """In at least one placement that is looked at no device idles for more than a third of any step."""
    task = judged_task()
    prob = task.problem
    seen: list[Mix] = []
    quick = task.glance
    assert quick is not None
    task.glance = lambda mix: (seen.append(mix), quick(mix))[1]  # type: ignore[func-returns-value]

    throughput_mixes(task)

    worst = []
    for mix in seen:
        devices = prob.placement(mix.columns[0].labels).devices
        loads = [
            [float(us[[d == x for x in placed], d].sum()) for d in range(2)]
            for placed, us in zip(devices, prob.cost_us, strict=True)
        ]
        worst.append(min(min(pair) / max(pair) for pair in loads))
    assert max(worst) > 2 / 3


def test_every_candidate_fits() -> None:
    """Memory is a constraint on candidates, not an afterthought."""
    per_layer = 4 * 16 * MiB + (1 + 3) * 8 * MiB
    temporary = 4 * 24 * MiB
    memory = [n * per_layer + temporary for n in (3, 2)]
    task = Task(build(*layered_case(4, memory=memory)), 4, is_judged=True)

    assert task.pool.is_tight
    assert all(task.problem.fits(mix.columns, 4) for mix in throughput_mixes(task))


def pooled_task() -> Task:
    """A task whose pool has the optima under several limits."""
    task = Task(build(*layered_case()), 4)
    assert task.free.mix.columns
    for limits in limits_of(task)[:6]:
        throughput.generate(task.pool, limits)
    return task


def test_even_mixes_are_the_best_pairs_in_whole_slots() -> None:
    """Shares are quarters of four slots, and no pair within the depth has a higher rate by busy time."""
    task = pooled_task()
    found = list(even_mixes(task, 3.0, 3))
    columns = task.pool.columns
    pairs = [
        Mix((a, b), (part / 4, 1 - part / 4))
        for a in columns
        for b in columns
        for part in (1, 2)
        if a is not b
    ]
    within = [m for m in pairs if path_us(m) * m.rate_per_s * 1e-6 <= 3.0 * 1.03]

    assert found
    assert {s for m in found for s in m.shares} <= {0.25, 0.5, 0.75}
    assert found[0].rate_per_s == pytest.approx(max(m.rate_per_s for m in within))
    assert [m.rate_per_s for m in found] == sorted((m.rate_per_s for m in found), reverse=True)


def path_us(mix: Mix) -> float:
    """Path time of an average request."""
    return sum(s * c.path_us for s, c in zip(mix.shares, mix.columns, strict=True))


def test_neighbours_differ_in_one_slot() -> None:
    """Of four slots exactly one follows another placement."""
    task = pooled_task()
    mix = next(even_mixes(task, 3.0, 1))
    near = list(neighbours(task, mix, 3.0, 5))

    assert near
    for other in near:
        counts = Counter({c.key: round(4 * s) for c, s in zip(other.columns, other.shares, strict=True)})
        counts.subtract({c.key: round(4 * s) for c, s in zip(mix.columns, mix.shares, strict=True)})
        assert 4 == sum(round(4 * s) for s in other.shares)
        assert [-1, 1] == sorted(n for n in counts.values() if n)


def test_mixes_of_uneven_shares_have_no_neighbours() -> None:
    """Slots cannot keep them, so there is no slot to change."""
    task = pooled_task()
    mix = Mix(tuple(task.pool.columns[:2]), (0.4, 0.6))

    assert [] == list(neighbours(task, mix, 3.0, 5))


def test_a_splice_takes_its_layers_from_two_lanes() -> None:
    """The joined placement follows one lane up to some layer and the other from there on."""
    task = pooled_task()
    lanes = tuple(c for c in task.pool.columns if 0 < c.labels.mean() < 1)[:2]
    layers = task.layer_of_node
    assert layers is not None
    (joined,) = splices(task, Mix(lanes, (0.6, 0.4)))
    ways = [
        np.where(layers[0] < cut, a.labels, b.labels).tolist()
        for cut in range(1, layers[1])
        for a, b in (lanes, lanes[::-1])
    ]

    assert joined.labels.tolist() in ways
