"""Engine: the scheduler on a thread of its own, with requests from any other and answers to them.

Round and round: do what other threads asked for, let the scheduler start what can start, hand out what the
last step gave, let it wait for the next thing to happen. A step is started before the text of the one before
is made, so that the devices work meanwhile; a stop string therefore frees its pages one step late, and what
that step gave is dropped.

A request whose device was lost starts anew from its prompt and the tokens given so far, with its generators
where they were, so a client sees a pause and no repeat. Every request that was taken gets one finish, come
what may, also if this thread dies.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tessera.adapt.live import Live
from tessera.errors import ServiceClosing, TesseraError
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Microbatch, Scheduler, SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceBack, DeviceLost, StepDone, Stepper
from tessera.ir import DecisionKind, Plan
from tessera.serve.delivery import Delivery
from tessera.serve.keeper import Keeper, Planner
from tessera.serve.meters import LOOK_S, Meters, Observer
from tessera.serve.records import Shape
from tessera.serve.sequences import ActiveRequest, SequenceBatch, Steps
from tessera.serve.sight import Sight

STOPPED = "the service was stopped before this answer was complete. Ask again when it is back."


# Requests that may wait, where nobody says.
MAX_WAITING = 1024
# Starts of a request after its first. Devices may be lost together, one loss told after the other.
MAX_RETRIES = 3


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
        observer: Observer | None = None,
        sight: Sight | None = None,
        prefix_caching: bool = True,
        planner: Planner | None = None,
        note: Callable[[DecisionKind, str], None] = lambda kind, text: None,
    ) -> None:
        self.stepper, self.shape, self._note = stepper, shape, note
        self.meters = Meters()
        self._observer = observer or Observer()
        self._out = Delivery(end, self.meters, self._observer, self._note_end)
        steps = Steps.of(stepper.plans[0])

        def make(number: int, lane: LoadedLane) -> SequenceBatch:
            settle, counts = self._out.settle, self.meters.pages
            return SequenceBatch(number, shape, steps, settle, counts, sight, prefix_caching)

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
            self._observer.seated(request.seated_s - request.arrived_s)

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
