"""New plans of steps: corrected costs, and plans around lost devices."""

import pytest
from benchmarks.row_service.replan import Replanner, replan, widened, without_devices

from factories import make_cluster, make_plan, make_trace
from online_factory import split_plan
from tessera.adapt.drift import Factors
from tessera.errors import PlanInfeasible
from tessera.ir import verify


def test_new_plans_have_corrected_costs_and_leave_out_what_is_lost() -> None:
    """Corrections of two replans add up, and a plan without d0 runs everything on d1."""
    kernel = split_plan().unit.graphs[0].trace.kernels[0].name
    planner = Replanner(replan, lambda old, new: 1.0, lambda plans: ())
    plans = planner.corrected((split_plan(),), Factors({("d1", kernel): 2.0}))
    plans = planner.corrected(plans, Factors({("d1", kernel): 1.5}))
    (made,) = planner.without(plans, {"d0"})

    assert "throughput" == made.policy
    assert ("d0", "d1") == made.cluster.names
    assert {1} == {device for lane in made.lanes for step in lane.placement.devices for device in step}
    assert [(10.0, 30.0)] * 4 == [tuple(cost.us for cost in row) for row in made.costs[0].costs]


def test_no_plan_can_do_without_all_devices() -> None:
    """A replan with nothing left to run on says so."""
    with pytest.raises(PlanInfeasible, match="no device is left"):
        Replanner(replan, lambda old, new: 1.0, lambda plans: ()).without((split_plan(),), {"d0", "d1"})


def test_a_plan_for_fewer_devices_is_one_for_all_of_them() -> None:
    """Made without d0, it runs on d1 of the whole cluster, with all prices."""
    trace = make_trace([[(0, 0, 64, "w")]])
    whole = make_plan([trace], [[[0]]], cluster=make_cluster(3))
    cluster, costs = without_devices(whole.cluster, whole.costs, {"d0"})
    assert ("d1", "d2") == cluster.names
    assert all(cluster.devices == c.devices for c in costs)
    made = widened(make_plan([trace], [[[0]]], cluster=cluster), whole)

    verify(made)
    assert (((1,),),) == tuple(lane.placement.devices for lane in made.lanes)
