"""Lanes of open slots, turns of heads, and what a switch of policy does to slots."""

from dataclasses import replace

import pytest

from factories import make_chain, make_plan, make_trace
from online_factory import RUN_US, alone_plan, at_us, both_plans, policy_of, serve
from tessera.adapt import Factors
from tessera.ir import BufferKind, Lane, Placement
from tessera.simulate.judged import corrected_costs, gain_of
from tessera.simulate.online import ServeConfig, Server
from tessera.simulate.open_lanes import OpenLanes
from tessera.simulate.policy import Policy, Truth, Workshop
from tessera.simulate.seats import Slot, demand_of
from tessera.simulate.turns import Turns

HERE = Placement(((0,),))


def test_a_lane_that_opens_and_closes_often_stays_the_second() -> None:
    """However often the quiet lane's slot closes, the next one opens there and not beside the busy one."""
    lanes = OpenLanes([Lane(HERE, 6.0), Lane(HERE, 4.0)])
    assert 0 == lanes.take()

    for _ in range(20):
        assert 1 == lanes.take()
        lanes.give_back(1)


def test_slots_are_divided_by_shares() -> None:
    """Of five open slots, three are in the lane with six tenths."""
    lanes = OpenLanes([Lane(HERE, 6.0), Lane(HERE, 4.0)])

    assert [0, 0, 0, 1, 1] == sorted(lanes.take() for _ in range(5))


def test_a_head_that_is_late_goes_before_decodes_of_its_device() -> None:
    """Until it has waited as long as it takes others go on; then they wait for its end."""
    policy, turns = policy_of(alone_plan()), Turns()
    slot = Slot(policy, policy.lanes[0], 0)
    turns.begin(1, policy.body(policy.lanes[0]), now_us=0.0)

    assert not turns.holds(0, slot, 2 * RUN_US)
    assert turns.holds(0, slot, 2 * RUN_US + 1.0)
    assert [0] == turns.end(1)
    assert not turns.holds(0, slot, 1e6)


def test_a_lost_slot_waits_for_no_head() -> None:
    """When the head is done, a slot that was lost meanwhile is not told to go on."""
    policy, turns = policy_of(alone_plan()), Turns()
    turns.begin(1, policy.body(policy.lanes[0]), now_us=0.0)
    assert turns.holds(0, Slot(policy, policy.lanes[0], 0), 1e6)

    assert [] == turns.end(0)
    assert [] == turns.end(1)


def test_a_prompt_is_not_kept_waiting_by_answers_that_go_on_for_ever() -> None:
    """Two slots of one device: the second one's prompt is read while the first one still decodes."""
    first = make_trace([[(0, 0, 64, "rw")]] * 20, {0: BufferKind.STATE}, kind="prefill")
    second = make_trace([[(0, 0, 64, "rw")]], {0: BufferKind.STATE})
    plan = make_plan([first, second], [[[0] * 20, [0]]], counts=[1, 3], slots=2)
    served = serve(plan, at_us(0.0, 0.0, 500.0, outputs=[400, 400, 4]), rows=2)

    assert served.ledger.first_us[2] < 1500.0
    assert served.ledger.done_us[0] > 4000.0


def switched(outputs: list[int], at_s: float) -> tuple[Server, list[int]]:
    """Requests in slots of four; to the throughput policy at once and to the other one later."""
    shop = Workshop(Truth(alone_plan()))
    made = [Policy(name, plan, shop) for name, plan in both_plans()]
    demand = demand_of(alone_plan().unit, at_us(*[0.0] * len(outputs), outputs=outputs), 4)
    server = Server(made, demand, ServeConfig())
    open_slots: list[int] = []
    server.switch("throughput")
    server.at(at_s, lambda: server.switch("latency"))
    server.at(at_s + 5e-4, lambda: open_slots.append(len(server._slots)))
    return server, open_slots


def test_a_switch_seats_requests_in_as_few_slots_as_they_need() -> None:
    """Four of eight leave early from two slots; after a switch the other four sit in one."""
    server, open_slots = switched([10, 40] * 4, 6e-4)

    served = server.run()

    assert [1] == open_slots
    assert all(done > 0.0 for done in served.ledger.done_us)
    assert 0 == served.ledger.num_restarted
    assert 0 == server.num_requests


def test_a_switch_keeps_slots_that_are_full() -> None:
    """Eight requests need two slots of four under any policy."""
    server, open_slots = switched([40] * 8, 3e-4)

    server.run()

    assert [2] == open_slots


def test_new_shares_that_gain_nothing_are_worth_nothing() -> None:
    """The same lanes in the same shares are as good at any costs."""
    plan = make_plan([make_chain(4)], [[[0] * 4], [[1] * 4]], slots=4)
    demand = demand_of(plan.unit, at_us(0.0, outputs=[10]), 2)
    costs = corrected_costs(plan, Factors({}, {"d1": 2.0}))

    assert pytest.approx(1.0) == gain_of(plan, plan, costs, demand)


def test_a_plan_is_judged_at_corrected_costs() -> None:
    """With d1 three times as slow, everything on d0 beats everything on d1."""
    there = make_plan([make_chain(4)], [[[1] * 4]], slots=2)
    here = replace(there, lanes=(Lane(Placement(((0,) * 4,)), 1.0),))
    demand = demand_of(there.unit, at_us(0.0, outputs=[10]), 2)
    costs = corrected_costs(there, Factors({}, {"d1": 3.0}))

    assert pytest.approx(3.0, rel=0.01) == gain_of(there, here, costs, demand)
