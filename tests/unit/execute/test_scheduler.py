"""The one scheduler, over a clock: admission, lanes, turns, switches, losses, retries and new plans."""

import math
from dataclasses import replace

import pytest
from benchmarks.row_service.admission import RowScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from clocked_stepper import LONG, SHORT, ClockedStepper, Diary, Job, Jobs, plan_of
from tessera.errors import ServiceBusy
from tessera.execute.scheduler import SchedulerConfig
from tessera.ir import Plan

ONE = SchedulerConfig(patience=math.inf)


def made(
    stepper: ClockedStepper, config: SchedulerConfig = ONE, rows: int = 1
) -> tuple[RowScheduler[Job], Diary]:
    """A scheduler of jobs, and what it tells."""
    diary = Diary()
    return RowScheduler(stepper, lambda number, lane: Jobs(number, lane, rows), config, diary), diary


def run(scheduler: RowScheduler[Job], *jobs: Job) -> None:
    """Until all are done."""
    for job in jobs:
        scheduler.push(job)
    while not scheduler.is_idle:
        scheduler.round(None)


def jobs_of(num: int, *steps: int) -> list[Job]:
    """So many alike."""
    return [Job(str(n), steps or (SHORT,)) for n in range(num)]


def test_requests_run_beside_one_another_up_to_the_plans_depth() -> None:
    """Four at a time, each on its lane; the fifth begins when the first has left."""
    stepper = ClockedStepper([plan_of([0], [1])])
    scheduler, diary = made(stepper)
    run(scheduler, *jobs_of(5))

    assert ["0", "1", "2", "3", "4"] == diary.finished_jobs
    assert [0.0] * 4 + [1.0] == [at for at, _, _ in stepper.starts]
    assert [0, 1, 0, 1] == [lane for _, lane in stepper.openings[:4]]


def test_rows_are_filled_before_another_is_opened() -> None:
    """Three requests share a microbatch of four rows and its steps."""
    stepper = ClockedStepper([plan_of([0], [1])])
    scheduler, _ = made(stepper, SchedulerConfig(), rows=4)
    run(scheduler, *jobs_of(3, SHORT, SHORT))

    assert [(0, 0)] == stepper.openings
    assert 2 == len(stepper.starts)


def kept(stepper: ClockedStepper) -> tuple[RowScheduler[Job], Diary]:
    """A scheduler whose microbatches are worth keeping."""
    diary = Diary()
    return RowScheduler(stepper, lambda n, lane: Jobs(n, lane, is_kept=True), ONE, diary), diary


def test_a_microbatch_that_is_worth_it_stays_open() -> None:
    """Two jobs one after another run in the one that was opened for the first."""
    stepper = ClockedStepper([plan_of([0])])
    scheduler, diary = kept(stepper)
    for job in jobs_of(2):
        run(scheduler, job)

    assert ["0", "1"] == diary.finished_jobs
    assert 1 == len(stepper.openings)
    assert scheduler.is_idle


def test_what_is_kept_is_closed_when_it_is_renewed() -> None:
    """An idle microbatch of the policy before is not used under the new one."""
    stepper = ClockedStepper([plan_of([0]), replace(plan_of([1]), policy="other")])
    scheduler, _ = kept(stepper)
    run(scheduler, Job("one"))
    scheduler.switch(1)
    assert not scheduler.microbatches
    run(scheduler, Job("two"))

    assert [0, 1] == [lane for _, lane in stepper.openings]


def test_what_is_kept_can_be_let_go() -> None:
    """Nothing is open after that."""
    scheduler, _ = kept(ClockedStepper([plan_of([0])]))
    run(scheduler, Job("one"))
    scheduler.close_idle()

    assert not scheduler.microbatches


def test_a_full_queue_refuses() -> None:
    """What waits is bounded."""
    scheduler, _ = made(ClockedStepper([plan_of([0])]), SchedulerConfig(max_waiting=2))
    for job in jobs_of(2):
        scheduler.push(job)

    with pytest.raises(ServiceBusy):
        scheduler.push(Job("one too many"))


def test_a_switch_renews_microbatches_one_after_another() -> None:
    """The old policy's go on while one at a time is opened anew; nothing is drained."""
    plans = [plan_of([0], microbatches=2), replace(plan_of([1], microbatches=2), policy="other")]
    stepper = ClockedStepper(plans)
    scheduler, diary = made(stepper, SchedulerConfig(patience=math.inf), rows=2)
    for job in jobs_of(12, SHORT, SHORT):
        scheduler.push(job)
    scheduler.round(None)
    scheduler.switch(1)
    while not scheduler.is_idle:
        scheduler.round(None)

    assert 12 == len(diary.finished_jobs)
    assert [0, 0, 1, 1] == [stepper.lanes.all[lane].policy for _, lane in stepper.openings]


