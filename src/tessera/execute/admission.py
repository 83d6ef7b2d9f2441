"""Admission: which request is served next, by which microbatch, and which step goes first.

A step costs about the same however many rows of a microbatch are in use, so requests are packed. A policy
needs some number of microbatches, its width, to keep its devices busy; up to the width, requests are spread
evenly. Each microbatch beyond it slows the others as the plan says, so one more is opened only when enough
requests wait, and it takes only requests for which the earlier ones have no place. It therefore empties and
closes when the load falls. So does a slow one: a lane that runs on what other lanes leave of a device.

An idle microbatch may stay open for what it holds. It counts as closed, but is reused before a new one is
opened. A request that can start from what a microbatch holds goes there rather than to an emptier one, if the
free places outweigh the difference.

After a switch of policy, old microbatches are renewed one by one, the emptiest first: it takes no more
requests and is reopened when its last request has left.

Turns: a step should end within PATIENCE times its time alone. Past that, shorter steps of other microbatches
on the same devices are not started until it has ended; otherwise decode steps could delay a prompt for ever.
A held-back step waits only for steps already late when it was held; this rules out starvation. Running steps
are never stopped. The time alone is the plan's cost of the busiest device, or the least time seen if larger.

Imports no torch.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from tessera.errors import ServiceBusy
from tessera.execute.lanes import LoadedLane
from tessera.ir import Plan

# Share of the best simulated rate that counts as the best.
ENOUGH = 0.95
# Waiting requests per seated request that would take twice as long, before a microbatch beyond the width is
# opened. On an 8B model half of it gives 72 ms a token instead of 51 at 0.95 of capacity; twice as much makes
# requests wait too long.
PER_SEATED = 0.4
# Steps this many times as long as another microbatch's are slow. Weight of the latest step in the mean.
SLOW, LATEST = 2.0, 0.1
T = TypeVar("T")
# A step may take this many times as long as alone.
PATIENCE = 2.0


class Occupancy(Protocol):
    @property
    def num_used(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def takes(self) -> bool: ...


class OpenPlace(Protocol):
    # Breaks ties.
    number: int
    # True if it must be reopened: the policy or the plans have changed.
    is_old: bool
    # True if it is kept open without requests.
    is_idle: bool
    # By step of its lane.
    costs: "tuple[StepCost, ...]"

    @property
    def content(self) -> Occupancy: ...


P = TypeVar("P", bound=OpenPlace)


def width_of(plan: Plan) -> int:
    """Fewest microbatches that nearly reach the plan's best simulated rate."""
    there = [(num, rate) for num, rate in plan.by_microbatches if num <= plan.microbatches]
    best = max((rate for _, rate in there), default=0.0)
    return min((num for num, rate in there if rate >= ENOUGH * best), default=1)


def slowdown_of(plan: Plan) -> Callable[[int], float]:
    """Number of microbatches -> relative slowdown of steps by one more; 0 if the plan does not say."""
    if not plan.by_microbatches:
        return lambda num: 0.0
    nums, rates = zip(*sorted(plan.by_microbatches), strict=True)

    def slowdown(num: int) -> float:
        now, more = np.interp((num, num + 1), nums, rates)
        return max(0.0, float((num + 1) / more * now / num - 1.0))

    return slowdown


def _taking(places: Sequence[P], num_waiting: int) -> list[P]:
    """Microbatches that take requests: all but the old ones to renew now."""
    old = sorted((p for p in places if p.is_old), key=lambda p: (p.content.num_used, p.number))
    taking = [p for p in places if not p.is_old] + old[::-1]  # fullest first
    for index in range(len(old)):
        if index and sum(p.content.num_free for p in taking[:-1]) <= num_waiting:
            break
        taking.pop()
    return taking


def _is_near(place: OpenPlace, emptiest: OpenPlace) -> bool:
    """True if it is not much fuller than the emptiest."""
    fuller = place.content.num_used - emptiest.content.num_used
    return place.is_old == emptiest.is_old and fuller <= place.content.num_free


def _step_s(place: OpenPlace) -> float:
    return max((cost.usual_s or cost.alone_s for cost in place.costs), default=0.0)


