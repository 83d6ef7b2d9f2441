"""The monitor: which policy, when to plan anew, and when to leave things as they are."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from factories import make_chain, make_plan
from sampling import examples
from tessera.adapt.capability import Capability, Point, crossing_per_s
from tessera.adapt.monitor import Monitor, MonitorConfig
from tessera.execute.lanes import Lanes
from tessera.ir import Trace

# Quick alone and soon full; slower alone, and good for twice as much.
QUICK = Capability("quick", 10.0, (Point(1.0, 1.0, 1.0), Point(5.0, 1.0, 5.0), Point(9.0, 3.0, 27.0)))
WIDE = Capability("wide", 20.0, (Point(1.0, 2.0, 2.0), Point(9.0, 2.0, 18.0), Point(18.0, 4.0, 72.0)))

GEMM, NORM = 0, 1


def step(kernel: str) -> Trace:
    """One launch, which takes 10 us."""
    trace = make_chain(1)
    return replace(trace, kernels=tuple(replace(found, name=kernel) for found in trace.kernels))


# A lane on each of two devices.
LANES = Lanes([make_plan([step("gemm"), step("norm")], [[[0], [0]], [[1], [1]]])]).all


def arrivals(
    monitor: Monitor, rate_per_s: float, num: int, seed: int = 0, start_s: float = 0.0
) -> list[tuple[float, str]]:
    """Poisson arrivals, with as many present as belong to the load: (time, reason) of every switch."""
    times = start_s + np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_per_s, num))
    switches = []
    for time in times.tolist():
        policy = {"quick": QUICK, "wide": WIDE}[monitor.current]
        why = arrive(monitor, time, round(rate_per_s * policy.normalised_s(rate_per_s)))
        if why is not None:
            switches.append((time, why))
    return switches


def arrive(monitor: Monitor, now_s: float, num_requests: int) -> str | None:
    monitor.arrived(now_s)
    return monitor.switch(now_s, num_requests, switch_s=0.1)


def test_the_crossing_follows_from_the_policies() -> None:
    """From 5 to 9 a second the quick policy goes from 1 to 3 s a token; at 7 it is as slow as the other."""
    assert crossing_per_s((QUICK, WIDE)) == pytest.approx(7.0)


def test_without_a_crossing_nothing_switches() -> None:
    """A policy that is better at every load stays."""
    better = Capability("better", 30.0, (Point(1.0, 0.5, 0.5), Point(29.0, 0.5, 15.0)))
    monitor = Monitor([better, WIDE])

    assert monitor.crossing_per_s is None
    assert all(arrive(monitor, t * 0.01, 3) is None for t in range(500))


def test_a_single_policy_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its load is measured all the same: a second policy may come."""
    monkeypatch.setattr(Capability, "expected", None)
    monitor = Monitor([QUICK])

    assert [] == arrivals(monitor, 8.0, 400)
    assert 8.0 == pytest.approx(monitor.load(50.0)[0], rel=0.2)


def test_an_idle_system_starts_with_the_quick_policy() -> None:
    """Whatever the order in which policies are given."""
    assert "quick" == Monitor([WIDE, QUICK]).current


def test_a_high_load_switches_once_and_a_low_load_back() -> None:
    """At 15 a second to the wide policy, at 2 back to the quick one: two decisions."""
    monitor = Monitor([QUICK, WIDE])

    up = arrivals(monitor, 15.0, 400)
    down = arrivals(monitor, 2.0, 400, 1, start_s=100.0)

    assert (1, 1) == (len(up), len(down))
    assert "quick" == monitor.current


def test_a_reason_is_one_line_with_the_figures() -> None:
    """What came, what each policy would do with it."""
    ((_, why),) = arrivals(Monitor([QUICK, WIDE]), 15.0, 300)

    assert "\n" not in why
    assert re.search(r"^\d+ requests? came in the (first|last) [\d.]+ s", why)
    assert "with wide (20/s)" in why
    assert "with quick (10/s)" in why


def test_a_reason_counts_what_came_and_nothing_that_was_supposed() -> None:
    """Four requests in a house that was empty for an hour are four, wherever the policies cross."""
    monitor = Monitor([QUICK, WIDE], MonitorConfig(window_s=2.0))
    monitor.begin(0.0)
    reasons = [arrive(monitor, 3600.0 + 0.1 * n, here) or "" for n, here in enumerate((1, 2, 3, 60))]

    assert (2.0, 1.0) == monitor.load(3600.3)
    assert reasons[-1].startswith("4 requests came in the last 2 s (2 a second), 60 are here;")


