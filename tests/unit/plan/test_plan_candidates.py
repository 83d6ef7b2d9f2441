"""What is proposed for judgement."""

from plan_factories import MiB, layered_case
from tessera import ir
from tessera.plan.candidates import NUM_FINALISTS, NUM_SINGLE, throughput_mixes
from tessera.plan.judge import Judge
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
    task.glance = Judge(task, ir.Objective.THROUGHPUT, "throughput", rates).glances(rates.glance)
    return task


def test_finalists_differ_and_move_less_than_the_optimum_by_busy_time() -> None:
    """The search leaves few candidates, all different, with fewer transfers where that simulates better."""
    task = judged_task()
    mixes = throughput_mixes(task)
    keys = {
        tuple(sorted((c.key, round(s, 6)) for c, s in zip(m.columns, m.shares, strict=True))) for m in mixes
    }

    assert 0 < len(mixes) == len(keys) <= NUM_FINALISTS + NUM_SINGLE
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
