"""A monitor on a simulated server: never much worse than the better fixed policy, and quick to mend."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.row_service.metrics import ServingReport
from benchmarks.row_service.study import Scenario, adapt, compare, known_of

from factories import make_chain, make_cluster, make_plan
from online_factory import LAUNCH_US, RUN_US, alone_plan, both_plans, split_plan
from sampling import examples, one_of_each
from tessera.adapt.capability import Capability
from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.errors import PlanInfeasible
from tessera.ir import Cluster, Costs, DecisionKind, Lane, Objective, Placement, Plan
from tessera.simulate.arrivals import make_arrivals
from tessera.simulate.stepper import Faults, Loss

ROWS, TOKENS = 4, 20
# Requests, if nothing else is said.
NUM = examples(1500, 300)
# Requests per second of the plan that has one device.
ALONE_PER_S = ROWS / (RUN_US * 1e-6) / TOKENS


def setting(arrivals: str, num: int = NUM, faults: Faults | None = None) -> Scenario:
    """Geometric answers in microbatches of four."""
    made = make_arrivals(arrivals, num, 1, f"geometric:1,{TOKENS}")
    return Scenario(made, faults or Faults(), rows=ROWS, seed=0 if faults else 1)


@pytest.fixture(scope="module", autouse=True)
def _short_runs() -> Iterator[None]:
    """What a plan can do is found by fewer requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.row_service.metrics.LEAST", examples(1000, 150))
        yield


@pytest.fixture(scope="module")
def known() -> tuple[Capability, ...]:
    """What there is to know of both plans, found once."""
    return known_of(both_plans(), setting("poisson:1000"))


def mean_s(report: ServingReport) -> float:
    """Normalised latency."""
    assert report.normalised_s is not None
    return report.normalised_s.mean


SHARES = one_of_each([0.1, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1, 1.5, 1.8, 2.5], int)


@pytest.mark.parametrize("share", SHARES)
def test_adaptive_is_never_much_worse_than_the_better_fixed_policy(
    share: float, known: tuple[Capability, ...]
) -> None:
    """At any load, 1.05 times the normalised latency of the better plan is the most."""
    wanted = setting(f"poisson:{share * ALONE_PER_S}")
    adaptive, _ = adapt(both_plans(), wanted, known=known)

    assert mean_s(adaptive) <= 1.05 * min(mean_s(r) for r in compare(both_plans(), wanted))


@pytest.mark.parametrize("share", one_of_each([0.8, 0.4, 1.2], bool))
def test_adaptive_keeps_up_with_bursts(share: float, known: tuple[Capability, ...]) -> None:
    """The same when the load jumps to four times its mean and back, and switches happen."""
    wanted = setting(f"bursty:{share * ALONE_PER_S},4,0.1,0.05", examples(4000, 1000))
    adaptive, _ = adapt(both_plans(), wanted, known=known)

    assert mean_s(adaptive) <= 1.05 * min(mean_s(r) for r in compare(both_plans(), wanted))
    assert any(d.kind is DecisionKind.SWITCH for d in adaptive.decisions)


def test_a_batch_is_served_by_the_throughput_policy_at_once(known: tuple[Capability, ...]) -> None:
    """All requests at time zero: the monitor switches at time zero."""
    adaptive, _ = adapt(both_plans(), setting("batch:500"), known=known)

    assert (0.0, "throughput") == (adaptive.decisions[0].at_s, adaptive.decisions[0].policy)


def test_every_request_gets_its_answer_whatever_is_decided(known: tuple[Capability, ...]) -> None:
    """Switches lose nothing and begin nothing again."""
    adaptive, _ = adapt(both_plans(), setting(f"bursty:{ALONE_PER_S},4,0.1,0.05"), known=known)

    assert NUM == adaptive.num_finished
    assert 0 == adaptive.num_restarted


def on_devices(plan: Plan, device: int) -> Plan:
    """A plan with everything on one device."""
    lane = Lane(
        Placement(tuple(tuple(device for _ in step) for step in plan.lanes[0].placement.devices)), 1.0
    )
    return replace(plan, lanes=(lane,), lane_table=())


def test_a_lost_device_is_planned_around_and_no_request_is_lost(known: tuple[Capability, ...]) -> None:
    """The plans use d1; a replan puts all on d0 and the requests are served, some of them anew."""
    asked: list[tuple[str, ...]] = []

    def make(plan: Plan, cluster: Cluster, costs: tuple[Costs, ...]) -> Plan:
        asked.append(cluster.names)
        return replace(on_devices(plan, 0), cluster=cluster, costs=costs)

    plans = [("latency", on_devices(alone_plan(), 1)), both_plans()[1]]
    lost = setting("batch:300", faults=Faults(losses=(Loss("d1", 0.005),)))
    adaptive, _ = adapt(plans, lost, make=make, known=known)

    assert [("d0",), ("d0",)] == asked
    assert 300 == adaptive.num_finished
    assert adaptive.num_restarted > 0


def test_a_replan_that_fails_leaves_the_old_plans_running(known: tuple[Capability, ...]) -> None:
    """It is told in the decisions, and requests go on being served."""

    def make(plan: Plan, cluster: Cluster, costs: tuple[Costs, ...]) -> Plan:
        raise PlanInfeasible("there is no such placement")

    slow = Faults(slowdowns=(("d1", 0.01, 2.0),))
    watch = MonitorConfig(window_s=0.05)
    num = examples(5000, 1000)
    wanted = setting(f"poisson:{1.3 * ALONE_PER_S}", num, slow)
    adaptive, _ = adapt(both_plans(), wanted, watch, make, 0.1, known)

    assert num == adaptive.num_finished
    assert any("no new plans: there is no such placement" in d.why for d in adaptive.decisions)


def test_a_price_is_corrected_once() -> None:
    """Runs under a plan that was replaced say nothing of the new prices: one replan is enough."""
    asked: list[float] = []

    def make(plan: Plan, cluster: Cluster, costs: tuple[Costs, ...]) -> Plan:
        asked.append(costs[0].us(0, 1) / split_plan().costs[0].us(0, 1))
        return plan

    wanted = setting(f"batch:{examples(4000, 1000)}", faults=Faults(slowdowns=(("d1", 0.0, 1.5),)))
    adapt([("throughput", split_plan())], wanted, MonitorConfig(window_s=0.02), make, 0.01)

    assert [pytest.approx(1.5, rel=0.05)] == asked


def test_a_policy_past_its_capacity_is_left_soon() -> None:
    """Two plans whose capacities differ by a sixth, at 1.104 times the smaller."""
    chain, launches = make_chain(7), (0,) * 7
    cluster = make_cluster(latency_us=10.0)
    near = replace(make_plan([chain], [[launches]], cluster=cluster, microbatches=4), policy="near")
    far = make_plan([chain], [[(*launches[:6], 1)]], cluster=cluster, microbatches=4)
    plans = [("near", replace(near, objective=Objective.LATENCY)), ("far", far)]
    load = 1.104 * ROWS / (7 * LAUNCH_US * 1e-6) / TOKENS
    wanted = setting(f"poisson:{load}", examples(4000, 1000))
    adaptive, capabilities = adapt(plans, wanted)
    switches = [d.at_s for d in adaptive.decisions if d.kind is DecisionKind.SWITCH]

    assert 1.1 < capabilities[1].capacity_per_s / capabilities[0].capacity_per_s < 1.2
    assert switches[0] < 2 * Monitor(capabilities).window_s
    assert mean_s(adaptive) < 1.05 * min(mean_s(r) for r in compare(plans, wanted))
