"""What runs next: the one scheduling policy, used alike by worker processes and by the simulator.

A device keeps the jobs it was given, oldest first. It takes the oldest whose next instruction is ready and
runs it until that job must wait for a transfer or ends; then it looks again from the oldest. An older
request thus never waits for a younger one for longer than one such stretch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.ir import Lane, Recv


@dataclass(slots=True)
class Job:
    """One device's share of one run of a program."""

    slot: int
    # Identifies the run; the same on every device.
    ticket: int
    # Instructions, or whatever a simulator puts in their place; only receives are looked at here.
    instructions: Sequence[Any]
    position: int = 0
    arrived: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """True when every instruction has been issued."""
        return self.position == len(self.instructions)

    @property
    def is_ready(self) -> bool:
        """True unless the next instruction waits for a transfer that has not arrived."""
        if self.is_done:
            return False
        head = self.instructions[self.position]
        return not isinstance(head, Recv) or head.transfer in self.arrived

    def issue(self) -> Any:
        """The next instruction, which is issued now."""
        self.position += 1
        return self.instructions[self.position - 1]


class Queue:
    """The jobs of one device."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}  # ticket -> job, oldest first
        self._early: dict[int, set[int]] = {}  # transfers that came before their job

    def add(self, job: Job) -> None:
        """Takes a job; transfers that came before it count as arrived."""
        job.arrived |= self._early.pop(job.ticket, set())
        self._jobs[job.ticket] = job

    def deliver(self, ticket: int, transfer: int) -> None:
        """A transfer of a run has arrived."""
        if ticket in self._jobs:
            self._jobs[ticket].arrived.add(transfer)
        else:
            self._early.setdefault(ticket, set()).add(transfer)

    def pick(self) -> Job | None:
        """The oldest job that can go on, or None if all wait."""
        return next((job for job in self._jobs.values() if job.is_ready), None)

    def drop(self, ticket: int) -> None:
        """Forgets a finished job."""
        del self._jobs[ticket]

    def __len__(self) -> int:
        return len(self._jobs)


class LaneTable:
    """Which lane the next request takes: the one furthest behind its share.

    A lane's share of the requests is its rate's share of all rates. A lane that already holds more than its
    share of the slots (rounded up) is passed over, so that one slow lane cannot swallow every slot.
    """

    def __init__(self, lanes: Sequence[Lane], slots: int) -> None:
        total = sum(lane.rate_per_s for lane in lanes)
        self._share = [lane.rate_per_s / total for lane in lanes]
        self._cap = [max(1, -int(-slots * share // 1)) for share in self._share]
        self._started = [0] * len(lanes)
        self._running = [0] * len(lanes)

    def take(self) -> int:
        """Chooses a lane for one request."""
        free = [i for i, cap in enumerate(self._cap) if self._running[i] < cap]
        lanes = free or range(len(self._cap))
        lane = min(lanes, key=lambda i: ((self._started[i] + 1) / self._share[i], i))
        self._started[lane] += 1
        self._running[lane] += 1
        return lane

    def give_back(self, lane: int) -> None:
        """A request of this lane has finished."""
        self._running[lane] -= 1
