"""Engine: the scheduler on a thread of its own, with requests from any other and answers to them.

Round and round: do what other threads asked for, let the scheduler start what can start, hand out what the
last step gave, let it wait for the next thing to happen. A step is started before the text of the one before
is made, so that the devices work meanwhile; a stop string therefore frees its pages one step late, and what
that step gave is dropped.

A request whose device was lost starts anew from its prompt and the tokens given so far, with its generators
where they were, so a client sees a pause and no repeat. Every request that was taken gets one finish, come
what may, also if this thread dies.

The keeper says which plans are in force. A device that is lost is given a new worker by the stepper; nothing
is planned for that. One that fails `MAX_FAILURES` times in a row, or is given up, is planned around: in the
background, while lanes that avoid it go on, or requests wait. When it is back, the plans for all devices are
taken up again. Every plan is one for the service's whole cluster, so that plans can follow one another
without a worker being started.

What plans can do is read off them, for the monitor, with no simulation when a service starts. A plan says how
fast it is with some numbers of microbatches in flight, and a microbatch is a unit of work for `rows`
requests. By Little's law, s microbatches at a rate of r units a second hold each request for s / r seconds;
with hardly any load it is the latency of one unit. Between these the monitor interpolates. All figures are
modelled: they decide between policies, and promise nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from tessera.adapt.capability import Capability, Point
from tessera.adapt.drift import Factors
from tessera.adapt.live import Live
from tessera.errors import ServiceClosing, TesseraError
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Microbatch, Scheduler, SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceBack, DeviceLost, StepDone, Stepper
from tessera.ir import DecisionKind, Plan
from tessera.serve.answer import ActiveRequest
from tessera.serve.delivery import Delivery
from tessera.serve.meters import LOOK_S, Meters
from tessera.serve.records import Shape
from tessera.serve.sequences import SequenceBatch, Steps
from tessera.serve.sight import Sight

STOPPED = "the service was stopped before this answer was complete. Ask again when it is back."


# Requests that may wait, where nobody says.
MAX_WAITING = 1024
# Starts of a request after its first. Devices may be lost together, one loss told after the other.
MAX_RETRIES = 3
# So often in a row a device is given a new worker before it is planned around.
MAX_FAILURES = 3
# A load at which a request is alone, and the share of the capacity that counts as all of it.
ALONE, ENOUGH = 1e-3, 0.99

Plans = tuple[Plan, ...]


class Planner(Protocol):
    """Who can plan a running service anew. Called by background threads; raises TesseraError."""

    def without(self, lost: Iterable[str]) -> Plans:
        """Plans that leave devices unused."""

    def corrected(self, plans: Sequence[Plan], factors: Factors) -> Plans:
        """In place of these plans, at costs that were wrong by these factors."""


class Keeper:
    """Keeps plans in force that the devices can follow. Used by the engine's thread.

    load   takes up plans, if there are any: (plans, why, in one line)
    wake   makes the engine look for plans that are ready; from any thread
    """

    def __init__(
        self,
        plans: Plans,
        planner: Planner | None,
        load: Callable[[Plans, str], None],
        wake: Callable[[], None],
    ) -> None:
        # Those for all devices.
        self.plans = plans
        self._planner, self._load, self._wake = planner, load, wake
        # Devices that are planned around, in force or under way.
        self._around: frozenset[str] = frozenset()
        self._making: Future[Plans] | None = None
        self._background: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._background is not None:
            self._background.shutdown(wait=True, cancel_futures=True)

    def lost(self, event: DeviceLost) -> None:
        """A device is gone; planned around if it fails for good."""
        is_failing = event.failures >= MAX_FAILURES or event.retry_s is None
        if is_failing and event.device not in self._around:
            self._plan_around(self._around | {event.device})

    def back(self, event: DeviceBack) -> None:
        if event.device not in self._around:
            return
        left = self._around - {event.device}
        if left:
            self._plan_around(left)
            return
        self._around, self._making = left, None
        self._load(self.plans, "plans for all devices are in force again")

    def adopt(self, plans: Plans, why: str) -> None:
        """Other plans for all devices; in force now, or when the devices they need are back."""
        self.plans = plans
        if not self._around:
            self._load(plans, why)

    def poll(self) -> None:
        """Takes up plans that are ready."""
        if self._making is None or not self._making.done():
            return
        made, self._making = self._making, None
        names = ", ".join(sorted(self._around))
        try:
            plans = made.result()
        except TesseraError as error:  # requests wait for the device, or use the lanes that avoid it
            self._load((), f"no plans without {names}: {error}")
            return
        self._load(plans, f"plans without {names} are in force")

    def _plan_around(self, devices: frozenset[str]) -> None:
        self._around = devices
        if self._planner is None:
            return
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "tessera-around")
        self._making = self._background.submit(self._planner.without, devices)
        self._making.add_done_callback(lambda _: self._wake())


class Engine(Watcher[ActiveRequest]):
    """`submit`, `cancel`, `post` and `close` from any thread; `run` is the thread's body.

    planner  plans around devices that fail for good; None: they are waited for
    note     hears of every loss, return and change of plans: what it was, and one line
    """

    def __init__(
        self,
        stepper: Stepper,
        shape: Shape,
        end: tuple[int, ...],
        max_waiting: int = MAX_WAITING,
        meters: Meters | None = None,
        sight: Sight | None = None,
        prefix_caching: bool = True,
        planner: Planner | None = None,
        note: Callable[[DecisionKind, str], None] = lambda kind, text: None,
    ) -> None:
        self.stepper, self.shape, self._note = stepper, shape, note
        self.meters = meters or Meters()
        self._out = Delivery(end, self.meters, self._note_end)
        steps = Steps.of(stepper.plans[0])

        def make(number: int, lane: LoadedLane) -> SequenceBatch:
            return SequenceBatch(number, shape, steps, self._out.settle, self.meters, sight, prefix_caching)

        config = SchedulerConfig(max_waiting, shape.microbatches, shape.rows, MAX_RETRIES)
        self.scheduler: Scheduler[ActiveRequest] = Scheduler(stepper, make, config, self)
        self.keeper = Keeper(stepper.plans, planner, self._load, stepper.wake)
        # The monitor, if one decides.
        self.live: Live | None = None
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._deadline_s = float("inf")
        self.is_closing = False
        # Why nothing can be served any more.
        self.failure = ""
        # True if requests were ended before they were done.
        self.was_cut = False

    # For other threads.

    def submit(self, request: ActiveRequest) -> None:
        """Takes a request, or refuses it with an error that says why."""
        if self.live is not None:
            self.live.arrived()  # before it can leave; what is refused is load all the same
        try:
            with self._lock:
                if self.failure:
                    raise ServiceClosing(self.failure)
                if self.is_closing:
                    raise ServiceClosing("the service is stopping", "Ask another one.")
                self.scheduler.push(request, request.ask.client)
        except TesseraError:
            self._note_end()
            raise
        self.stepper.wake()

    def cancel(self, request: ActiveRequest) -> None:
        if not request.is_over:
            request.is_cancelled = True
            self.post(lambda: self._drop(request))

    def post(self, what: Callable[[], None]) -> None:
        """Has something done by the engine's thread, before its next round."""
        self._posted.append(what)
        self.stepper.wake()

    def close(self, deadline_s: float) -> None:
        """Takes nothing new; what is not done by then, as `time.monotonic` counts, is ended with an error."""
        with self._lock:
            self.is_closing = True
            self._deadline_s = deadline_s
        self.stepper.wake()

    # The thread.

    def run(self) -> None:
        """Until it is closed and everything is done, or nothing can be served any more."""
        why = "the engine failed; the log says why. Restart the service."
        try:
            while not self._is_over():
                self.step()
            why = self.failure or STOPPED
            if not self.failure:
                self.scheduler.close_idle()
        finally:
            self._end_all(why)

    def _is_over(self) -> bool:
        if self.failure:
            return True
        if not self.is_closing:
            return False
        return self.scheduler.is_idle or time.monotonic() >= self._deadline_s

    def step(self) -> None:
        """One round: starts what can start, and waits for the next thing to happen."""
        while self._posted:
            self._posted.popleft()()
        try:
            self.keeper.poll()  # first: who waited for plans is seated in this round
            self.scheduler.begin()
            self._out.deliver()
            self._look()
            is_done = self.is_closing and self.scheduler.is_idle
            self.scheduler.wait(0.0 if is_done else LOOK_S)
            self.failure = self.scheduler.failure
        except TesseraError as error:  # a stepper that fails as a whole
            self.failure = f"no devices are left: {error}"

    def _drop(self, request: ActiveRequest) -> None:
        if not request.is_over:
            self.scheduler.forget(request, request.ask.client)
            self._out.finish(request, "cancelled")

    def _note_end(self) -> None:
        if self.live is not None:
            self.live.finished()

    def _look(self) -> None:
        if not self.meters.is_due():
            return
        self.meters.look(self.stepper.use())
        if self.live is not None:
            self.live.poll()

    def _load(self, plans: Sequence[Plan], why: str) -> None:
        if plans:
            try:
                self.scheduler.load(plans)
            except TesseraError as error:  # those in force run on
                why = f"plans cannot be taken up: {error}"
            else:
                self.meters.plan_changes += 1
        self._note(DecisionKind.ADOPT, why)

    # What the scheduler tells.

    def seated(self, request: ActiveRequest, microbatch: Microbatch[ActiveRequest]) -> None:
        """How long it waited is told once."""
        if request.seated_s is None:
            request.seated_s = time.monotonic()
            self.meters.seated(request.seated_s - request.arrived_s)

    def stepped(self, microbatch: Microbatch[ActiveRequest], done: StepDone) -> None:
        """For the monitor: what the plans in force say is held against what it took."""
        if self.live is not None and any(microbatch.lane.plan is plan for plan in self.stepper.plans):
            self.live.stepped(microbatch.lane, done.step, done.busy_s)

    def failed(self, request: ActiveRequest, message: str) -> None:
        self._out.finish(request, "error", message)

    def retried(self, request: ActiveRequest, lost: DeviceLost) -> None:
        request.batch = None
        self.meters.retried += 1

    def moved(self, request: ActiveRequest) -> None:
        """It waits again, for a place under the policy in force."""
        request.batch = None

    def lost(self, lost: DeviceLost) -> None:
        """What its steps gave is handed out before they start anew."""
        self._out.deliver()
        self.meters.losses[lost.device] += 1
        self.meters.look(self.stepper.use())
        self._note(DecisionKind.LOSE, said_of(lost))
        self.keeper.lost(lost)

    def back(self, back: DeviceBack) -> None:
        self.meters.look(self.stepper.use())
        self._note(DecisionKind.RETURN, f"device {back.device} is back")
        self.keeper.back(back)

    def _end_all(self, why: str) -> None:
        """Nobody is left without a finish, and nobody new is taken."""
        self._out.deliver()
        with self._lock:
            self.failure = self.failure or why
            self.is_closing = True
            open_ = list(self.scheduler.microbatches.values())
            requests = [request for microbatch in open_ for request in microbatch.content.requests()]
            while (request := self.scheduler.queue.pop()) is not None:
                requests.append(request)
        for request in requests:
            if not request.is_over:
                self.was_cut = True
                self._out.finish(request, "cancelled" if request.is_cancelled else "error", why)
        self._out.deliver()