def choose(
    places: Sequence[P],
    width: int,
    can_open: bool,
    num_waiting: int,
    slowdown: Callable[[int], float],
    overlap: Callable[[P], int] = lambda place: 0,
) -> P | bool:
    """The open microbatch for the next request; True: open one for it; False: it waits.

    `places` in order of opening; the next request counts as waiting. `overlap`: tokens of the request that a
    microbatch already holds.
    """
    idle = [place for place in places if place.is_idle]
    taking = _taking([place for place in places if not place.is_idle], num_waiting)
    first, others = taking[:width], taking[width:]

    def opened() -> P | bool:
        return max(idle, key=overlap) if idle else True

    if (can_open or idle) and len(first) < width:
        # Below the width, open one before another gets a second request.
        empty = [place for place in first if not place.content.num_used]
        return empty[0] if empty else opened()
    slow_s = SLOW * min(map(_step_s, first), default=0.0)
    others = [place for place in first if _step_s(place) > slow_s] + others
    first = [place for place in first if _step_s(place) <= slow_s]
    ready = [place for place in first if place.content.takes]
    if ready:
        emptiest = min(ready, key=lambda place: (place.is_old, place.content.num_used))
        near = [place for place in ready if _is_near(place, emptiest)]
        return max(near, key=lambda place: (overlap(place), place is emptiest)) if len(near) > 1 else emptiest
    num_free = sum(place.content.num_free for place in first)
    for place in others:
        if num_waiting <= num_free:
            return False
        if place.content.takes:
            return place
        num_free += place.content.num_free
    if num_waiting <= num_free or not (can_open or idle):
        return False
    num_seated = sum(place.content.num_used for place in taking)
    is_worth_it = not taking or num_waiting >= PER_SEATED * num_seated * slowdown(len(taking))
    return opened() if is_worth_it else False


class FairQueue(Generic[T]):
    """Waiting requests: clients take turns, each client's requests in order. Thread-safe.

    Requests that lost their device go first and do not count against the limit. An item is queued at most
    once.
    """

    def __init__(self, max_waiting: int | None = None) -> None:
        self._max_waiting = max_waiting
        self._returned: deque[T] = deque()
        # First client's first item is next.
        self._by_client: dict[str, deque[T]] = {}
        self._num = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._returned) + self._num

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            items = [*self._returned, *(item for own in self._by_client.values() for item in own)]
        return iter(items)

    def push(self, client: str, item: T) -> None:
        """Raises ServiceBusy when too many wait."""
        with self._lock:
            if self._max_waiting is not None and self._num >= self._max_waiting:
                raise ServiceBusy(f"{self._num} requests are already waiting", "Try again later.")
            self._by_client.setdefault(client, deque()).append(item)
            self._num += 1

    def give_back(self, item: T) -> None:
        """Queues a request ahead of new ones."""
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

    def remove(self, client: str, item: T) -> bool:
        with self._lock:
            if item in self._returned:
                self._returned.remove(item)
                return True
            items = self._by_client.get(client)
            if items is None or item not in items:
                return False
            items.remove(item)
            self._num -= 1
            if not items:
                del self._by_client[client]
            return True


@dataclass(slots=True, eq=False)
class StepCost:
    # Device -> seconds of its launches, by the plan's costs.
    busy_s: Mapping[str, float]
    # Time alone: the busiest device's until a run was seen.
    alone_s: float
    # Least time seen; None: not run yet.
    least_s: float | None = None
    # Recent mean, beside other microbatches; 0: not run yet.
    usual_s: float = 0.0

    def seen(self, seconds: float) -> None:
        self.usual_s += (LATEST if self.usual_s else 1.0) * (seconds - self.usual_s)
        if self.least_s is None or seconds < self.least_s:
            self.least_s = seconds
            self.alone_s = max(seconds, max(self.busy_s.values(), default=0.0))


def costs_of(lane: LoadedLane) -> tuple[StepCost, ...]:
    names, found = lane.plan.cluster.names, []
    places = lane.lane.placement.devices
    # Without prices no step counts as late.
    priced = lane.plan.costs or (None,) * len(places)
    for costs, place in zip(priced, places, strict=True):
        busy_s: dict[str, float] = defaultdict(float)
        for launch, device in enumerate(place):
            busy_s[names[device]] += costs.us(launch, device) * 1e-6 if costs is not None else 0.0
        found.append(StepCost(dict(busy_s), max(busy_s.values(), default=0.0)))
    return tuple(found)


class Turns:
    """Running steps, and microbatches held back for late ones."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        # Microbatch -> (due time, time alone, cost)
        self._running: dict[int, tuple[float, float, StepCost]] = {}
        # Held microbatch -> microbatches whose steps must end first.
        self._held: dict[int, set[int]] = {}

    def holds(self, microbatch: int, cost: StepCost, scale: float, now_s: float) -> bool:
        """True if the step must wait; `end` will release it. Else the step counts as started."""
        alone_s = cost.alone_s * scale
        late = [
            other
            for other, (due_s, other_s, its) in self._running.items()
            if due_s < now_s and other_s > alone_s and not its.busy_s.keys().isdisjoint(cost.busy_s)
        ]
        if late:
            self._held[microbatch] = set(late)
            return True
        self.start(microbatch, cost, scale, now_s)
        return False

    def start(self, microbatch: int, cost: StepCost, scale: float, now_s: float) -> None:
        alone_s = cost.alone_s * scale
        self._running[microbatch] = (now_s + self._patience * alone_s, alone_s, cost)

    def end(self, *microbatches: int) -> list[int]:
        """Steps of these have ended or are lost; returns microbatches that may start."""
        for number in microbatches:
            self._running.pop(number, None)
        if not self._held:
            return []
        for number in microbatches:
            self._held.pop(number, None)
        free = []
        for held, by in list(self._held.items()):
            by.difference_update(microbatches)
            if not by:
                del self._held[held]
                free.append(held)
        return free
