"""The schedule: what is over soonest goes first, of equals the oldest; lanes have their shares."""

from tessera.execute.lanes import LaneShares
from tessera.execute.schedule import Job, Queue, until_wait
from tessera.ir import Recv, Run, Send


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


def test_a_job_waits_at_its_gate() -> None:
    """It runs up to it, others pass, and it goes on when it is released."""
    queue, gated = Queue(), Job(0, 1, [Run(0), Run(1)], gate=1)
    queue.add(gated)
    assert queue.pick() is gated
    assert range(0, 1) == gated.turn()
    queue.add(Job(1, 2, [Run(0)]))

    assert not gated.is_ready
    passing = queue.pick()
    assert passing is not None
    assert 2 == passing.ticket
    queue.release(1)
    assert queue.pick() is gated
    assert range(1, 2) == gated.turn()


def test_nothing_ready_is_no_job() -> None:
    """A device whose jobs all wait is idle."""
    queue = Queue()
    queue.add(Job(0, 1, [Recv(0)]))

    assert queue.pick() is None


def test_open_microbatches_are_shared_by_rate() -> None:
    """A lane with three times the rate has three of four, and who follows one that ended takes its lane."""
    shares = LaneShares([3.0, 1.0])
    taken = [shares.take() for _ in range(4)]
    shares.give_back(1)

    assert [0, 0, 0, 1] == taken
    assert 1 == shares.take()


def test_a_closed_lane_is_not_taken() -> None:
    """Only those allowed, however far the others are below their share."""
    shares = LaneShares([3.0, 1.0])

    assert [1, 1] == [shares.take([1]) for _ in range(2)]


def test_the_shorter_segment_goes_first() -> None:
    """The ready job that will sooner have to wait is taken, though it is younger."""
    queue = Queue()
    queue.add(Job(0, 1, [Run(0), Run(1)], until_wait_us=(200.0, 100.0)))
    queue.add(Job(1, 2, [Run(0), Recv(0), Run(1)], until_wait_us=(20.0, 900.0, 900.0)))

    job = queue.pick()

    assert job is not None
    assert 2 == job.ticket


def test_a_turn_is_one_launch_with_its_sends() -> None:
    """After a launch and what it sends, others may go first."""
    job = Job(0, 1, [Run(0), Send(0), Run(1), Recv(1), Run(2)])

    assert range(0, 2) == job.turn()
    assert range(2, 3) == job.turn()
    assert not job.turn()


def test_time_until_a_wait_ends_at_receives() -> None:
    """Receives in a row are one place to wait; what follows them counts from there."""
    items = [Run(0), Run(1), Recv(0), Recv(1), Run(2)]

    assert (20.0, 10.0, 10.0, 10.0, 10.0) == until_wait(items, lambda _: 10.0)
