"""rehearse: figures of a service plan under a load, by the service's engine on a virtual clock.

`rehearse`: as many requests as fit are present at all times, the first in the middle of an answer, as in
steady state; one round of requests warms up. `play`: requests arrive, and devices may be lost or slow; of
several plans a monitor chooses, as in a service.

`HOST_US`, the host's time for a step, is assumed: a service shows its own as `host_ms`.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle
from typing import NamedTuple

from tessera.adapt.capability import Capability, capability_of
from tessera.adapt.monitor import Monitor
from tessera.errors import PlanInfeasible
from tessera.execute.scheduler import Microbatch
from tessera.execute.stepper import StepDone
from tessera.ir import Arrivals, Decision, Expected, Load, ServicePlan
from tessera.ir.units import quantile
from tessera.kernels import PAGE
from tessera.serve.answer import ActiveRequest
from tessera.serve.engine import Engine
from tessera.serve.groups import plans_of
from tessera.serve.records import Ask, Sampling, Shape
from tessera.serve.sequences import SequenceBatch
from tessera.serve.step_inputs import OutputRows
from tessera.serve.text import ByteText
from tessera.simulate.arrivals import lengths_of
from tessera.simulate.stepper import NO_FAULTS, Faults, Truth, VirtualStepper

# Policies are compared at one request, and at these shares of the most.
COMPARED = (0.25, 1.0)
HOST_US = 200.0
COUNTED, MIN_COUNTED = 2, 64
GREEDY = Sampling(temperature=0.0)


def rehearse(
    plan: ServicePlan, load: Load, clients: int | None = None, seed: int = 0, shape: Shape | None = None
) -> Expected:
    """Default: as many clients as fit."""
    clients = clients or plan.clients
    return _Rehearsal([plan], load, clients, seed, shape or shape_for(plan)).run()


class Played(NamedTuple):
    expected: Expected
    policy: str
    decisions: tuple[Decision, ...] = ()
    # Mean time of a request per token of its answer.
    normalised_s: float = 0.0
    # Requests that no device could serve, and restarts after losses.
    num_failed: int = 0
    num_restarted: int = 0
    # From the first request's end to the last one's begin; None: the last begins before the first ends.
    steady_tokens_per_s: float | None = None


def play(
    plans: Sequence[ServicePlan],
    arrivals: Arrivals,
    seed: int = 0,
    faults: Faults = NO_FAULTS,
    noise: float = 0.0,
) -> Played:
    """Requests without lengths have those of the first plan's load.

    `noise`: kernel types take exp(noise * normal) times their modelled time, by device.
    """
    load = plans[0].load
    lengths = list(zip(arrivals.prompts, arrivals.outputs, strict=True))
    lengths = lengths or lengths_of(load, len(arrivals.times_s), seed)
    shapes = [shape_for(plan) for plan in plans]
    smallest = min(shapes, key=lambda shape: shape.pool_tokens)
    monitor = Monitor(rated(plans, smallest)) if len(plans) > 1 else None
    load = replace(load, lengths=())
    rehearsal = _Rehearsal(plans, load, len(lengths), seed, smallest, faults, noise, monitor)
    return rehearsal.play(list(zip(arrivals.times_s, lengths, strict=True)))


def rated(policies: Sequence[ServicePlan], shape: Shape) -> tuple[Capability, ...]:
    capabilities = []
    for plan in policies:
        clients = sorted({1, *(max(1, int(share * plan.clients)) for share in COMPARED)})
        if len(policies) == 1:
            clients = clients[-1:]
        tokens = plan.load.output_tokens
        rates = [rehearse(plan, plan.load, n, shape=shape).tokens_per_s / tokens for n in clients]
        capabilities.append(capability_of(plan.policy, list(zip(clients, rates, strict=True)), tokens))
    return tuple(capabilities)


def shape_for(plan: ServicePlan) -> Shape:
    """A request may fill the pages."""
    group, pool_tokens = plan.groups[0], min(group.pool_tokens for group in plan.groups)
    sizes = (group.microbatches, group.sequences, pool_tokens - PAGE, group.sizes)
    return Shape(*sizes, pool_tokens, vocab_size=1, windows=group.windows)


class _Mark(NamedTuple):
    at_s: float
    output_tokens: int
    busy_us: list[float]
    pages_moved: int


class _Rehearsal(Engine):
    """All tokens are the same."""

    def __init__(
        self,
        plans: Sequence[ServicePlan],
        load: Load,
        clients: int,
        seed: int,
        shape: Shape,
        faults: Faults = NO_FAULTS,
        noise: float = 0.0,
        monitor: Monitor | None = None,
    ) -> None:
        steps = plans_of(plans)
        self._virtual = VirtualStepper(steps, Truth(steps[0], noise, seed), faults, host_us=HOST_US)
        super().__init__(
            self._virtual, plans, shape, 2 * clients + 1, prefix_caching=False, is_filled=False,
            monitor=monitor,
        )  # fmt: skip
        self._clients, self._counted = clients, max(COUNTED * clients, MIN_COUNTED)
        self._lengths = cycle(lengths_of(load, clients + self._counted, seed))
        self._random, self._reader = random.Random(seed), ByteText().reader()
        self._steps: Counter[tuple[int, int]] = Counter()
        # A request that ends makes room for the next one.
        self._num_ended, self._num_failed, self._is_closed = 0, 0, True
        # Whose step ended last.
        self._group = 0
        # To the first token, and per token after it by the group where a request ended.
        self._first_s: list[float] = []
        self._token_s: dict[int, list[float]] = defaultdict(list)
        self._normalised_s: list[float] = []
        # When the first request ended and the last one began.
        self._full: _Mark | None = None
        self._last: _Mark | None = None

    def run(self) -> Expected:  # type: ignore[override]
        for _ in range(self._clients):
            self._ask(*next(self._lengths), is_first=True)
        start = self._run_to(self._clients)
        self._first_s.clear()
        self._token_s.clear()
        self._steps.clear()
        return self._between(start, self._run_to(self._clients + self._counted))

    def play(self, arrivals: Sequence[tuple[float, tuple[int, int]]]) -> Played:
        self._is_closed, self._is_running = False, True
        start, most = self._mark(), 0
        for num, (at_s, lengths) in enumerate(arrivals):
            while self._virtual.now_s() < at_s:
                self._begin()
                self.scheduler.wait(at_s - self._virtual.now_s())
            self.controller.arrived()
            self._ask(*lengths)
            most = max(most, num + 1 - self._num_ended)
        expected = replace(self._between(start, self._run_to(len(arrivals))), clients=most)
        decisions = tuple(self.controller.decisions)
        normalised_s = sum(self._normalised_s) / max(1, len(self._normalised_s))
        policy, restarts = self.scheduler.service_plan.policy, self.meters.retried
        return Played(
            expected, policy, decisions, normalised_s, self._num_failed, restarts, self._steady_tokens_per_s()
        )

    def _steady_tokens_per_s(self) -> float | None:
        full, last = self._full, self._last
        if full is None or last is None or last.at_s <= full.at_s:
            return None
        return (last.output_tokens - full.output_tokens) / (last.at_s - full.at_s)

    def _between(self, start: _Mark, stop: _Mark) -> Expected:
        seconds = stop.at_s - start.at_s
        num_devices = len(self.scheduler.plan.cluster.devices)
        busy = [b - a for a, b in zip(start.busy_us, stop.busy_us, strict=True)][:num_devices]
        tokens = list(chain.from_iterable(self._token_s.values()))
        return Expected(
            (stop.output_tokens - start.output_tokens) / seconds,
            max((_ms(times, 0.5) for times in self._token_s.values()), default=0.0),
            _ms(tokens, 0.99),
            _ms(self._first_s, 0.5),
            _ms(self._first_s, 0.99),
            busy=tuple(min(1.0, us * 1e-6 / seconds) for us in busy),
            steps=tuple(
                tuple(self._steps[number, step] for step in range(len(group.plan.graphs)))
                for number, group in enumerate(self.scheduler.service_plan.groups)
            ),
            clients=self._clients,
            pages_moved=stop.pages_moved - start.pages_moved,
        )

    def _run_to(self, num_ended: int) -> _Mark:
        scheduler = self.scheduler
        while self._num_ended < num_ended:
            self._begin()
            if scheduler.wait(None) is None:
                if not scheduler.lost:
                    raise PlanInfeasible("a request of the load does not fit in the plan's pages")
                self._num_failed += num_ended - self._num_ended
                break
        return self._mark()

    def _begin(self) -> None:
        while self._posted:
            self._posted.popleft()()
        self.scheduler.begin()

    def _mark(self) -> _Mark:
        meters = self.meters
        busy_us = list(self._virtual.busy_us)
        return _Mark(self._virtual.now_s(), meters.output_tokens, busy_us, meters.pages_moved)

    def _ask(self, length: int, tokens: int, is_first: bool = False) -> None:
        tokens = min(tokens, self.shape.max_tokens - 1)
        if is_first:  # its prompt is read
            length, tokens = 1, self._random.randint(1, tokens)
        prompt = (0,) * min(length, self.shape.max_tokens - tokens)
        request = ActiveRequest(Ask(prompt, tokens, GREEDY, ignores_end=True), self._reader, ())
        request.arrived_s = self._virtual.now_s()
        self.scheduler.push(request)

    def settle(self, batch: SequenceBatch, done: StepDone, rows: OutputRows) -> list[ActiveRequest]:
        now_s, ended = self._virtual.now_s(), []
        for _, request in rows:
            request.sequence.append(0)
            request.num_out += 1
            if request.num_out == 1:
                request.first_s = now_s
            if request.num_out >= request.ask.max_tokens:
                request.last_s = now_s
                ended.append(request)
        self.meters.output_tokens += len(rows)
        return ended

    def stepped(self, microbatch: Microbatch[ActiveRequest], done: StepDone) -> None:
        groups, group = self.scheduler.groups, self.scheduler.group_of(microbatch)
        if group in groups:
            self._group = groups.index(group)
            self._steps[self._group, done.step] += 1

    def finished(self, request: ActiveRequest) -> None:
        first_s, num = request.first_s or 0.0, request.num_out
        self._first_s.append(first_s - request.arrived_s)
        self._normalised_s.append((request.last_s - request.arrived_s) / num)
        if num > 1:
            self._token_s[self._group].append((request.last_s - first_s) / (num - 1))
        self._count(request)
        if self._is_closed:
            self._ask(*next(self._lengths))

    def failed(self, request: ActiveRequest, message: str) -> None:
        self._num_failed += 1
        self._count(request)

    def _count(self, request: ActiveRequest) -> None:
        self.scheduler.drop(request)
        self.controller.finished()
        self._num_ended += 1
        self._full = self._full or self._mark()

    def seated(self, request: ActiveRequest, microbatch: Microbatch[ActiveRequest]) -> None:
        if request.seated_s is None:
            request.seated_s = self._virtual.now_s()
            self._last = self._mark()


def _ms(seconds: Sequence[float], share: float) -> float:
    return 1e3 * quantile(sorted(seconds), share) if seconds else 0.0
