"""Engine: owns every request from admission to its last token, on one thread.

The next step starts before the last one's tokens are searched for stop strings: a stop string frees its pages
one step late, and that step's token is dropped. `settle` chooses tokens and frees pages of ended answers;
`deliver` hands them to readers, who make text.

A request whose device was lost restarts from its tokens so far. Every accepted request gets one finish, also
if this thread dies.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tessera.adapt.controller import Controller, Planner, Replanned
from tessera.adapt.monitor import Monitor
from tessera.errors import ServiceClosing, TesseraError
from tessera.execute.scheduler import Microbatch, SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceBack, DeviceLost, StepDone, Stepper
from tessera.ir import DeviceKind, ServicePlan
from tessera.serve.answer import ActiveRequest, WakeUps
from tessera.serve.meters import SAMPLE_S, Meters
from tessera.serve.pictures import PictureInputs
from tessera.serve.records import Finish, Reason, Shape, Token
from tessera.serve.router import Router
from tessera.serve.sampling import noted, read_tokens
from tessera.serve.sequences import BatchConfig, SequenceBatch
from tessera.serve.step_inputs import OutputRows

STOPPED = "the service was stopped before this answer was complete. Ask again when it is back."
FAILED = "the engine failed; the log says why. Restart the service."
NO_NUMBERS = "the model's logits for this request are NaN. Check its weights and dtype."
MAX_WAITING = 1024
# Restarts of a request. Devices may be lost together and reported one by one.
MAX_RETRIES = 3
# Failures in a row after which a device is planned around.
MAX_FAILURES = 3
# Emulated devices compute on a CPU: their times are not compared with the plan's.
TIMED = (DeviceKind.CPU, DeviceKind.CUDA)


class Engine(Watcher[ActiveRequest]):
    """`accept`, `cancel`, `post`, `switch` and `close` are thread-safe; `run` is the thread's body."""

    def __init__(
        self,
        stepper: Stepper,
        policies: Sequence[ServicePlan],
        shape: Shape,
        max_waiting: int = MAX_WAITING,
        meters: Meters | None = None,
        picture_inputs: PictureInputs | None = None,
        prefix_caching: bool = True,
        is_filled: bool = True,
        monitor: Monitor | None = None,
        planner: Planner[ServicePlan] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.stepper, self.shape = stepper, shape
        self.meters = meters or Meters()

        def on_masks() -> None:
            self.post(self.scheduler.awake_waiting)

        batches = BatchConfig(self.settle, self.meters, picture_inputs, prefix_caching, is_filled, on_masks)
        config = SchedulerConfig(max_waiting, max_retries=MAX_RETRIES)
        self.scheduler = Router(stepper, policies, shape, batches, config, self)
        # Two: a lost device is planned for while an obsolete correction still runs.
        self._background = ThreadPoolExecutor(2, "tessera-replan")
        self._begun_s, self._is_running = stepper.now_s(), False
        self._timed = {d.name for d in stepper.plans[0].cluster.devices if d.kind in TIMED}
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._deadline_s = float("inf")
        self.is_closing = False
        self.failure = ""
        self.was_cut = False
        self._chosen: list[tuple[ActiveRequest, Token, Reason | None]] = []
        self._gaps: list[float] = []
        # When the last step began to be settled; None: what follows it is ordered.
        self._settled_s: float | None = None
        self._wake_ups = WakeUps()
        self.controller = Controller(self, policies, monitor, planner, log)

    @property
    def policy(self) -> str:
        return self.scheduler.service_plan.policy

    def now_s(self) -> float:
        return self.stepper.now_s() - self._begun_s

    def switch(self, policy: str) -> None:
        def switch() -> None:
            names = [plan.policy for plan in self.scheduler.policies]
            if policy in names:
                self.scheduler.switch(names.index(policy))

        self.post(switch) if self._is_running else switch()

    def load(self, plans: tuple[ServicePlan, ...]) -> None:
        self.meters.plan_changes += self.scheduler.adopt(plans)

    def switch_s(self) -> float:
        return self.scheduler.move_s()

    def submit(self, job: Callable[[], Replanned[ServicePlan]]) -> Future[Replanned[ServicePlan]]:
        future = self._background.submit(job)
        future.add_done_callback(lambda _: self.post(self.controller.poll))
        return future

    def end_planning(self) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)

    def accept(self, request: ActiveRequest) -> None:
        self.controller.arrived()  # before it can leave; refused requests count as load too
        try:
            with self._lock:
                if self.failure:
                    raise ServiceClosing(self.failure)
                if self.is_closing:
                    raise ServiceClosing("the service is stopping", "Ask another one.")
                self.scheduler.push(request, request.ask.client)
        except TesseraError:
            self.controller.finished()
            raise
        self.stepper.wake()

    def cancel(self, request: ActiveRequest) -> None:
        if not request.is_over:
            request.is_cancelled = True
            self.post(lambda: self._drop(request))

    def post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self.stepper.wake()

    def close(self, deadline_s: float) -> None:
        """Requests not done by the deadline (`time.monotonic`) end with an error."""
        with self._lock:
            self.is_closing = True
            self._deadline_s = deadline_s
        self.stepper.wake()

    def run(self) -> None:
        why = FAILED
        self._is_running = True
        try:
            while not self._is_over():
                self.step()
            why = self.failure or STOPPED
            if not self.failure:
                self.scheduler.close_idle()
        finally:
            self._end_all(why)

    def _is_over(self) -> bool:
        if not self.is_closing:
            return bool(self.failure)
        return bool(self.failure) or self.scheduler.is_idle or time.monotonic() >= self._deadline_s

    def step(self) -> None:
        while self._posted:
            self._posted.popleft()()
        try:
            self.scheduler.begin()
            if self._settled_s is not None:
                self.meters.hosted(time.perf_counter() - self._settled_s)
                self._settled_s = None
            self.deliver()
            if self.meters.is_due():
                self.meters.sample(self.stepper.use())
                self.controller.poll()
            is_done = self.is_closing and self.scheduler.is_idle
            self.scheduler.wait(0.0 if is_done else max(0.0, min(SAMPLE_S, self._wake_ups.due_s)))
            self.failure = self.scheduler.failure
        except TesseraError as error:  # the stepper as a whole failed
            self.failure = f"no devices are left: {error}"

    def settle(self, batch: SequenceBatch, done: StepDone, rows: OutputRows) -> list[ActiveRequest]:
        self._settled_s = time.perf_counter()
        if any(request.wants_prompt for _, request in rows):
            rows = [(row, request) for row, request in rows if not _note_prompt(batch, done, row, request)]
        self.meters.stepped(batch.kind_of(done.step), done.seconds)
        if not rows:
            return []
        now, ended = self.stepper.now_s(), []
        tokens = read_tokens(done.outputs, [row for row, _ in rows], (request.pick for _, request in rows))
        for (_, request), token in zip(rows, tokens, strict=True):
            if token is None:
                failure = request.pick.failure
                self.finish(request, "error", failure or NO_NUMBERS, is_refused=bool(failure))
                ended.append(request)
                continue
            if request.first_s is None:
                request.first_s = now
                self.meters.first_token(len(request.ask.prompt), now - request.arrived_s)
            else:
                self._gaps.append(now - request.last_s)
            request.last_s = now
            request.add(token.number)
            reason: Reason | None = None
            if token.number in request.ends or (not request.pick.is_plain and request.pick.is_over):
                reason = "stop"
            elif request.num_out >= request.ask.max_tokens:
                reason = "length"
            if reason is not None:
                ended.append(request)
            self._chosen.append((request, token, reason))
        self.meters.output_tokens += len(rows)
        return ended

    def deliver(self) -> None:
        delivered, self._chosen = self._chosen, []
        woken = self._wake_ups.buffers
        for request, token, reason in delivered:
            if request.is_over:
                continue
            text = "" if token.number in request.ends else request.text_of(token.number)
            request.buffer.put(text, token)
            woken.add(request.buffer)
            if request.watch is not None and request.watch.is_stopped:
                self.finish(request, "stop")
            elif reason is not None:
                self.finish(request, reason)
        self._wake_ups.flush()
        if self._gaps:
            self.meters.next_tokens(self._gaps)
            self._gaps = []

    def finish(
        self, request: ActiveRequest, reason: Reason, message: str = "", is_refused: bool = False
    ) -> None:
        request.is_over = True
        self.scheduler.drop(request)
        if request.batch is not None:
            request.batch.leave(request)
        rest = request.rest_of_text()
        if rest:
            request.buffer.put(rest, None)
        lengths = (len(request.ask.prompt), request.num_out)
        finish = Finish(reason, *lengths, message, tuple(request.prompt_notes), is_refused)
        request.buffer.finish(finish)
        self._wake_ups.buffers.add(request.buffer)
        self.meters.ended(finish, request.times(self.stepper.now_s()))
        self.controller.finished(lengths if reason in ("stop", "length") else None)

    def _drop(self, request: ActiveRequest) -> None:
        if not request.is_over:
            self.scheduler.queue.remove(request.ask.client, request)
            self.finish(request, "cancelled")

    def _end_all(self, why: str) -> None:
        self.deliver()
        with self._lock:
            self.failure = self.failure or why
            self.is_closing = True
            microbatches = list(self.scheduler.microbatches.values())
            requests = [request for microbatch in microbatches for request in microbatch.content.requests()]
            while (request := self.scheduler.queue.pop()) is not None:
                requests.append(request)
        for request in requests:
            if not request.is_over:
                self.was_cut = True
                is_cancelled = request.is_cancelled or why is STOPPED
                self.finish(request, "cancelled" if is_cancelled else "error", why)
        self.deliver()
        self._wake_ups.flush(is_last=True)

    def seated(self, request: ActiveRequest, microbatch: Microbatch[ActiveRequest]) -> None:
        if request.seated_s is None:
            request.seated_s = self.stepper.now_s()
            self.meters.seated(request.seated_s - request.arrived_s)

    def stepped(self, microbatch: Microbatch[ActiveRequest], done: StepDone) -> None:
        lane = microbatch.lane
        if any(lane.plan is plan for plan in self.stepper.plans):
            busy_s = {name: seconds for name, seconds in done.busy_s.items() if name in self._timed}
            self.controller.stepped(lane, done.step, busy_s)

    def failed(self, request: ActiveRequest, message: str) -> None:
        self.finish(request, "error", message)

    def retried(self, request: ActiveRequest, lost: DeviceLost) -> None:
        self.meters.retried += 1

    def lost(self, lost: DeviceLost) -> None:
        """Deliver the tokens of its steps before its requests restart."""
        self.deliver()
        self.meters.losses[lost.device] += 1
        self.meters.sample(self.stepper.use())
        is_lasting = lost.failures >= MAX_FAILURES or lost.retry_s is None
        self.controller.lost(lost.device, said_of(lost), is_lasting)

    def back(self, back: DeviceBack) -> None:
        self.meters.sample(self.stepper.use())
        self.controller.back(back.device)


def said_of(lost: DeviceLost) -> str:
    again = "it is not tried again" if lost.retry_s is None else f"it is tried again in {lost.retry_s:g} s"
    return f"lost {lost.text.rstrip('.')} ({again}; failure {lost.failures} in a row)"


def _note_prompt(batch: SequenceBatch, done: StepDone, row: int, request: ActiveRequest) -> bool:
    """False if the answer's next token is due."""
    if not request.wants_prompt:
        return False
    at = batch.by_request[request].read
    if at == len(request.prompt_notes) + 1:
        logprobs, top = (done.outputs[name][row].tolist() for name in ("logprobs", "top_tokens"))
        token = noted(request.ask.prompt[at], logprobs, top, request.ask.prompt_logprobs)
        request.prompt_notes.append(token)
        request.wants_prompt = len(request.prompt_notes) + 1 < len(request.ask.prompt)
    return True
