"""Patience: a slot is opened at once where devices have room, and later where it slows others down."""

from dataclasses import replace

import pytest

from factories import make_chain, make_cluster, make_plan
from online_factory import RUN_US, alone_plan, policy_of, serve
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.patience import Patience


def test_decodes_of_one_device_slow_one_another_down() -> None:
    """With everything on one device, two slots take twice as long for a decode each."""
    patience, policy = Patience(), policy_of(alone_plan())

    assert pytest.approx(RUN_US) == patience.pace_us(policy, 1)
    assert pytest.approx(2 * RUN_US) == patience.pace_us(policy, 2)


def test_a_second_device_gives_room_for_a_second_slot() -> None:
    """Lanes on two devices do not slow one another down, so the first who waits opens a slot."""
    plan = make_plan([make_chain(2)], [[[0, 0]], [[1, 1]]], cluster=make_cluster(), slots=4)
    patience, policy = Patience(), policy_of(plan)

    assert patience.opens(policy, num_open=1, num_seated=32, num_waiting=1)


def test_on_a_full_device_many_must_wait_before_a_slot_is_opened() -> None:
    """What a slot costs those who are seated is weighed against those who wait."""
    patience, policy = Patience(), policy_of(alone_plan())

    assert not patience.opens(policy, num_open=1, num_seated=32, num_waiting=6)
    assert patience.opens(policy, num_open=1, num_seated=32, num_waiting=7)


def test_a_first_slot_is_always_opened() -> None:
    """Nobody waits for a system that does nothing."""
    assert Patience().opens(policy_of(alone_plan()), num_open=0, num_seated=0, num_waiting=1)


def test_every_request_is_served_however_few_wait() -> None:
    """Those who wait for a seat get one when somebody leaves."""
    served = serve(alone_plan(), make_arrivals("batch:9", lengths="fixed:1,20"), rows=8)

    assert min(served.ledger.done_us) > 0.0


def test_a_slot_that_others_leave_no_time_does_not_hold_up_the_search_for_a_pace() -> None:
    """Three divided slots keep the first device busy with shorter stretches than the fourth slot's."""
    plan = make_plan([make_chain(2)], [[[0, 1]], [[0, 0]]], cluster=make_cluster(), slots=4)
    starved = policy_of(replace(plan, lane_table=(0, 0, 0, 1)))

    assert 0.0 < Patience().pace_us(starved, 4) < float("inf")
