"""What is proposed for judgement."""

from collections import Counter

import numpy as np

from plan_factories import MiB, layered_case
from tessera import ir
from tessera.plan import throughput
from tessera.plan.candidates import NUM_FINALISTS, throughput_mixes
from tessera.plan.joined import splices
from tessera.plan.judge import Judge
from tessera.plan.lanes import slot_counts
from tessera.plan.limits import limits_of
from tessera.plan.policies import Task
from tessera.plan.problem import Mix, build
from tessera.plan.teams import filled, is_filled, neighbours, pairs
from tessera.simulate import SteadyRates, simulate


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
    for mix in throughput_mixes(task):
        assert task.problem.fits(mix.columns, slot_counts(mix, 4))


def pooled_task() -> Task:
    """A task whose pool has the optima under several limits."""
    task = Task(build(*layered_case()), 4)
    assert task.free.mix.columns
    for limits in limits_of(task)[:6]:
        throughput.generate(task.pool, limits)
    return task


def test_pairs_come_best_first_with_all_slots() -> None:
    """No pair within the depth has a higher rate by busy time than the first, at the shares compared."""
    task = pooled_task()
    found = list(pairs(task, 3.0, 3))
    columns = task.pool.columns
    tried = [
        Mix((a, b), (part / 8, 1 - part / 8))
        for n, a in enumerate(columns)
        for b in columns[n + 1 :]
        for part in range(1, 8)
    ]
    within = [m for m in tried if path_us(m) * m.rate_per_s * 1e-6 <= 3.0 * 1.03]

    assert found
    assert {4} == {sum(m.slots) for m in found}
    assert found[0].rate_per_s >= max(m.rate_per_s for m in within) * (1 - 1e-9)


def path_us(mix: Mix) -> float:
    """Path time of an average request."""
    return sum(s * c.path_us for s, c in zip(mix.shares, mix.columns, strict=True))


def test_filled_teams_have_a_divided_placement_and_slots_that_stay() -> None:
    """The first placement uses both devices, the others one each, with one slot each."""
    found = list(filled(pooled_task(), 6))

    assert found
    for mix in found:
        divided, *staying = mix.columns
        assert {0, 1} == set(divided.labels.tolist())
        assert all(1 == len(set(c.labels.tolist())) for c in staying)
        assert (4 - len(staying), *(1,) * len(staying)) == mix.slots


def test_a_slot_that_stays_keeps_its_device_busy() -> None:
    """With one on each device, both are busy but for the last requests, which nothing follows."""
    task = pooled_task()
    mix = next(m for m in filled(task, 12) if 3 == len(m.columns))
    judge = Judge(task, ir.Objective.THROUGHPUT, "throughput", SteadyRates())
    timeline = simulate(judge.plan(mix), 60)
    busy = timeline.busy_us()

    assert min(busy[d.name] for d in task.problem.cluster.devices) / timeline.makespan_us > 0.9


def test_where_slots_decode_for_ever_none_lives_on_what_others_leave() -> None:
    """Candidates of a service mix no placement that stays on a device with divided ones."""
    task = judged_task()
    task.is_served = True

    assert not any(is_filled(task, mix) for mix in throughput_mixes(task))
    assert any(is_filled(task, mix) for mix in filled(pooled_task(), 6))


def test_neighbours_differ_in_one_slot() -> None:
    """Of four slots exactly one follows another placement."""
    task = pooled_task()
    mix = next(pairs(task, 3.0, 1))
    near = list(neighbours(task, mix, 3.0, 5))

    assert near
    for other in near:
        counts = Counter({c.key: n for c, n in zip(other.columns, other.slots, strict=True)})
        counts.subtract({c.key: n for c, n in zip(mix.columns, mix.slots, strict=True)})
        assert 4 == sum(other.slots)
        assert [-1, 1] == sorted(n for n in counts.values() if n)


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