def test_requests_that_can_read_again_go_to_new_microbatches() -> None:
    """After a switch they begin there at once, ahead of who waits; the old microbatch is closed."""
    plans = [plan_of([0], microbatches=2), replace(plan_of([1], microbatches=2), policy="other")]
    stepper, diary = ClockedStepper(plans), Diary()
    config = SchedulerConfig(patience=math.inf)
    scheduler = RowScheduler(stepper, lambda n, lane: Jobs(n, lane, 2, can_move=True), config, diary)
    for job in jobs_of(5, *(SHORT,) * 8):
        scheduler.push(job)
    scheduler.round(None)
    scheduler.switch(1)
    scheduler.round(None)
    scheduler.round(None)

    assert {1} == {microbatch.lane.policy for microbatch in scheduler.microbatches.values()}
    assert ["0", "1", "2", "3"] == sorted(diary.moves)
    assert 1 == len(scheduler.queue)


def late() -> ClockedStepper:
    """On one device, microbatch 0's long step takes ten times what its plan says."""
    return ClockedStepper([plan_of([0])], {(0, LONG): 100.0})


def shorts_during_the_long_step(stepper: ClockedStepper, config: SchedulerConfig) -> int:
    """How many short steps of another microbatch are started while a long one runs."""
    scheduler, _ = made(stepper, config)
    run(scheduler, Job("long", (LONG, SHORT)), Job("short", (SHORT,) * 150))
    return sum(at < 100.0 and number == 1 for at, number, _ in stepper.starts)


def test_a_late_step_holds_back_shorter_ones_on_its_device() -> None:
    """Past twice its modelled ten seconds nobody shorter starts; then both take turns again."""
    stepper = late()

    assert 21 == shorts_during_the_long_step(stepper, SchedulerConfig())
    assert (100.0, 1, SHORT) in stepper.starts
    assert 150 == sum(number == 1 for _, number, _ in stepper.starts)


def test_without_the_rule_short_steps_go_on() -> None:
    """Where a microbatch is one request it is not wanted."""
    assert 100 == shorts_during_the_long_step(late(), ONE)


def test_steps_on_other_devices_are_not_held_back() -> None:
    """Who shares no device waits for nobody."""
    stepper = ClockedStepper([plan_of([0], [1])], {(0, LONG): 100.0})

    assert 100 == shorts_during_the_long_step(stepper, SchedulerConfig())


def test_what_is_always_slow_is_not_late() -> None:
    """A step that never takes less than five times its modelled time is measured by what it took before."""
    stepper = ClockedStepper([plan_of([0])], {(0, LONG): 50.0})
    scheduler, _ = made(stepper, SchedulerConfig())
    run(scheduler, Job("long", (LONG, LONG)), Job("short", (SHORT,) * 150))
    second = [at for at, number, step in stepper.starts if (number, step) == (0, LONG)][1]

    assert 50 <= sum(second <= at < second + 50.0 and number == 1 for at, number, _ in stepper.starts)


def test_who_was_held_back_waits_for_no_other() -> None:
    """Two microbatches with one long step after another do not keep a short one waiting for ever."""
    seconds = {(0, LONG): 100.0, (1, LONG): 90.0}
    stepper = ClockedStepper([plan_of([0])], seconds)
    scheduler, diary = made(stepper, SchedulerConfig())
    run(scheduler, *(Job(n, (LONG,) * 6) for n in "ab"), Job("short", (SHORT,) * 60))

    assert "short" == diary.finished_jobs[0]


def test_a_lost_devices_requests_start_anew_elsewhere() -> None:
    """They go ahead of those that wait, on the lane that is left; nobody is lost."""
    stepper = ClockedStepper([plan_of([0], [1])])
    stepper.lose(0.5, "d0")
    scheduler, diary = made(stepper)
    run(scheduler, *jobs_of(8, SHORT, SHORT))

    assert 8 == len(set(diary.finished_jobs))
    assert ["0", "2"] == diary.retries
    assert {"0", "2"} <= set(diary.finished_jobs[:4])
    assert ["-d0"] == diary.devices
    assert {1} == {lane for _, lane in stepper.openings[4:]}


def test_a_request_fails_when_it_was_lost_too_often() -> None:
    """Its tries are counted; the message names the device."""
    stepper = ClockedStepper([plan_of([0])])
    for at_s in (0.5, 2.5):
        stepper.lose(at_s, "d0", at_s + 1.0)
    scheduler, diary = made(stepper, SchedulerConfig(max_retries=1))
    run(scheduler, *jobs_of(1, SHORT, SHORT))

    assert ["0"] == diary.retries
    assert "device d0: it is gone" in diary.failures["0"]


def test_a_wrong_guess_is_not_counted() -> None:
    """A device that was blamed without proof costs no try."""
    stepper = ClockedStepper([plan_of([0])])
    for at_s in (0.5, 2.5, 4.5):
        stepper.lose(at_s, "d0", at_s + 1.0, is_certain=False)
    scheduler, diary = made(stepper, SchedulerConfig(max_retries=1))
    run(scheduler, *jobs_of(1, SHORT, SHORT))

    assert ["0"] * 3 == diary.retries
    assert ["0"] == diary.finished_jobs


