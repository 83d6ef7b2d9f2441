"""Scheduling on one device: the one policy of workers and the simulator.

After every launch a device takes the ready job with the least modelled time until it must wait for a transfer
or ends; the oldest of equals. So a short segment that another device waits for, such as a decode, is not held
up behind a long one. A job waits for younger ones at most as long as their shorter segments last;
`admission.Turns` bounds that in a service. Jobs without modelled times go by age.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.ir import Recv, Run


@dataclass(slots=True)
class Job:
    microbatch: int
    # Identifies the run; the same on every device.
    ticket: int
    instructions: Sequence[Any]
    position: int = 0
    arrived: set[int] = field(default_factory=set)
    until_wait_us: Sequence[float] = ()
    # Only a simulator stops inside an item.
    spent_us: float = 0.0
    # Position where it waits until `Queue.release`.
    gate: int = -1

    @property
    def left_us(self) -> float:
        return self.until_wait_us[self.position] - self.spent_us if self.until_wait_us else 0.0

    @property
    def is_done(self) -> bool:
        return self.position == len(self.instructions)

    @property
    def is_ready(self) -> bool:
        """True unless the next instruction waits for a transfer, or at the gate."""
        if self.position in (len(self.instructions), self.gate):
            return False
        head = self.instructions[self.position]
        return not isinstance(head, Recv) or head.transfer in self.arrived

    def issue(self) -> Any:
        self.position += 1
        return self.instructions[self.position - 1]

    def turn(self) -> range:
        """Takes instructions up to the next launch and what directly follows it; their positions."""
        start, has_run = self.position, False
        while self.is_ready and not (has_run and isinstance(self.instructions[self.position], (Run, Recv))):
            has_run |= isinstance(self.issue(), Run)
        return range(start, self.position)


def until_wait(instructions: Sequence[Any], duration_us: Callable[[Any], float]) -> tuple[float, ...]:
    """For every position: the time until the next receive after it, or until the end.

    Consecutive receives are one wait: at each of them, what follows the last counts.
    """
    times_us: list[float] = []
    total, is_waiting = 0.0, False
    for instruction in reversed(instructions):
        if isinstance(instruction, Recv):
            is_waiting = True
        else:
            total = duration_us(instruction) + (0.0 if is_waiting else total)
            is_waiting = False
        times_us.append(total)
    return tuple(reversed(times_us))


class Queue:
    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._early: dict[int, set[int]] = {}  # transfers that came before their job
        self._awake: dict[int, Job] = {}  # may be ready; the others wait for a transfer

    def add(self, job: Job) -> None:
        job.arrived |= self._early.pop(job.ticket, set())
        self._jobs[job.ticket] = self._awake[job.ticket] = job

    def deliver(self, ticket: int, transfer: int) -> Job | None:
        job = self._jobs.get(ticket)
        if job is None:
            self._early.setdefault(ticket, set()).add(transfer)
        else:
            job.arrived.add(transfer)
            self._awake[ticket] = job
        return job

    def release(self, ticket: int) -> None:
        job = self._awake[ticket] = self._jobs[ticket]
        job.gate = -1

    def pick(self) -> Job | None:
        """None if all wait."""
        # `is_ready` and `left_us` inlined: simulations call this millions of times.
        best: Job | None = None
        least = 0.0
        asleep: list[int] = []
        for job in self._awake.values():
            at = job.position
            if at == len(job.instructions) or at == job.gate:
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
