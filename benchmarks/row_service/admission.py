"""RowScheduler: which of several open microbatches of rows takes the next request.

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
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from tessera.execute.admission import StepCost, costs_of
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Content, Microbatch, Scheduler
from tessera.execute.stepper import Event
from tessera.ir import Plan

R = TypeVar("R")
# Weight of the newest time in the mean.
LATEST = 0.1
# Share of the best simulated rate that counts as the best.
ENOUGH = 0.95
# Waiting requests per seated request that would take twice as long, before a microbatch beyond the width is
# opened. On an 8B model half of it gives 72 ms a token instead of 51 at 0.95 of capacity; twice as much makes
# requests wait too long.
PER_SEATED = 0.4
# Steps this many times as long as another microbatch's are slow.
SLOW = 2.0


class RowContent(Content[R], Protocol[R]):
    """Rows of requests; by default nothing is held or moved."""

    # Places.
    rows: int

    @property
    def num_free(self) -> int:
        """Number of requests that it has room for."""

    def overlap(self, request: R) -> int:
        """Tokens of a request that it already holds."""
        return 0

    @property
    def can_move(self) -> bool:
        """True if its requests can restart elsewhere at little cost."""
        return False


class Occupancy(Protocol):
    @property
    def num_used(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def takes(self) -> bool: ...


@dataclass(slots=True, eq=False)
class UsualCost(StepCost):
    """With the recent mean, beside other microbatches."""

    usual_s: float = 0.0

    def seen(self, seconds: float) -> None:
        self.usual_s += (LATEST if self.usual_s else 1.0) * (seconds - self.usual_s)
        StepCost.seen(self, seconds)


class OpenPlace(Protocol):
    # Breaks ties.
    number: int
    # True if it must be reopened: the policy or the plans have changed.
    is_old: bool
    # True if it is kept open without requests.
    is_idle: bool
    # By step of its lane.
    costs: tuple[UsualCost, ...]

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


class RowScheduler(Scheduler[R]):
    """A scheduler whose microbatches take requests while others run."""

    _width: int
    _slowdown: Callable[[int], float]

    def load(self, plans: Sequence[Plan]) -> None:
        """Loads other plans; the policy of the same name stays current, else the first."""
        name = self.plan.policy
        self.stepper.load(plans)
        names = [plan.policy for plan in self.stepper.plans]
        self.policy = names.index(name) if name in names else 0
        self._renew()
        self._fail_without_lanes()

    def round(self, timeout_s: float | None) -> Event | None:
        """Seats, starts, waits and settles; returns the event, None after the timeout or a wake.

        Without a timeout it does not wait when idle.
        """
        self.begin()
        return None if timeout_s is None and self.is_idle else self.wait(timeout_s)

    def _measure(self) -> None:
        super()._measure()
        self._width, self._slowdown = width_of(self.plan), slowdown_of(self.plan)

    def _costs_of(self, lane: LoadedLane) -> tuple[StepCost, ...]:
        if lane.number not in self._costs:
            costs = costs_of(lane)
            self._costs[lane.number] = tuple(UsualCost(cost.devices, cost.alone_s) for cost in costs)
        return self._costs[lane.number]

    def _seat_next(self) -> bool:
        places: tuple[Any, ...] = tuple(self.microbatches.values())
        can_open, wanted = self._num_openable() > 0, self.queue.peek()

        def overlap(place: Microbatch[R]) -> int:
            return 0 if wanted is None else _rows(place).overlap(wanted)

        found = choose(places, self._width, can_open, len(self.queue), self._slowdown, overlap)
        if found is False:
            return False
        lane = None
        if found is True:
            lane = self.stepper.lanes.take(self.policy)
            if lane is None:  # wait for a device; seated requests continue
                return False
        request = self.queue.pop()
        if request is None:  # removed by another thread
            if lane is not None:
                self.stepper.lanes.give_back(lane.number)
            return False
        if lane is not None:
            self._open(lane, request)
        else:
            assert not isinstance(found, bool)
            found.content.add(request)
            self._wake_up(found)
            self._watcher.seated(request, found)
        return True

    def _has_places(self, old: Microbatch[R]) -> bool:
        """True if all its requests can begin in other microbatches of the current policy."""
        places = self.microbatches.values()
        free = sum(_rows(place).num_free for place in places if not place.is_old)
        more = self._num_openable(1) if self.stepper.lanes.open(self.policy) else 0
        return 0 < old.content.num_used <= free + more * _rows(old).rows

    def _num_openable(self, num_closed: int = 0) -> int:
        """Microbatches of the current policy that may be opened, after `num_closed` old ones.

        Memory holds as many as the widest plan has, so old ones may go on beside new ones.
        """
        num_old = sum(microbatch.is_old for microbatch in self.microbatches.values())
        most = max(plan.microbatches for plan in self.stepper.plans) if num_old else self._depth
        left = max(most, self._depth) - len(self.microbatches) + num_closed
        return max(0, min(left, self._depth - (len(self.microbatches) - num_old)))

    def _leave_old(self, microbatch: Microbatch[R]) -> bool:
        """Closes an old microbatch if its requests can restart: they go to the front of the queue."""
        if not (_rows(microbatch).can_move and self._has_places(microbatch)):
            return False
        self.stepper.close(microbatch.number)
        self._close(microbatch)
        for request in microbatch.content.requests():
            self.queue.give_back(request)
            self._watcher.moved(request)
        return True


def _rows(microbatch: Microbatch[R]) -> RowContent[R]:
    return cast("RowContent[R]", microbatch.content)
