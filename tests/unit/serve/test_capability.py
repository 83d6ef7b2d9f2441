"""What the service reads off its plans: what each policy can do."""

from dataclasses import replace

import pytest

from factories import make_chain, make_cluster, make_plan
from tessera.adapt.capability import answer_tokens, capabilities_of, crossing_per_s
from tessera.adapt.monitor import Monitor
from tessera.ir import Plan

ROWS = 8


def plan_with(policy: str, latency_us: float, *by_microbatches: tuple[int, float]) -> Plan:
    """A plan with the figures given."""
    plan = make_plan([make_chain(2)], [[(0, 1)]], (63,), make_cluster(2), microbatches=4)
    return replace(plan, policy=policy, latency_us=latency_us, by_microbatches=by_microbatches)


WIDE = plan_with("throughput", 40_000.0, (1, 23.0), (2, 44.0), (4, 52.0), (8, 60.0))
QUICK = plan_with("latency", 33_000.0, (1, 30.0), (2, 30.5), (4, 30.5), (8, 30.5))


def test_capacities_are_in_requests_and_of_the_microbatches_there_are() -> None:
    """A unit is a batch of rows; the rate with eight microbatches is not that of four."""
    assert [ROWS * 52.0, ROWS * 30.5] == [c.capacity_per_s for c in capabilities_of([WIDE, QUICK], ROWS)]


def test_an_idle_service_is_quick_and_a_full_one_wide() -> None:
    """The policies cross below the smaller capacity, and the monitor begins with the quick one."""
    found = capabilities_of([WIDE, QUICK], ROWS)
    crossing = crossing_per_s(found)

    assert "latency" == Monitor(found).current
    assert crossing is not None
    assert 0.0 < crossing <= ROWS * 30.5


def test_latency_follows_from_requests_in_the_system() -> None:
    """By Little's law: two units in flight at 44 a second stay for 2 / 44 s, over 64 tokens."""
    (wide,) = capabilities_of([WIDE], ROWS)

    assert 2 / 44.0 / 64 == pytest.approx(wide.normalised_s(ROWS * 44.0))
    assert ROWS * 44.0 == pytest.approx(wide.served_per_s(2 * ROWS))


def test_plans_without_figures_decide_nothing() -> None:
    """A plan that was never simulated in flight has no capability."""
    assert () == capabilities_of([WIDE, replace(QUICK, by_microbatches=())], ROWS)


def test_an_answer_has_as_many_tokens_as_its_own_step_runs() -> None:
    """In a served unit the last step is the largest, which reads prompts; the step of all rows decodes."""
    plan = make_plan([make_chain(2)] * 3, [[(0, 1)] * 3], (1, 127, 16), make_cluster(2), microbatches=4)
    graphs = tuple(
        replace(g, trace=replace(g.trace, step=replace(g.trace.step, kind="tokens", context=size, rows=ROWS)))
        for g, size in zip(plan.unit.graphs, (2, ROWS, 64), strict=True)
    )

    assert 128 == answer_tokens(replace(plan.unit, graphs=graphs))
