"""What is proposed for judgement."""

from plan_factories import MiB, layered_case
from tessera.plan.config import FULL
from tessera.plan.pricing import throughput
from tessera.plan.problem import Mix, build, microbatch_counts
from tessera.plan.search.local import Search, is_filled, throughput_mixes
from tessera.plan.search.task import Task
from tessera.simulate import SteadyRates


def test_without_a_judge_only_the_optimum_is_proposed() -> None:
    """Nothing else can win by busy time."""
    task = Task(build(*layered_case()), 4)

    assert (task.free.mix,) == throughput_mixes(task)


def judged_task(is_served: bool = False) -> Task:
    """A task whose search looks at simulated rates."""
    return Task(build(*layered_case()), 4, SteadyRates(), is_served)


def test_finalists_differ_and_move_less_than_the_optimum_by_busy_time() -> None:
    """The search leaves few candidates, all different, with fewer transfers where that simulates better."""
    task = judged_task()
    mixes = throughput_mixes(task)
    keys = {
        tuple(sorted((c.key, round(s, 6)) for c, s in zip(m.columns, m.shares, strict=True))) for m in mixes
    }

    assert 0 < len(mixes) == len(keys) <= FULL.num_finalists[0]
    assert min(m.num_messages for m in mixes) < task.free.mix.num_messages


def test_finalists_simulate_better_than_the_optimum_by_busy_time() -> None:
    """Busy time alone would have chosen a plan that few requests in flight cannot keep up."""
    task = judged_task()
    best = max(task.quick_per_s(mix) for mix in throughput_mixes(task))

    assert best > 1.02 * task.quick_per_s(task.free.mix)


def test_every_candidate_fits() -> None:
    """Memory is a constraint on candidates, not an afterthought."""
    per_layer = 4 * 16 * MiB + (1 + 3) * 8 * MiB
    temporary = 4 * 24 * MiB
    memory = [n * per_layer + temporary for n in (3, 2)]
    task = Task(build(*layered_case(4, memory=memory)), 4, SteadyRates())

    assert task.pool.is_tight
    for mix in throughput_mixes(task):
        assert task.problem.fits(mix.columns, microbatch_counts(mix, 4))


def climbed() -> tuple[Task, list[Mix]]:
    """A task, and every mix that its search simulated."""
    task = judged_task()
    search = Search(task)
    search.look(task.free.mix)
    for depth in FULL.depths:
        search.look(throughput.generate(task.pool, 2 * depth).mix)
    search.climb()
    return task, [mix for _, mix in search.rated]


def test_no_more_is_simulated_than_the_budget_allows() -> None:
    """The same mix is never looked at twice."""
    _, seen = climbed()
    keys = [
        (
            frozenset(zip((c.key for c in m.columns), microbatch_counts(m, 4), strict=True)),
            not m.microbatches and m.shares,
        )
        for m in seen
    ]

    assert len(keys) == len(set(keys))
    assert len(seen) <= FULL.max_looks


def test_a_single_placement_is_among_the_starts() -> None:
    """The one with the least busy time of all that the linear program made is simulated alone."""
    _, seen = climbed()
    made = [column for mix in seen for column in mix.columns]
    least = min(float(column.busy_us.max()) for column in made)

    assert any(len(m.columns) == 1 and float(m.columns[0].busy_us.max()) <= least for m in seen)


def test_teams_have_no_more_microbatches_than_microbatches() -> None:
    """Microbatches are at most."""
    _, seen = climbed()

    assert any(m.microbatches for m in seen)
    assert all(sum(m.microbatches) <= 4 for m in seen)


def test_a_microbatch_that_stays_on_a_device_is_tried_beside_divided_ones() -> None:
    """It fills what the others leave free there."""
    task, seen = climbed()

    assert any(is_filled(task, mix.columns) for mix in seen)


def test_where_microbatches_decode_for_ever_none_lives_on_what_others_leave() -> None:
    """Candidates of a service mix no placement that stays on a device with divided ones."""
    task = judged_task(is_served=True)

    assert not any(is_filled(task, mix.columns) for mix in throughput_mixes(task))
