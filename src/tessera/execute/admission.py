"""Admission: which request is served next, and which step goes first.

Turns: a step should end within PATIENCE times its time alone. Past that, shorter steps of other microbatches
on its devices wait for its end, else decode steps could delay a prompt for ever. A held step waits only for
steps already late when it was held: none starves. The time alone is the plan's cost of the busiest device, or
the least time seen if larger.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from tessera.errors import ServiceBusy
from tessera.execute.lanes import LoadedLane

T = TypeVar("T")
PATIENCE = 2.0


class FairQueue(Generic[T]):
    """Waiting requests: clients take turns, each client's requests in order. Thread-safe.

    Requests that lost their device go first and do not count against the limit. An item is queued at most
    once.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self._max_waiting = max_waiting
        self._returned: deque[T] = deque()
        self._by_client: dict[str, deque[T]] = {}
        self._num = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._returned) + self._num

    def push(self, client: str, item: T) -> None:
        with self._lock:
            if self._max_waiting is not None and self._num >= self._max_waiting:
                raise ServiceBusy(f"{self._num} requests are already waiting", "Try again later.")
            self._by_client.setdefault(client, deque()).append(item)
            self._num += 1

    def give_back(self, item: T) -> None:
        with self._lock:
            self._returned.append(item)

    def peek(self) -> T | None:
        with self._lock:
            items = self._returned or next(iter(self._by_client.values()), deque())
            return items[0] if items else None

    def pop(self) -> T | None:
        with self._lock:
            if self._returned:
                return self._returned.popleft()
            client = next(iter(self._by_client), None)
            if client is None:
                return None
            items = self._by_client.pop(client)
            self._num -= 1
            item = items.popleft()
            if items:
                self._by_client[client] = items
            return item

    def remove(self, client: str, item: T) -> None:
        with self._lock:
            if item in self._returned:
                self._returned.remove(item)
            elif (items := self._by_client.get(client)) is not None and item in items:
                items.remove(item)
                self._num -= 1
                if not items:
                    del self._by_client[client]


@dataclass(slots=True, eq=False)
class StepCost:
    devices: frozenset[str]
    modelled_s: float
    least_s: float = 0.0

    @property
    def alone_s(self) -> float:
        return max(self.least_s, self.modelled_s)

    def seen(self, seconds: float) -> None:
        self.least_s = min(seconds, self.least_s or seconds)


def costs_of(lane: LoadedLane) -> tuple[StepCost, ...]:
    """Without costs no step counts as late."""
    plan, names, steps = lane.plan, lane.plan.cluster.names, list[StepCost]()
    for step, place in enumerate(lane.lane.placement.devices):
        busiest_us = max(plan.costs[step].busy_us(place)) if plan.costs else 0.0
        steps.append(StepCost(frozenset(names[device] for device in place), busiest_us * 1e-6))
    return tuple(steps)


class Turns:
    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        # Microbatch -> (due time, time alone, cost)
        self._running: dict[int, tuple[float, float, StepCost]] = {}
        # Held microbatch -> microbatches whose steps must end first.
        self._held: dict[int, set[int]] = {}

    def holds(self, microbatch: int, cost: StepCost, scale: float, now_s: float) -> bool:
        """True if the step must wait; `end` will release it."""
        alone_s = cost.alone_s * scale
        late = [
            other
            for other, (due_s, other_s, its) in self._running.items()
            if due_s < now_s and other_s > alone_s and not its.devices.isdisjoint(cost.devices)
        ]
        if late:
            self._held[microbatch] = set(late)
        return bool(late)

    def start(self, microbatch: int, cost: StepCost, scale: float, now_s: float) -> None:
        alone_s = cost.alone_s * scale
        self._running[microbatch] = (now_s + self._patience * alone_s, alone_s, cost)

    def end(self, *microbatches: int) -> list[int]:
        """Steps of these have ended or are lost; returns microbatches that may start."""
        for number in microbatches:
            self._running.pop(number, None)
            self._held.pop(number, None)
        free = []
        for held, by in list(self._held.items()):
            by.difference_update(microbatches)
            if not by:
                del self._held[held]
                free.append(held)
        return free
