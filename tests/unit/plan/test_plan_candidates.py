"""What is proposed for judgement."""

from plan_factories import MiB, layered_case
from tessera.plan.candidates import throughput_mixes
from tessera.plan.policies import Task
from tessera.plan.problem import build


def test_without_a_judge_only_the_optimum_is_proposed() -> None:
    """Nothing else can win by busy time."""
    task = Task(build(*layered_case()), 4, is_judged=False)

    assert (task.free.mix,) == throughput_mixes(task)


def test_judge_gets_different_candidates_with_fewer_transfers_among_them() -> None:
    """Candidates differ, and some move much less than the optimum by busy time."""
    task = Task(build(*layered_case()), 4, is_judged=True)
    mixes = throughput_mixes(task)
    keys = {
        tuple(sorted((c.key, round(s, 6)) for c, s in zip(m.columns, m.shares, strict=True))) for m in mixes
    }

    assert len(mixes) == len(keys)
    assert min(m.num_messages for m in mixes) < 0.5 * task.free.mix.num_messages


def test_some_candidate_is_balanced_in_every_step() -> None:
    """In at least one placement no device idles for more than a third of any step."""
    task = Task(build(*layered_case()), 4, is_judged=True)
    prob = task.problem
    worst = []
    for mix in throughput_mixes(task):
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
    task = Task(build(*layered_case(4, memory=[3 * per_layer, 2 * per_layer])), 4, is_judged=True)

    assert task.pool.is_tight
    assert all(task.problem.fits(mix.columns, 4) for mix in throughput_mixes(task))
