"""Scheduler: decides what a stepper does next, for runs, services and simulations.

    scheduler = Scheduler(stepper, make)            # make(number, lane) -> Content of a microbatch
    scheduler.push(request, client)                 # any thread
    while ...: scheduler.begin(), scheduler.wait(timeout_s)           # one thread

Only `Content` knows prompts, rows or tokens. Between two steps of a microbatch its devices wait for this
loop; where no other microbatches fill that gap, the next step is queued while one runs. A switch of policy,
new plans and a returned device renew microbatches one by one. `serve.router` replaces the methods that decide
where requests go.

Requests of a lost device go to the front of the queue and restart from what they have on any open lane; a
request fails after `max_retries` losses, those blamed without proof not counted. While no lane is open,
requests wait as long as a lost device is retried; else all fail with one message.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from tessera.execute.admission import PATIENCE, FairQueue, StepCost, Turns, costs_of
from tessera.execute.lanes import LoadedLane
from tessera.execute.stepper import DeviceBack, DeviceLost, Event, Moved, StepCall, StepDone, Stepper, Tensors
from tessera.ir import Plan

R = TypeVar("R")


class Content(Protocol[R]):
    """The requests of an open microbatch; the first is added before any step."""

    @property
    def num_used(self) -> int:
        """Number of requests."""

    @property
    def takes(self) -> bool:
        """True if it takes another request."""

    @property
    def is_kept(self) -> bool:
        """True if it stays open without requests."""
        return False

    def add(self, request: R) -> None:
        """A request begins, or restarts from what it has."""

    def state(self) -> Tensors | None:
        """Initial state, asked after the first request was added; None: zeros."""
        return None

    @property
    def can_look_ahead(self) -> bool:
        """True if it can name a step before the running one has ended."""
        return False

    def next_step(self) -> StepCall | None:
        """The step to run next; None if there is none."""

    def late_inputs(self) -> Tensors:
        """Late inputs of its only running step."""
        return {}

    def end(self, done: StepDone) -> Sequence[R]:
        """The oldest named step has ended; returns the requests that leave."""

    def requests(self) -> list[R]:
        """Asked when its device was lost or when they move."""


@dataclass(slots=True, eq=False)
class Microbatch(Generic[R]):
    number: int
    lane: LoadedLane
    content: Content[R]
    # The current plan and the lost devices when it was opened.
    plan: Plan
    without: frozenset[str]
    costs: tuple[StepCost, ...]
    # It must be reopened.
    is_old: bool = False
    # The first runs, others are queued.
    running: deque[StepCall] = field(default_factory=deque)
    held: StepCall | None = None
    # Kept open without requests.
    is_idle: bool = False


class Watcher(Generic[R]):
    def seated(self, request: R, microbatch: "Microbatch[R]") -> None:
        """The request has a place."""

    def stepped(self, microbatch: "Microbatch[R]", done: StepDone) -> None:
        """Called after its content was updated."""

    def finished(self, request: R) -> None:
        """The request has left."""

    def failed(self, request: R, message: str) -> None:
        """The request was removed."""

    def retried(self, request: R, lost: DeviceLost) -> None:
        """The request waits again, to restart."""

    def moved(self, request: R) -> None:
        """The request left a renewed microbatch and waits, to restart."""

    def lost(self, lost: DeviceLost) -> None:
        """Called before requests are retried."""

    def back(self, back: DeviceBack) -> None:
        """The device can be used again."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_waiting: int | None = None
    # Most open microbatches; None: the plan's number.
    depth: int | None = None
    max_retries: int | None = None
    # Factor on a step's time alone after which shorter steps wait for it.
    patience: float = PATIENCE