def said_of(lost: DeviceLost) -> str:
    again = "it is not tried again" if lost.retry_s is None else f"it is tried again in {lost.retry_s:g} s"
    return f"lost {lost.said.rstrip('.')} ({again}; failure {lost.failures} in a row)"


def capabilities_of(plans: Sequence[Plan], rows: int) -> tuple[Capability, ...]:
    """One a plan, in requests per second; empty if a plan was never simulated in flight."""
    if not all(
        any(microbatches <= plan.microbatches and rate for microbatches, rate in plan.by_microbatches)
        for plan in plans
    ):
        return ()
    return tuple(_capability(plan, rows) for plan in plans)


def _capability(plan: Plan, rows: int) -> Capability:
    tokens = plan.unit.counts[-1] + 1
    least_s = plan.latency_us * 1e-6
    there = sorted(
        (microbatches, rate)
        for microbatches, rate in plan.by_microbatches
        if microbatches <= plan.microbatches
    )
    capacity = rows * max(rate for _, rate in there)
    first = ALONE * capacity
    points = [Point(first, least_s / tokens, first * least_s)]
    for microbatches, rate in there:
        load = rows * rate
        # The curve ends below the capacity: more microbatches than bring a gain only bring waiting.
        if points[-1].rate_per_s < load < ENOUGH * capacity:
            points.append(Point(load, max(microbatches / rate, least_s) / tokens, float(microbatches * rows)))
    return Capability(plan.policy, capacity, tuple(points))