def test_a_steady_load_at_the_crossing_does_not_flap() -> None:
    """Where both are as good, chance alone moves the count; the count's own error keeps the policy."""
    monitor = Monitor([QUICK, WIDE])

    assert len(arrivals(monitor, 7.0, examples(3000, 1500))) < examples(10, 5)


def test_a_crowd_switches_before_the_window_has_seen_it() -> None:
    """Sixty requests in the system are too many for the quick policy, however few came lately."""
    monitor = Monitor([QUICK, WIDE])
    arrivals(monitor, 2.0, 100)

    assert arrive(monitor, 60.0, 60) is not None
    assert "wide" == monitor.current


def test_time_may_start_anywhere() -> None:
    """The clock of an engine and that of a simulator give the same decisions."""
    first, second = Monitor([QUICK, WIDE]), Monitor([QUICK, WIDE])

    early = arrivals(first, 15.0, 200)
    late = arrivals(second, 15.0, 200, start_s=1e6)

    assert [at_s + 1e6 for at_s, _ in early] == pytest.approx([at_s for at_s, _ in late])


def test_a_window_can_be_chosen() -> None:
    """By default a hundred requests at the crossing."""
    assert Monitor([QUICK, WIDE]).window_s == pytest.approx(100 / 7.0)
    assert 3.0 == Monitor([QUICK, WIDE], MonitorConfig(window_s=3.0)).window_s


def test_right_costs_change_nothing() -> None:
    """Times that are as planned lead to no decision."""
    monitor = Monitor([QUICK, WIDE])
    monitor.begin(0.0)
    monitor.stepped(LANES[0], GEMM, {"d0": 10.1e-6})

    assert monitor.drifted(100.0) is None


def test_wrong_costs_ask_for_new_plans_once() -> None:
    """A kernel type that takes half as long again asks for a replan, and for no second one meanwhile."""
    monitor = Monitor([QUICK, WIDE])
    monitor.begin(0.0)
    monitor.stepped(LANES[0], GEMM, {"d0": 15e-6})
    monitor.stepped(LANES[0], NORM, {"d0": 10e-6})

    drift = monitor.drifted(100.0)
    monitor.stepped(LANES[0], GEMM, {"d0": 15e-6})

    assert drift is not None
    assert drift[0].of("gemm", "d0") == pytest.approx(1.5, rel=0.03)
    assert monitor.drifted(200.0) is None


def test_a_factor_that_all_share_is_no_reason_to_replan() -> None:
    """A machine that is slower by a third in everything runs the same placements."""
    monitor = Monitor([QUICK, WIDE])
    monitor.begin(0.0)
    for device in range(2):
        monitor.stepped(LANES[device], GEMM, {f"d{device}": 13e-6})

    assert monitor.drifted(100.0) is None


def test_new_plans_move_the_crossing() -> None:
    """Once a quicker wide policy is adopted, the load at which to switch is another."""
    monitor = Monitor([QUICK, WIDE])
    wider = Capability("wide", 40.0, (Point(1.0, 1.5, 1.5), Point(36.0, 2.0, 72.0)))

    monitor.adopt(1.0, (QUICK, wider))

    assert monitor.crossing_per_s is not None
    assert monitor.crossing_per_s < 7.0


def test_a_policy_near_its_limit_is_judged_by_what_a_higher_load_would_do() -> None:
    """The same estimate is worse for a policy that it might overload."""
    sure, unsure = (QUICK.expected(8.0, error, 21.0, window_s=10.0) for error in (0.0, 2.0))

    assert sure == pytest.approx(21.2, abs=0.1)
    assert unsure > sure + 0.1


def test_a_higher_load_never_promises_fewer_requests() -> None:
    """Also from an empty system, and where a policy's curve has a cliff."""
    cliff = Capability("cliff", 6.3, (Point(3.0, 1.0, 10.0), Point(4.4, 1.0, 17.0), Point(5.0, 3.0, 50.0)))
    for num in (0.0, 10.0, 40.0):
        found = [cliff.expected(load, 0.4, num, window_s=22.0) for load in np.arange(3.0, 8.0, 0.1).tolist()]
        assert found == sorted(found)


