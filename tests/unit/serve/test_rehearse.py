"""Service plans on a virtual clock: what a service reaches under a load."""

import functools

import pytest

import steps_factory as factory
from tessera.ir import Expected, Load, ServicePlan
from tessera.serve.policies import ServicePlanner
from tessera.serve.rehearse import play, rehearse
from tessera.simulate.arrivals import lengths_of, make_arrivals

LOAD = Load(prompt_tokens=12, output_tokens=8)


def planner() -> ServicePlanner:
    made = factory.prepared().planner
    assert made is not None
    return made


@functools.cache
def best(policy: str) -> ServicePlan:
    return planner().best(policy)


def expected(policy: str, clients: int | None = None) -> Expected:
    return rehearse(best(policy), LOAD, clients, shape=planner().shape)


def test_two_devices_side_by_side_serve_more_than_one() -> None:
    assert expected("data-parallel").tokens_per_s > 1.1 * expected("single").tokens_per_s


def test_figures_agree() -> None:
    """Times per token and to the first one, busy shares and counts of steps are of the same run."""
    found = expected("data-parallel")
    assert 0.0 < found.tpot_ms <= found.tpot_p99_ms
    assert 0.0 < found.ttft_ms <= found.ttft_p99_ms
    assert all(0.0 < share <= 1.001 for share in found.busy)
    assert [len(factory.SIZES)] * 2 == [len(counts) for counts in found.steps]
    assert best("data-parallel").clients == found.clients
    # By Little's law: requests at once = requests per second x their time.
    time_s = 1e-3 * (found.ttft_ms + found.tpot_ms * (LOAD.output_tokens - 1))
    assert found.tokens_per_s / LOAD.output_tokens * time_s == pytest.approx(found.clients, rel=0.3)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert expected("prefill-decode") == expected("prefill-decode")


def test_splits_move_pages() -> None:
    assert expected("prefill-decode").pages_moved > 0
    assert 0 == expected("data-parallel").pages_moved


def test_one_client_is_served_by_one_group() -> None:
    """With nobody beside it, a request gets less than the service gives to many."""
    alone = expected("data-parallel", 1)
    assert 0.0 < alone.tokens_per_s < expected("data-parallel").tokens_per_s


def test_lengths_are_the_loads() -> None:
    drawn = lengths_of(LOAD, 500)
    assert 12 == pytest.approx(sum(prompt for prompt, _ in drawn) / 500, rel=0.1)
    assert {(3, 4), (5, 6)} == set(lengths_of(Load(1, 1, lengths=((3, 4), (5, 6))), 50))
    assert drawn == lengths_of(LOAD, 500)


def test_a_monitor_chooses_among_plans_as_in_a_service() -> None:
    """Past the capacity of one device sequences move to the other policy, and nobody waits for it."""
    plans = [best("single"), best("prefill-decode-fractional")]
    arrivals = make_arrivals("poisson:715", 600, 0)
    fixed = [play([plan], arrivals) for plan in plans]
    watched = play(plans, arrivals)

    assert ["single", "prefill-decode-fractional"] == [one.policy for one in fixed]
    assert [()] * 2 == [one.decisions for one in fixed]
    assert {"switch"} == {decision.kind.value for decision in watched.decisions}
    assert "the switch takes about" in watched.decisions[0].why
    assert watched.expected.pages_moved > 0
    assert watched.normalised_s < 1.1 * min(one.normalised_s for one in fixed)
