"""run_offline: a list of requests through a stepper, one request per microbatch; results in their order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tessera.errors import TesseraError, WorkerError
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import Content, Scheduler, SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceLost, SpanLog, StepCall, StepDone, Stepper, Tensors

DRAIN_S = 5.0
# Without an event until `on_wait` is called.
QUIET_S = 30.0


class Request(Protocol):
    def state(self) -> Tensors:
        """All its steps' initial state."""

    def inputs(self, step: int, run: int, last: Tensors) -> Tensors:
        """For the run-th run of a step, given the outputs of the run before."""


@dataclass
class RunResult:
    lane: int
    policy: int = 0
    outputs: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    stop_s: float = 0.0
    restarts: int = 0
    error: str = ""
    microbatch: int = -1


@dataclass
class OfflineRun:
    results: list[RunResult]
    faults: list[str]

    def raise_failures(self) -> None:
        failed = [result for result in self.results if result.error]
        if failed:
            num = len(self.results)
            counts = f"{num - len(failed)} of {num} requests were finished, {len(failed)} failed"
            remedy = "Check the memory of this machine, then run again."
            raise WorkerError(f"{failed[-1].error.rstrip('.')}; {counts}", remedy)


def run_offline(
    stepper: Stepper,
    requests: Sequence[Request],
    *,
    policy: int | Callable[[int], int] = 0,
    on_done: Callable[[int], None] = lambda number: None,
    spans: SpanLog | None = None,
    is_timed: bool = False,
    skips: tuple[str, ...] = (),
    depth: int | None = None,
    on_wait: Callable[[], None] | None = None,
) -> OfflineRun:
    """Runs all requests, as many at a time as the plan says.

    policy    current policy, or a function of the number of ended requests; a switch drains nothing
    is_timed  only times matter: state starts as zeros, and nothing is kept
    depth     requests in flight, instead of the plan's number
    on_wait   called whenever no step has ended for `QUIET_S`
    """
    choose = policy if callable(policy) else lambda num_done: policy
    return _Run(stepper, requests, choose, on_done, spans, is_timed, skips, depth, on_wait).through()


@dataclass
class _Run(Watcher[int]):
    stepper: Stepper
    requests: Sequence[Request]
    policy: Callable[[int], int]
    on_done: Callable[[int], None]
    spans: SpanLog | None
    is_timed: bool
    skips: tuple[str, ...]
    depth: int | None
    on_wait: Callable[[], None] | None

    def __post_init__(self) -> None:
        self.origin_s = self.stepper.now_s()
        if self.spans is not None:
            self.spans.begin(self.origin_s)
        self.results = [RunResult(-1) for _ in self.requests]
        self._faults: list[str] = []
        self._num_done = 0
        # A microbatch is one request and ends, so no step waits for its turn.
        config = SchedulerConfig(depth=self.depth, patience=math.inf)
        self._scheduler = Scheduler(self.stepper, lambda number, lane: _One(self, number, lane), config, self)

    def through(self) -> OfflineRun:
        self._switch()
        for number in range(len(self.requests)):
            self._scheduler.push(number)
        try:
            while True:
                self._scheduler.begin()
                if self._scheduler.is_idle:
                    break
                if self._scheduler.wait(QUIET_S if self.on_wait else None) is None and self.on_wait:
                    self.on_wait()
        finally:  # leaves the stepper usable after an interruption
            self._scheduler.drain(DRAIN_S)
            del self._scheduler  # it watches through this run: a cycle would hold all tensors
        return OfflineRun(self.results, self._faults)

    def now_s(self) -> float:
        return self.stepper.now_s() - self.origin_s

    def _switch(self) -> None:
        policy = self.policy(self._num_done)
        num = len(self.stepper.plans)
        if not 0 <= policy < num:
            raise TesseraError(f"policy must be 0 to {num - 1}, got {policy}")
        if policy != self._scheduler.policy:
            self._scheduler.switch(policy)

    def finished(self, request: int) -> None:
        self._num_done += 1
        self.on_done(request)
        self._switch()

    def failed(self, request: int, message: str) -> None:
        old = self.results[request]
        self.results[request] = RunResult(-1, self._scheduler.policy, restarts=old.restarts, error=message)

    def retried(self, request: int, lost: DeviceLost) -> None:
        self.results[request] = RunResult(-1, restarts=self.results[request].restarts + 1)
        if self.spans is not None:
            self.spans.forget(request)

    def lost(self, lost: DeviceLost) -> None:
        self._faults.append(lost.text)


class _One(Content[int]):
    def __init__(self, run: _Run, number: int, lane: LoadedLane) -> None:
        self._run, self._number, self._lane = run, number, lane
        self._held: int | None = None

    @property
    def num_used(self) -> int:
        return int(self._held is not None)

    @property
    def takes(self) -> bool:
        return False

    def add(self, request: int) -> None:
        lane, run = self._lane, self._run
        self._held, self._request = request, run.requests[request]
        counts = lane.plan.unit.counts
        self._left = [(step, n) for step, count in enumerate(counts) for n in range(count)][::-1]
        old = run.results[request]
        self._result = run.results[request] = RunResult(
            lane.index, lane.policy, start_s=run.now_s(), restarts=old.restarts, microbatch=self._number
        )
        if run.spans is not None:
            run.spans.open(self._number, request)

    def state(self) -> Tensors | None:
        return None if self._run.is_timed else self._request.state()

    def next_step(self) -> StepCall | None:
        if self._held is None:
            return None
        step, run = self._left.pop()
        last = self._result.outputs[-1] if self._result.outputs else {}
        inputs = self._request.inputs(step, run, last)
        wants_state = not self._left and not self._run.is_timed
        return StepCall(self._number, step, inputs, self._run.skips, wants_state)

    def end(self, done: StepDone) -> Sequence[int]:
        if done.outputs:
            if self._run.is_timed:
                self._result.outputs.clear()
            self._result.outputs.append(dict(done.outputs))
        if self._left:
            return ()
        assert self._held is not None, "a step that ends has a request"
        self._result.state = dict(done.state)
        self._result.stop_s = self._run.now_s()
        left, self._held = self._held, None
        return (left,)

    def requests(self) -> list[int]:
        return [] if self._held is None else [self._held]