def test_a_backlog_is_judged_by_how_fast_it_goes() -> None:
    """At a load that both sustain, fifty who wait are sooner gone with the policy that can do more."""
    few, many = (
        [policy.expected(3.0, 0.0, here, window_s=10.0) for policy in (QUICK, WIDE)] for here in (3.0, 50.0)
    )

    assert few[0] < few[1]
    assert many[0] > many[1]


def test_a_few_more_than_usual_are_no_load() -> None:
    """An excess that is gone long before the window is over does not outweigh the load that lasts."""
    monitor = Monitor([QUICK, WIDE])
    arrivals(monitor, 2.0, 100)

    assert arrive(monitor, 60.0, 8) is None


def test_a_few_early_arrivals_are_no_load() -> None:
    """A burst of four in a young system says too little to switch."""
    monitor = Monitor((QUICK, WIDE))

    assert all(arrive(monitor, 0.01 * n, n + 1) is None for n in range(4))
    assert monitor.current == "quick"


def test_two_switches_are_at_least_a_window_apart() -> None:
    """A crowd that comes and goes ten times a window makes one switch per window at most."""
    monitor = Monitor([QUICK, WIDE], MonitorConfig(window_s=2.0))
    monitor.begin(0.0)
    times = [n * 0.02 for n in range(examples(2000, 1000))]
    switches = [now for n, now in enumerate(times) if arrive(monitor, now, 80 if n // 10 % 2 else 0)]

    assert all(later - earlier >= 2.0 - 1e-9 for earlier, later in pairwise(switches))


def test_a_gain_within_the_error_of_the_figures_is_no_reason() -> None:
    """Two policies that differ by 2 % do not take turns."""
    other = replace(
        QUICK, name="other", curve=tuple(p._replace(num_requests=0.98 * p.num_requests) for p in QUICK.curve)
    )
    monitor = Monitor([QUICK, other], MonitorConfig(window_s=10.0))
    first = monitor.current

    assert all(arrive(monitor, n * 0.2, 5) is None for n in range(examples(500, 300)))
    assert first == monitor.current


# Two policies of one model, as their plans were simulated: the second sustains 1.16 times as much.
NEAR = Capability(
    "near",
    3.170,
    (Point(0.3, 0.055, 2.1), Point(1.9, 0.062, 15.0), Point(2.66, 0.081, 28.0), Point(3.07, 0.16, 63.0)),
)
FAR = Capability(
    "far",
    3.681,
    (Point(0.3, 0.068, 2.6), Point(2.2, 0.075, 21.0), Point(2.66, 0.081, 28.0), Point(3.57, 0.17, 78.0)),
)


def test_a_policy_past_its_capacity_is_left_within_two_windows() -> None:
    """Poisson at 3.5 a second; the number present follows from the policy in force."""
    monitor = Monitor([NEAR, FAR])
    random, now_s, here, times = np.random.default_rng(0), 0.0, 0.0, list[float]()
    while now_s < 4 * monitor.window_s and not times:
        gap_s = float(random.exponential(1 / 3.5))
        here = max(0.0, here + 1.0 - gap_s * NEAR.served_per_s(here))
        now_s += gap_s
        if arrive(monitor, now_s, round(here)) is not None:
            times.append(now_s)

    assert "far" == monitor.current
    assert times[0] < 2 * monitor.window_s


def test_a_load_past_the_capacity_by_chance_has_a_price() -> None:
    """Eleven and a half a second, where ten can be served, are 1.4 standard errors too many."""
    reasons = []
    for over_errors in (1.0, 2.0):
        monitor = Monitor([QUICK, WIDE], MonitorConfig(window_s=10.0, over_errors=over_errors))
        monitor.begin(0.0)
        for number in range(115):
            monitor.arrived(10.0 + number * 10.0 / 115)
        reasons.append(monitor.switch(20.0, 40, switch_s=1000.0))

    assert [True, False] == [why is not None for why in reasons]


def test_a_full_policy_is_left_though_it_was_chosen_lately() -> None:
    """A window after the quick policy was chosen, it goes on with 30 requests, and not with 60."""
    reasons = []
    for here in (30, 60):
        monitor, now_s = Monitor([QUICK, WIDE], MonitorConfig(window_s=10.0)), 100.0
        arrivals(monitor, 15.0, 400)
        while monitor.current == "wide":
            now_s += 0.5
            arrive(monitor, now_s, 4)
        for _ in range(80):
            now_s += 0.125
            monitor.arrived(now_s)
        reasons.append(monitor.switch(now_s, here, switch_s=0.1))

    assert [False, True] == [why is not None for why in reasons]