def test_requests_wait_while_a_device_is_tried_again() -> None:
    """No lane is open, but one will be."""
    stepper = ClockedStepper([plan_of([0, 1])])
    stepper.lose(0.5, "d1", 60.0)
    scheduler, diary = made(stepper)
    run(scheduler, *jobs_of(6))

    assert [str(n) for n in range(6)] == sorted(diary.finished_jobs)
    assert 60.0 == stepper.starts[4][0]
    assert "" == scheduler.failure


def test_nothing_to_wait_for_is_told_once_and_clearly() -> None:
    """The device that every lane needs is given up: all who are there fail, and so do those who come."""
    stepper = ClockedStepper([plan_of([0, 1], [1, 0])])
    stepper.lose(0.5, "d0", 99.0)
    stepper.lose(0.6, "d1")
    scheduler, diary = made(stepper)
    run(scheduler, *jobs_of(6))
    run(scheduler, Job("late"))

    assert {*map(str, range(6)), "late"} == set(diary.failures)
    assert {"no lane avoids d1: device d1: it is gone"} == set(diary.failures.values())


def test_a_device_that_is_back_is_used_again_under_full_load() -> None:
    """Microbatches that were opened without it are renewed one after another."""
    stepper = ClockedStepper([plan_of([0], [1], microbatches=2)])
    stepper.lose(0.5, "d0", 3.0)
    scheduler, _ = made(stepper, SchedulerConfig(patience=math.inf), rows=2)
    run(scheduler, *jobs_of(40, SHORT, SHORT))
    after = [lane for _, lane in stepper.openings[2:]]

    assert 1 == after[0]
    assert 0 in after


def test_other_plans_are_taken_up_by_and_by() -> None:
    """What is open goes on along its lane; what is opened next follows the new plan of the same name."""
    plans = [plan_of([0], microbatches=2), replace(plan_of([0], microbatches=2), policy="other")]
    stepper = ClockedStepper(plans)
    scheduler, diary = made(stepper)
    scheduler.switch(1)
    for job in jobs_of(4, SHORT, SHORT):
        scheduler.push(job)
    scheduler.round(None)
    scheduler.load([replace(plan_of([1], microbatches=2), policy=plan.policy) for plan in plans])
    while not scheduler.is_idle:
        scheduler.round(None)

    assert "other" == scheduler.plan.policy
    assert 4 == len(diary.finished_jobs)
    assert [1, 1, 3, 3] == [lane for _, lane in stepper.openings]


def test_plans_around_a_device_let_waiting_requests_begin() -> None:
    """Every lane needs a device that is gone for long; plans without it come in between."""
    stepper = ClockedStepper([plan_of([0, 1])])
    stepper.lose(0.5, "d1", 1000.0, failures=3)
    scheduler, diary = made(stepper)
    for job in jobs_of(3):
        scheduler.push(job)
    scheduler.round(None)  # seats, starts, and hears of the loss
    assert 3 == len(scheduler.queue)
    scheduler.load([around()])
    while not scheduler.is_idle:
        scheduler.round(None)

    assert 3 == len(diary.finished_jobs)
    assert stepper.now < 10.0


def around() -> Plan:
    """The steps of a lane on two devices, on the first of them alone."""
    plan = plan_of([0, 1])
    lane = plan.lanes[0]
    placement = replace(lane.placement, devices=tuple((0,) * len(step) for step in lane.placement.devices))
    return replace(plan, lanes=(replace(lane, placement=placement),))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends_once_whatever_happens(data: st.DataObject) -> None:
    """Random jobs, losses, returns and switches: each request is finished once, and no lane is kept."""
    plans = [plan_of([0], [1], microbatches=3), replace(plan_of([1], [0], microbatches=2), policy="other")]
    stepper = ClockedStepper(plans)
    for _ in range(data.draw(st.integers(0, 4))):
        at_s = data.draw(st.floats(0.1, 20.0))
        stepper.lose(at_s, data.draw(st.sampled_from(["d0", "d1"])), at_s + data.draw(st.floats(0.1, 5.0)))
    rows = data.draw(st.integers(1, 3))
    scheduler, diary = made(stepper, SchedulerConfig(), rows)
    num = data.draw(st.integers(1, 12))
    for n in range(num):
        scheduler.push(Job(str(n), tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))))
    rounds = 0
    while not scheduler.is_idle:
        scheduler.round(None)
        rounds += 1
        if rounds % 5 == 0:
            scheduler.switch(rounds // 5 % 2)
        assert rounds < 1000

    assert [str(n) for n in range(num)] == sorted(diary.finished_jobs, key=int)
    assert all(sum(shares.open) == 0 for shares in stepper.lanes._shares)
