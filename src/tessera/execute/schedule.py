"""What runs next: the one scheduling policy, used alike by worker processes and by the simulator.

After every launch a device looks at the jobs that can go on, and takes the one that will be done soonest,
by the modelled times, with what it can do before it must wait for a transfer or ends; of equal ones the
oldest. So a short segment whose result another device waits for is not held up behind a long one: with few
requests in flight, a decode that crosses between devices would otherwise wait for a whole segment of a
prefill at every crossing. A job never waits for a younger one for longer than the younger ones' shorter
segments last; where requests in flight are few and each ends, none waits for ever. A service's microbatches
do not end: there a long job may wait as long as shorter ones keep its device busy. Jobs without modelled
times go by age.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.ir import Recv, Run


@dataclass(slots=True)
class Job:
    """One device's share of one run of a program."""

    microbatch: int
    # Identifies the run; the same on every device.
    ticket: int
    # Instructions, or whatever a simulator puts in their place; only receives and launches are looked at.
    instructions: Sequence[Any]
    position: int = 0
    arrived: set[int] = field(default_factory=set)
    # From each instruction to the next that may wait, or to the end: modelled microseconds; see `until_wait`.
    until_wait_us: Sequence[float] = ()
    # Of that, what is done already; only a simulator stops inside an item of its list.
    spent_us: float = 0.0

    @property
    def left_us(self) -> float:
        """Modelled time until it must wait or ends."""
        return self.until_wait_us[self.position] - self.spent_us if self.until_wait_us else 0.0

    @property
    def is_done(self) -> bool:
        return self.position == len(self.instructions)

    @property
    def is_ready(self) -> bool:
        """True unless the next instruction waits for a transfer that has not arrived."""
        if self.position == len(self.instructions):
            return False
        head = self.instructions[self.position]
        return not isinstance(head, Recv) or head.transfer in self.arrived

    def issue(self) -> Any:
        self.position += 1
        return self.instructions[self.position - 1]

    def turn(self) -> Iterator[Any]:
        """Issues instructions up to the next launch, and what follows it at once; then others may go."""
        has_run = False
        while self.is_ready and not (has_run and isinstance(self.instructions[self.position], (Run, Recv))):
            instruction = self.issue()
            has_run = has_run or isinstance(instruction, Run)
            yield instruction


def until_wait(instructions: Sequence[Any], duration_us: Callable[[Any], float]) -> tuple[float, ...]:
    """For every position of a list: the time until the next receive after it, or until the end.

    Several receives in a row are one place to wait: at each of them, what follows the last counts.
    """
    found: list[float] = []
    total, is_waiting = 0.0, False
    for instruction in reversed(instructions):
        if isinstance(instruction, Recv):
            is_waiting = True
        else:
            total = duration_us(instruction) + (0.0 if is_waiting else total)
            is_waiting = False
        found.append(total)
    return tuple(reversed(found))


class Queue:
    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}  # ticket -> job, oldest first
        self._early: dict[int, set[int]] = {}  # transfers that came before their job
        self._awake: dict[int, Job] = {}  # those that may be able to go on; the others wait for a transfer

    def add(self, job: Job) -> None:
        """Takes a job; transfers that came before it count as arrived."""
        job.arrived |= self._early.pop(job.ticket, set())
        self._jobs[job.ticket] = self._awake[job.ticket] = job

    def deliver(self, ticket: int, transfer: int) -> Job | None:
        """A transfer of a run has arrived; gives the job that it is for, None if that is yet to come."""
        job = self._jobs.get(ticket)
        if job is None:
            self._early.setdefault(ticket, set()).add(transfer)
        else:
            job.arrived.add(transfer)
            self._awake[ticket] = job
        return job

    def pick(self) -> Job | None:
        """Of the jobs that can go on, the one with the least to do until it waits; None if all wait."""
        # What `is_ready` and `left_us` say, written out: simulations ask this millions of times.
        best: Job | None = None
        least = 0.0
        asleep: list[int] = []
        for job in self._awake.values():
            at = job.position
            if at == len(job.instructions):
                asleep.append(job.ticket)
                continue
            kind = type(head := job.instructions[at])
            if kind is Recv and head.transfer not in job.arrived:
                asleep.append(job.ticket)
                continue
            left = job.until_wait_us[at] - job.spent_us if job.until_wait_us else 0.0
            if best is None or left < least or (left == least and job.ticket < best.ticket):
                best, least = job, left
        if asleep:
            for ticket in asleep:
                del self._awake[ticket]
        return best

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def drop(self, ticket: int) -> None:
        del self._jobs[ticket]
        self._awake.pop(ticket, None)

    def __len__(self) -> int:
        return len(self._jobs)
