"""Engine: one thread that keeps a stepper busy with the requests that wait.

Round and round: seat who waits, start a step in every idle slot, hand out what the last step gave, wait for
the next thing to happen. A step is started before the text of the one before is made, so that the devices
work meanwhile; a stop string therefore frees its row one step late, and what that step gave is dropped.

A lost device takes the state of its slots with it. Their requests go ahead of the queue and start anew from
their prompt and the tokens given so far, with their generators where they were, so a client sees a pause and
no repeat; a second loss ends them with an error. When nothing can be opened any more, `replace` is asked for
another stepper. Every request that was taken gets one finish, whatever happens, also if this thread dies.

Not handled: moving a request's state to another lane; requests of one slot at different policies.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from tessera.adapt import Live
from tessera.errors import ServiceClosing, TesseraError
from tessera.execute.serving import SlotsLost, StepDone, Stepper
from tessera.serve.admission import choose_slot
from tessera.serve.delivery import Delivery
from tessera.serve.meters import LOOK_S, Meters, NoObserver, Observer
from tessera.serve.queue import FairQueue
from tessera.serve.rows import Request, Slot
from tessera.serve.state import EngineConfig, State

# Makes a stepper for one that is lost. Both are its owner's to close; the old one is not used again.
Replace = Callable[[SlotsLost], Stepper]
STOPPED = "the service was stopped before this answer was complete. Ask again when it is back."


class Engine:
    """`submit` and `cancel` from any thread; `run` is the thread's body."""

    def __init__(
        self,
        stepper: Stepper,
        end: tuple[int, ...],
        config: EngineConfig,
        observer: Observer | None = None,
        replace: Replace | None = None,
    ) -> None:
        self.state = State(stepper)
        self.meters = Meters(config.window_s)
        self._config, self._replace = config, replace
        self._observer: Observer = observer or NoObserver()
        self._out = Delivery(end, self.meters, self._observer)
        self._lock = threading.Lock()
        self._queue: FairQueue[Request] = FairQueue(config.max_waiting)
        self._cancelled: deque[Request] = deque()
        self._deadline_s = float("inf")
        # True if requests were ended before they were done.
        self.was_cut = False

    @property
    def live(self) -> Live | None:
        """The monitor, if one decides."""
        return self._out.live

    @live.setter
    def live(self, live: Live) -> None:
        self._out.live = live

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._queue)

    def submit(self, request: Request) -> None:
        """Takes a request, or refuses it with an error that says why."""
        if self.live is not None:
            self.live.arrived()  # before it can leave; what is refused is load all the same
        try:
            with self._lock:
                self._push(request)
        except TesseraError:
            if self.live is not None:
                self.live.finished()
            raise
        self.state.stepper.wake()

    def _push(self, request: Request) -> None:
        if self.state.failure:
            raise ServiceClosing(self.state.failure)
        if self.state.is_closing:
            raise ServiceClosing("the service is stopping", "Ask another one.")
        self._queue.push(request.ask.client, request)

    def cancel(self, request: Request) -> None:
        """Nobody waits for this one any more."""
        if request.is_over:
            return
        request.is_cancelled = True
        self._cancelled.append(request)
        self.state.stepper.wake()

    def close(self, deadline_s: float) -> None:
        """Takes nothing new; what is not done by then, as `time.monotonic` counts, is ended with an error."""
        with self._lock:
            self.state.is_closing = True
            self._deadline_s = deadline_s
        self.state.stepper.wake()

    def run(self) -> None:
        """Until it is closed and everything is done, or nothing can be served any more."""
        why = "the engine failed; the log says why. Restart the service."
        try:
            while not self._is_over():
                self.step()
            why = self.state.failure or STOPPED
        finally:
            self._end_all(why)

    def _is_over(self) -> bool:
        if self.state.failure:
            return True
        if not self.state.is_closing:
            return False
        is_idle = not self._queue and not self.state.slots
        return is_idle or time.monotonic() >= self._deadline_s

    def step(self) -> None:
        """One round: starts what can start, and waits for the next thing to happen."""
        self._drop_cancelled()
        try:
            self._start_steps()
            self._out.deliver()
            self._look()
            is_done = self.state.is_closing and not self.state.slots and not self._queue
            event = self.state.stepper.take(0.0 if is_done else LOOK_S)
        except TesseraError as error:  # a stepper that fails as a whole
            event = SlotsLost(tuple(self.state.slots), "", str(error), is_over=True)
        if isinstance(event, StepDone):
            self._out.settle(self.state.slots[event.slot], event)
        elif isinstance(event, SlotsLost):
            self._lose(event)

    # Seats and steps.

    def _start_steps(self) -> None:
        was_closed = True
        while was_closed:  # in its place a slot of the policy in force may be opened
            while self._seat_next():
                pass
            idle = [slot for slot in self.state.slots.values() if slot.running is None]
            begun = [self._start(slot) for slot in idle]
            was_closed = not all(begun)

    def _start(self, slot: Slot) -> bool:
        """Starts what comes next in a slot; False: that is nothing, and it is closed."""
        step = slot.begin(len(self._queue))
        if step is None:
            self.state.slots.pop(slot.number)
            self.state.stepper.close(slot.number)
            return False
        kind, inputs, skips = step
        self.state.stepper.run(slot.number, kind, inputs, skips)
        return True

    def _seat_next(self) -> bool:
        """Seats the request that is next, if there is a place for it to begin."""
        if not self._queue:
            return False
        state = self.state
        numbers = set(range(state.stepper.shape.slots)) - set(state.slots)
        widths = self._config.widths
        width = widths[state.policy] if state.policy < len(widths) else 1
        if len(self._queue) >= state.stepper.shape.rows:
            # A whole batch waits: it fills another slot as well as it would these, so all take requests.
            width = state.stepper.shape.slots
        found = choose_slot(tuple(state.slots.values()), state.policy, width, bool(numbers))
        if found is False:
            return False
        # Opened before anybody is called: who is in the queue is not lost if it fails.
        slot = self._open(min(numbers)) if found is True else found
        with self._lock:
            request = self._queue.pop()
        if request is None:
            return False
        self._seat(slot, request)
        return True

    def _open(self, number: int) -> Slot:
        state = self.state
        slot = Slot(number, state.policy, state.stepper.shape)
        state.stepper.open(number, slot.policy)
        state.slots[number] = slot
        return slot

    def _seat(self, slot: Slot, request: Request) -> None:
        slot.seat(request)
        if request.seated_s is None:
            request.seated_s = time.monotonic()
            self._observer.seated(request.seated_s - request.arrived_s)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.is_over:
                continue
            with self._lock:
                self._queue.remove(request.ask.client, request)
            self._out.finish(request, "cancelled")

    def _look(self) -> None:
        if not self.meters.is_due():
            return
        self.meters.look(self.state.stepper.use())
        if self.live is not None:
            self.live.poll()

    # What goes wrong.

    def _lose(self, lost: SlotsLost) -> None:
        self._out.deliver()
        numbers = tuple(self.state.slots) if lost.is_over else lost.slots
        slots = [slot for number in numbers if (slot := self.state.slots.pop(number, None)) is not None]
        if lost.device:
            self.state.lost.add(lost.device)
            if self.live is not None:
                self.live.lost(lost.device)
        for request in [request for slot in slots for request in slot.requests()]:
            self._retry(request, lost)
        if lost.is_over:
            self._replace_stepper(lost)

    def _retry(self, request: Request, lost: SlotsLost) -> None:
        if request.retries >= self._config.max_retries:
            self._out.finish(request, "error", f"its devices were lost again ({_said(lost)}). Ask again.")
            return
        request.retries += 1
        self.meters.retried += 1
        with self._lock:
            self._queue.give_back(request)

    def _replace_stepper(self, lost: SlotsLost) -> None:
        state = self.state
        what = f"no devices are left: {_said(lost)}"
        if self._replace is None:
            state.failure = what
            return
        try:
            new = self._replace(lost)
        except TesseraError as error:
            state.failure = f"{what}; and there are no others: {error}"
            return
        name = state.stepper.policies[state.policy]
        state.stepper = new
        state.policy = new.policies.index(name) if name in new.policies else 0
        state.lost -= set(new.use().busy_s)  # what it does without stays lost
        self.meters.restart()
        self._drop_too_long(new.shape.capacity, lost)

    def _drop_too_long(self, capacity: int, lost: SlotsLost) -> None:
        """What was taken for larger devices may not fit any more."""
        with self._lock:
            waiting = list(self._queue)
        for request in waiting:
            if len(request.ask.prompt) + request.ask.max_tokens > capacity:
                with self._lock:
                    self._queue.remove(request.ask.client, request)
                why = f"only {capacity} tokens fit since devices were lost ({_said(lost)}). Ask for less."
                self._out.finish(request, "error", why)

    def _end_all(self, why: str) -> None:
        """Nobody is left without a finish, and nobody new is taken."""
        self._out.deliver()
        with self._lock:
            self.state.failure = self.state.failure or why
            self.state.is_closing = True
            requests = [request for slot in self.state.slots.values() for request in slot.requests()]
            while (request := self._queue.pop()) is not None:
                requests.append(request)
        for request in requests:
            if not request.is_over:
                self.was_cut = True
                self._out.finish(request, "cancelled" if request.is_cancelled else "error", why)
        self._out.flush()


def _said(lost: SlotsLost) -> str:
    return f"{lost.device}: {lost.message}" if lost.device else lost.message
