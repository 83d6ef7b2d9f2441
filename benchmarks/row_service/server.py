"""SimulatedServer: requests over time, through the real scheduler over a virtual stepper.

Policies, losses and switches run the service's code; only time is virtual, and microbatches are modelled
(`ModelledRows`). `RequestLoad` has the requests' times and lengths, `RequestLedger` their results.

Between decodes, finished requests leave and waiting ones join. Joining requests run the head first (all steps
before decode), then all decode together. A head takes time in proportion to the joined prompt tokens, in
sixteenths; a decode takes the captured batch's time, however many rows are used. A work unit without a decode
is only a head: its requests join an empty microbatch, run every step, and leave together.

A request that a switch of policy moves waits while its state crosses the slowest link, and goes on. One whose
device was lost reads its tokens with its prompt and gets its next token by that. Both as in a service.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from benchmarks.row_service.admission import RowContent, RowScheduler
from benchmarks.row_service.machine import MemoMachine

from tessera.errors import ServiceBusy
from tessera.execute.admission import PATIENCE, costs_of
from tessera.execute.lanes import LoadedLane
from tessera.execute.scheduler import SchedulerConfig, Watcher
from tessera.execute.stepper import DeviceLost, StepCall, StepDone
from tessera.ir import Arrivals, BufferKind, Decision, Plan, WorkUnit
from tessera.simulate.stepper import NO_FAULTS, Faults, Truth, VirtualStepper

# Resolution of head times.
PARTS = 16
# Tolerance of equal times, in microseconds.
SAME_US = 1e-3


@dataclass(frozen=True)
class RequestLoad:
    """Requests of a simulation: times and lengths, in units of the captured steps."""

    times_us: Sequence[float]
    # Answer tokens and decodes of each.
    tokens: Sequence[int]
    decodes: Sequence[int]
    # Share of a full head per prompt.
    shares: Sequence[float]
    # Requests per microbatch.
    rows: int
    # True if a head outputs the first token.
    head_speaks: bool
    # Share of a full head per token read again.
    per_token: float = 0.0

    def __len__(self) -> int:
        return len(self.times_us)

    def chosen(self, numbers: Iterable[int], times_us: Sequence[float]) -> "RequestLoad":
        """A selection of requests, possibly repeated, at new times."""
        rows = [(self.tokens[n], self.decodes[n], self.shares[n]) for n in numbers]
        tokens, decodes, shares = zip(*rows, strict=True)
        return replace(self, times_us=times_us, tokens=tokens, decodes=decodes, shares=shares)


def load_of(unit: WorkUnit, arrivals: Arrivals, rows: int | None = None) -> RequestLoad:
    """Load of arrivals on a work unit; `rows` requests share a microbatch, by default the captured batch."""
    steps = [graph.trace.step for graph in unit.graphs]
    is_decode = steps[-1].kind == "decode"
    head_speaks = is_decode and any(s.kind == "prefill" for s in steps[:-1])
    rows = rows or max(1, steps[-1].batch)
    num = len(arrivals.times_s)
    usual = unit.counts[-1] + head_speaks if is_decode else 1
    tokens = arrivals.outputs if arrivals.outputs and is_decode else (usual,) * num
    context = max((s.context for s in steps if s.kind == "prefill"), default=0)
    shares = (
        [prompt / (context * rows) for prompt in arrivals.prompts]
        if context and arrivals.prompts
        else [1.0 / rows] * num
    )
    decodes = [n - head_speaks for n in tokens] if is_decode else [0] * num
    per_token = 1.0 / (context * rows) if context else 0.0
    return RequestLoad(
        [t * 1e6 for t in arrivals.times_s], tokens, decodes, shares, rows, head_speaks, per_token
    )


def move_s(plan: Plan) -> float:
    """Seconds in which the state of one request crosses the slowest link."""
    trace = plan.graphs[-1].trace
    size = sum(trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.STATE))
    slowest = min((link.gbps for link in plan.cluster.links), default=inf)
    return size / max(1, trace.step.batch) / (1e9 * slowest)


@dataclass
class RequestLedger:
    """Results by request; times in microseconds, negative if they did not happen."""

    first_us: list[float]
    done_us: list[float]
    num_restarted: int = 0
    num_refused: int = 0
    num_failed: int = 0
    max_waiting: int = 0
    # Decodes done by requests that left early, to resume from.
    decoded: dict[int, int] = field(default_factory=dict)
    # Requests whose state is moved.
    moved: set[int] = field(default_factory=set)

    @staticmethod
    def of(num: int) -> "RequestLedger":
        return RequestLedger([-1.0] * num, [-1.0] * num)


class ModelledRows(RowContent[int]):
    """Contents of a microbatch in a simulation; requests are numbers."""

    def __init__(
        self,
        number: int,
        lane: LoadedLane,
        requests: RequestLoad,
        ledger: RequestLedger,
        now_us: Callable[[], float],
    ) -> None:
        self._number, self._requests, self._ledger, self._now_us = number, requests, ledger, now_us
        self.rows = requests.rows
        unit = lane.plan.unit
        runs = [step for step, count in enumerate(unit.counts) for _ in range(count)]
        self._decode: StepCall | None = None
        if unit.graphs[-1].trace.step.kind == "decode":
            self._decode = StepCall(number, len(unit.graphs) - 1)
            runs = runs[: len(runs) - unit.counts[-1]]
        self._head = runs[::-1]
        head_s = sum(costs_of(lane)[step].alone_s for step in runs)
        self._move_share = move_s(lane.plan) / head_s if head_s else 0.0
        # Decodes done, and (decode after which it leaves, request).
        self._clock = 0
        self._seats: list[tuple[int, int]] = []
        # Joining requests, and seated ones without a token yet.
        self._joining: list[int] = []
        self._silent: list[int] = []
        # Remaining head steps, last first, and the running step.
        self._ahead: list[StepCall] = []
        self._runs: StepCall | None = None

    @property
    def num_used(self) -> int:
        return len(self._seats) + len(self._joining)

    @property
    def num_free(self) -> int:
        """Free seats; without decodes, only requests that join together share steps."""
        if self._decode is None and (self._runs is not None or self._ahead):
            return 0
        return self._requests.rows - len(self._seats) - len(self._joining)

    @property
    def takes(self) -> bool:
        return self._runs is None and not self._ahead and self.num_free > 0

    @property
    def can_move(self) -> bool:
        """Free to move where prompts are not part of the work."""
        return self._decode is not None and self._requests.rows > 1

    def add(self, request: int) -> None:
        self._joining.append(request)

    def requests(self) -> list[int]:
        for stop, request in self._seats:
            self._ledger.decoded[request] = self._requests.decodes[request] - (stop - self._clock)
            self._ledger.moved.add(request)
        return sorted([*(request for _, request in self._seats), *self._joining])

    def next_step(self) -> StepCall | None:
        """Head of joining requests, then decodes."""
        if self._joining and not self._ahead:
            self._begin_head()
        if self._ahead:
            self._runs = self._ahead.pop()
        else:
            self._runs = self._decode if self._seats else None
        return self._runs

    def _begin_head(self) -> None:
        if self._head:
            share = sum(map(self._share, self._joining))
            scale = max(1, math.ceil(share * PARTS - 1e-9)) / PARTS
            self._ahead = [StepCall(self._number, step, scale=scale) for step in self._head]
        else:
            self._sit(is_spoken=False)

    def _share(self, request: int) -> float:
        """Share of a full head until the request can decode."""
        if request in self._ledger.moved:
            return self._move_share
        return (
            self._requests.shares[request] + self._ledger.decoded.get(request, 0) * self._requests.per_token
        )

    def _sit(self, is_spoken: bool) -> None:
        for request in self._joining:
            left = self._requests.decodes[request]
            if request in self._ledger.moved:
                self._ledger.moved.remove(request)
                left -= self._ledger.decoded[request]
            elif request in self._ledger.decoded:
                left -= self._ledger.decoded[request] + is_spoken
            if is_spoken or not left:
                self._speak(request)
            else:
                self._silent.append(request)
            heapq.heappush(self._seats, (self._clock + left, request))
        self._joining = []

    def _speak(self, request: int) -> None:
        if self._ledger.first_us[request] < 0.0:  # a restarted request already had its first token
            self._ledger.first_us[request] = self._now_us()

    def end(self, done: StepDone) -> Sequence[int]:
        is_decode, self._runs = self._runs is self._decode, None
        if self._ahead:
            return ()
        if is_decode:
            self._clock += 1
            if self._silent:
                for request in self._silent:
                    self._speak(request)
                self._silent = []
        else:
            self._sit(self._requests.head_speaks)
        if not self._seats or self._seats[0][0] > self._clock:
            return ()
        leaving, now_us = [], self._now_us()
        while self._seats and self._seats[0][0] <= self._clock:
            request = heapq.heappop(self._seats)[1]
            self._ledger.done_us[request] = now_us
            leaving.append(request)
        return leaving


@dataclass
class SimulatedRun:
    requests: RequestLoad
    ledger: RequestLedger
    policy: str
    duration_us: float
    # Devices, then buses.
    busy_us: list[float]
    decisions: list[Decision] = field(default_factory=list)
    # Seconds without a token of every request that a switch of policy moved.
    stops_s: list[float] = field(default_factory=list)


class SimulatedServer(Watcher[int]):
    def __init__(
        self,
        plans: Sequence[Plan],
        requests: RequestLoad,
        truth: Truth | None = None,
        faults: Faults = NO_FAULTS,
        max_waiting: int | None = None,
    ) -> None:
        self.requests, self.ledger = requests, RequestLedger.of(len(requests))
        self.decisions: list[Decision] = []
        self.stepper = VirtualStepper(plans, truth, faults)
        num = len(self.stepper.plans[0].cluster.devices)
        self.stepper.machine = MemoMachine(num, len(self.stepper.busy_us) - num)
        # A microbatch of one request ends by itself, so nobody needs a turn.
        config = SchedulerConfig(max_waiting=max_waiting, patience=PATIENCE if requests.rows > 1 else inf)
        self.scheduler: RowScheduler[int] = RowScheduler(self.stepper, self._rows, config, self)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._next = 0  # the next arrival
        self._next_us = 0.0  # time of an external event

    def _rows(self, number: int, lane: LoadedLane) -> ModelledRows:
        machine = self.stepper.machine
        return ModelledRows(number, lane, self.requests, self.ledger, lambda: machine.now_us)

    def now_s(self) -> float:
        return self.stepper.now_s()

    @property
    def plans(self) -> dict[str, Plan]:
        return {plan.policy: plan for plan in self.stepper.plans}

    @property
    def is_serving(self) -> bool:
        return self._next < len(self.requests) or bool(self.scheduler.microbatches)

    def switch(self, policy: str) -> None:
        self.scheduler.switch(list(self.plans).index(policy))

    def at(self, second: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (second * 1e6, next(self._order), action))
        self._next_us = min(self._next_us, second * 1e6)

    def run(self) -> SimulatedRun:
        scheduler, machine = self.scheduler, self.stepper.machine
        self._happen()
        while self._next_us < inf or not scheduler.is_idle:
            left_us = self._next_us - machine.now_us
            event = scheduler.round(max(0.0, left_us * 1e-6) if left_us < inf else None)
            if machine.now_us >= self._next_us - SAME_US:
                self._happen()
            elif event is None and left_us == inf:
                break  # waiting requests cannot be served
        self.ledger.num_failed += len(scheduler.queue)
        name, busy_us = scheduler.plan.policy, self.stepper.busy_us
        return SimulatedRun(self.requests, self.ledger, name, machine.now_us, busy_us, self.decisions)

    def _happen(self) -> None:
        now_us, times = self.stepper.machine.now_us + SAME_US, self.requests.times_us
        while self._agenda and self._agenda[0][0] <= now_us:
            heapq.heappop(self._agenda)[2]()
        while self._next < len(times) and times[self._next] <= now_us:
            self._next += 1
            self._arrive(self._next - 1)
        self._next_us = times[self._next] if self._next < len(times) else inf
        if self._agenda:
            self._next_us = min(self._next_us, self._agenda[0][0])

    def _arrive(self, request: int) -> bool:
        try:
            self.scheduler.push(request)
        except ServiceBusy:
            self.ledger.num_refused += 1
            return False
        self.ledger.max_waiting = max(self.ledger.max_waiting, len(self.scheduler.queue))
        return True

    # Scheduler callbacks.

    def failed(self, request: int, message: str) -> None:
        self.ledger.num_failed += 1

    def retried(self, request: int, lost: DeviceLost) -> None:
        self.ledger.num_restarted += 1
        self.ledger.moved.discard(request)