class Scheduler(Generic[R]):
    """`push` is thread-safe; everything else is for one thread."""

    def __init__(
        self,
        stepper: Stepper,
        make: Callable[[int, LoadedLane], Content[R]],
        config: SchedulerConfig | None = None,
        watcher: Watcher[R] | None = None,
    ) -> None:
        self.stepper, self._make = stepper, make
        self._config = config or SchedulerConfig()
        self._watcher: Watcher[R] = watcher or Watcher()
        self.queue: FairQueue[R] = FairQueue(self._config.max_waiting)
        self.microbatches: dict[int, Microbatch[R]] = {}
        self.lost: dict[str, DeviceLost] = {}
        self.failure = ""
        self.policy, self.plan = 0, stepper.plans[0]
        self._retries: dict[R, int] = {}
        self._turns = Turns(self._config.patience)
        self._costs: dict[int, tuple[StepCost, ...]] = {}
        self._ready: list[Microbatch[R]] = []
        # False if nothing changed since no request could be seated.
        self._may_seat = True
        self._measure()

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and only kept microbatches are open."""
        return not self.queue and all(m.is_idle for m in self.microbatches.values())

    def push(self, request: R, client: str = "") -> None:
        """Raises ServiceBusy if too many wait. Other threads must then wake the stepper."""
        self.queue.push(client, request)
        self._may_seat = True

    def switch(self, policy: int) -> None:
        self.policy = policy
        self._renew()

    def close_idle(self) -> None:
        for microbatch in self.microbatches.values():
            microbatch.is_old |= microbatch.is_idle
        self._close_old()

    def begin(self) -> None:
        while True:
            if self._may_seat and self.queue:
                self._may_seat = False
                if self.failure:
                    self._fail_waiting()
                while self.queue and self._seat_next():
                    pass
            if not self._ready:
                return
            ready, self._ready = self._ready, []
            for microbatch in ready:
                self._start(microbatch)

    def wait(self, timeout_s: float | None) -> Event | None:
        event = self.stepper.take(timeout_s)
        if event is None:
            return None
        if isinstance(event, StepDone):
            self._settle(event)
        elif isinstance(event, DeviceLost):
            self._lose(event)
        elif isinstance(event, DeviceBack):
            self._device_back(event)
        else:
            self._moved(event)
        return event

    def drain(self, timeout_s: float) -> None:
        """Waits for running steps and closes every microbatch; drops all requests."""
        while self.queue.pop() is not None:
            pass
        self._ready = []
        until_s = self.stepper.now_s() + timeout_s
        while any(m.running for m in self.microbatches.values()):
            left_s = until_s - self.stepper.now_s()
            if left_s <= 0.0:
                return
            event = self.stepper.take(left_s)
            if isinstance(event, StepDone):
                self.microbatches[event.microbatch].running.popleft()
            elif isinstance(event, DeviceLost):
                for number in event.microbatches:
                    self._close(self.microbatches[number])
        for microbatch in list(self.microbatches.values()):
            self.stepper.close(microbatch.number)
            self._close(microbatch)

    def _seat_next(self) -> bool:
        lane = self.stepper.lanes.take(self.policy) if len(self.microbatches) < self._depth else None
        if lane is None:  # all are open, or wait for a device
            return False
        request = self.queue.pop()
        if request is None:  # removed by another thread
            self.stepper.lanes.give_back(lane.number)
            return False
        self._open(lane, request)
        return True

    def _free_numbers(self, lane: LoadedLane) -> Iterator[int]:
        return (number for number in lane.microbatches if number not in self.microbatches)

    def _wake_up(self, microbatch: Microbatch[R]) -> None:
        if microbatch.is_idle:
            microbatch.is_idle = False
            self._ready.append(microbatch)

    def _open(self, lane: LoadedLane, request: R | None = None) -> Microbatch[R]:
        number = next(self._free_numbers(lane))
        costs = self._costs_of(lane)
        lost = self.stepper.lanes.lost
        without = frozenset(lost) if lost else frozenset()
        content = self._make(number, lane)
        opened = Microbatch(number, lane, content, self.plan, without, costs)
        self.microbatches[number] = opened
        if request is not None:
            content.add(request)
        self.stepper.open(number, lane.number, content.state())
        self._ready.append(opened)
        if request is not None:
            self._watcher.seated(request, opened)
        return opened

    def _costs_of(self, lane: LoadedLane) -> tuple[StepCost, ...]:
        if lane.number not in self._costs:
            self._costs[lane.number] = costs_of(lane)
        return self._costs[lane.number]

    def _close(self, microbatch: Microbatch[R]) -> None:
        del self.microbatches[microbatch.number]
        self.stepper.lanes.give_back(microbatch.lane.number)
        self._may_seat = True

    def _can_close(self, microbatch: Microbatch[R]) -> bool:
        return True

    def _start(self, microbatch: Microbatch[R]) -> None:
        if microbatch.running:
            if len(microbatch.running) == 1 and microbatch.running[0].is_open:
                microbatch.running[0] = replace(microbatch.running[0], is_open=False)
                self.stepper.give(microbatch.number, microbatch.content.late_inputs())
            if self._can_look_ahead(microbatch) and (call := microbatch.content.next_step()) is not None:
                microbatch.running.append(call)
                self.stepper.start(call)
            return
        if microbatch.is_old and self._leave_old(microbatch):
            return
        call = microbatch.content.next_step()
        if call is None:
            content = microbatch.content
            is_kept = content.is_kept and not microbatch.is_old
            microbatch.is_idle = is_kept or content.num_used > 0 or not self._can_close(microbatch)
            if not microbatch.is_idle:
                self.stepper.close(microbatch.number)
                self._close(microbatch)
            return
        cost = microbatch.costs[call.step]
        if self._turns.holds(microbatch.number, cost, call.scale, self.stepper.now_s()):
            microbatch.held = call
            return
        self._run(microbatch, call)

    def _run(self, microbatch: Microbatch[R], call: StepCall) -> None:
        self._count(microbatch, call)
        microbatch.running.append(call)
        self.stepper.start(call)
        if microbatch.content.can_look_ahead:
            self._ready.append(microbatch)

    def _can_look_ahead(self, microbatch: Microbatch[R]) -> bool:
        """True if nothing is queued and too few other microbatches keep its devices busy."""
        devices, others = microbatch.lane.devices, self.microbatches.values()
        return (
            len(microbatch.running) == 1
            and not microbatch.is_old
            and microbatch.content.can_look_ahead
            and self.stepper.can_queue(microbatch.number)
            and sum(1 for m in others if not m.is_idle and m.lane.devices & devices) <= len(devices)
        )

    def _leave_old(self, microbatch: Microbatch[R]) -> bool:
        """Hook: closes an old microbatch if its requests can go on elsewhere."""
        return False

    def _moved(self, event: Moved) -> None:
        """Nothing moves here."""

    def _free(self, *numbers: int) -> None:
        for held in self._turns.end(*numbers):
            microbatch = self.microbatches[held]
            call, microbatch.held = microbatch.held, None
            assert call is not None, "a held-back microbatch has a step"
            self._run(microbatch, call)

    def _count(self, microbatch: Microbatch[R], call: StepCall) -> None:
        cost = microbatch.costs[call.step]
        self._turns.start(microbatch.number, cost, call.scale, self.stepper.now_s())

    def _settle(self, done: StepDone) -> None:
        microbatch = self.microbatches[done.microbatch]
        call = microbatch.running.popleft()
        microbatch.costs[call.step].seen(done.seconds / call.scale)
        self._free(done.microbatch)
        if microbatch.running:
            self._count(microbatch, microbatch.running[0])
        left = microbatch.content.end(done)
        self._ready.append(microbatch)
        self._settled(microbatch)
        if microbatch.content.takes:
            self._may_seat = True
        self._watcher.stepped(microbatch, done)
        for request in left:
            self._watcher.finished(request)

    def _settled(self, microbatch: Microbatch[R]) -> None:
        """Hook: a step has ended and its content is up to date."""

    def _measure(self) -> None:
        self.plan = self.stepper.plans[self.policy]
        depth = self._config.depth
        self._depth = self.plan.microbatches if depth is None else depth

    def _renew(self) -> None:
        self._measure()
        for microbatch in self.microbatches.values():
            microbatch.is_old = microbatch.plan is not self.plan
        self._close_old()
        self._may_seat = True

    def _close_old(self) -> None:
        idle = [m for m in self.microbatches.values() if m.is_idle and not m.content.num_used]
        for microbatch in [m for m in idle if m.is_old and self._can_close(m)]:
            self.stepper.close(microbatch.number)
            self._close(microbatch)

    def _lose(self, event: DeviceLost) -> None:
        self.lost[event.device] = event
        self._watcher.lost(event)
        gone = [self.microbatches[n] for n in event.microbatches if n in self.microbatches]
        requests = [request for microbatch in gone for request in microbatch.content.requests()]
        for microbatch in gone:
            self._close(microbatch)
        self._dropped(event.device, gone)
        if gone:
            self._ready = [m for m in self._ready if m.number in self.microbatches]
            self._free(*(microbatch.number for microbatch in gone))
        for request in requests:
            self._retry(request, event)
        self._fail_without_lanes()

    def _dropped(self, device: str, gone: Sequence[Microbatch[R]]) -> None:
        """Hook: their requests are not yet retried."""

    def _retry(self, request: R, event: DeviceLost) -> None:
        if event.is_certain:
            num, most = self._retries.get(request, 0) + 1, self._config.max_retries
            if most is not None and num > most:
                self._watcher.failed(request, f"its devices were lost again: {event.text}")
                return
            self._retries[request] = num
        self.queue.give_back(request)
        self._watcher.retried(request, event)

    def _device_back(self, event: DeviceBack) -> None:
        self.lost.pop(event.device, None)
        for microbatch in self.microbatches.values():
            microbatch.is_old |= event.device in microbatch.without
        self._close_old()
        self._fail_without_lanes()
        self._watcher.back(event)

    def _fail_without_lanes(self) -> None:
        self._may_seat = True
        self.failure = ""
        lanes = self.stepper.lanes
        if lanes.open():
            return
        given_up = {name for name, lost in self.lost.items() if lost.retry_s is None}
        if any(not lane.devices & given_up for lane in lanes.current):
            return
        last = list(self.lost.values())[-1]
        self.failure = f"no lane avoids {', '.join(sorted(given_up))}: {last.text}"
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        while (request := self.queue.pop()) is not None:
            self._watcher.failed(request, self.failure)
