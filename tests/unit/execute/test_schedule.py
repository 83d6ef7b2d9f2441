"""The schedule: oldest ready job first, requests shared among lanes by rate."""

from tessera.execute.schedule import Job, LaneTable, Queue, until_wait
from tessera.ir import Lane, Placement, Recv, Run, Send

ANYWHERE = Placement(((0,),))


def make_table(rates: list[float], slots: int) -> LaneTable:
    """A lane per rate."""
    return LaneTable([Lane(ANYWHERE, rate) for rate in rates], slots)


def test_the_oldest_job_goes_first() -> None:
    """A younger job that is ready does not overtake an older one that is too."""
    queue = Queue()
    queue.add(Job(0, 1, [Run(0)]))
    queue.add(Job(1, 2, [Run(0)]))

    job = queue.pick()

    assert job is not None
    assert 1 == job.ticket


def test_a_waiting_job_lets_a_younger_one_pass() -> None:
    """While the older job waits for a transfer, the device does other work."""
    queue = Queue()
    queue.add(Job(0, 1, [Recv(0), Run(0)]))
    queue.add(Job(1, 2, [Run(0)]))

    job = queue.pick()

    assert job is not None
    assert 2 == job.ticket


def test_a_transfer_may_arrive_before_its_job() -> None:
    """A peer may send before this device has heard of the run."""
    queue = Queue()
    queue.deliver(1, 0)
    queue.add(Job(0, 1, [Recv(0)]))

    assert queue.pick() is not None


def test_nothing_ready_is_no_job() -> None:
    """A device whose jobs all wait is idle."""
    queue = Queue()
    queue.add(Job(0, 1, [Recv(0)]))

    assert queue.pick() is None


def test_requests_are_shared_by_rate() -> None:
    """A lane with three times the rate gets three times the requests."""
    table = make_table([3.0, 1.0], slots=4)
    taken = []
    for _ in range(40):
        taken.append(table.take())
        table.give_back(taken[-1])

    assert 30 == taken.count(0)


def test_a_slow_lane_cannot_fill_every_slot() -> None:
    """With nothing finishing, slots are filled in proportion to the rates."""
    table = make_table([1.0, 1.0], slots=4)

    assert [0, 0, 1, 1] == sorted(table.take() for _ in range(4))


def test_the_shorter_stretch_goes_first() -> None:
    """Of two ready jobs, the one that will sooner have to wait is taken, though it is younger."""
    queue = Queue()
    queue.add(Job(0, 1, [Run(0), Run(1)], until_wait_us=(200.0, 100.0)))
    queue.add(Job(1, 2, [Run(0), Recv(0), Run(1)], until_wait_us=(20.0, 900.0, 900.0)))

    job = queue.pick()

    assert job is not None
    assert 2 == job.ticket


def test_a_turn_is_one_launch_with_its_sends() -> None:
    """After a launch and what it sends, others may go first."""
    job = Job(0, 1, [Run(0), Send(0), Run(1), Recv(1), Run(2)])

    assert [Run(0), Send(0)] == list(job.turn())
    assert [Run(1)] == list(job.turn())
    assert [] == list(job.turn())


def test_time_until_a_wait_ends_at_receives() -> None:
    """Receives in a row are one place to wait; what follows them counts from there."""
    items = [Run(0), Run(1), Recv(0), Recv(1), Run(2)]

    assert (20.0, 10.0, 10.0, 10.0, 10.0) == until_wait(items, lambda _: 10.0)


def test_a_slot_keeps_its_lane_while_shares_allow() -> None:
    """The lane that has just ended is taken again, until it is too far ahead."""
    table = make_table([1.0, 1.0], slots=2)
    first = [table.take(), table.take()]
    table.give_back(1)

    assert [0, 1] == first
    assert 1 == table.take()
