"""rehearse: how many tokens a second a plan gives when it is served, found by serving in virtual time.

A plan's own figures are those of work units that pass through its lanes one after another. A service is not
like that: a slot keeps its lane while it has requests, and reads a prompt and answers by turns, so that its
devices wait for one another unless there are enough slots. So the service's own engine runs here under a full
load, over a stepper whose devices only count time: a step is its launches in order, in pieces of at most a
millisecond; a device serves one piece at a time, and first what is over soonest, as devices do in a run; from
one device to another bytes take their link's time. What is counted is modelled, by the plan's costs.

Not handled: launches of one step that could run on two devices at once, so divided steps look no better than
they are; and what the CPU does between two steps.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tessera.execute.flight import Routes
from tessera.execute.lower import lower
from tessera.execute.pick import Trial, pick
from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Tensors, Use
from tessera.ir import Plan, Program, Run
from tessera.serve.admission import width_of
from tessera.serve.engine import Engine
from tessera.serve.planning import Average
from tessera.serve.records import Ask, Sampling
from tessera.serve.rows import Request
from tessera.serve.state import EngineConfig
from tessera.serve.text import ByteText

# A device may turn to another step after so long.
SLICE_US = 1000.0
# Rounds of answers that are counted, after one in which the load becomes steady.
COUNTED = 2
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Launches that follow one another on one device, and how long what they give is under way."""

    device: int
    busy_us: float
    after_us: float
    # How long the device has still to do, this piece included, until the step goes on elsewhere or ends.
    left_us: float


def rehearse(plans: Sequence[Plan], shape: Shape, average: Average) -> list[float]:
    """Tokens a second of each plan under a full load of average requests, modelled."""
    return [_rate_per_s(plans, number, shape, average) for number in range(len(plans))]


def best_served(plans: Sequence[Plan], shape: Shape, average: Average) -> tuple[Plan, dict[str, float]]:
    """The plan to serve by, the first unless another is clearly better, and what each was found to give."""
    rates = rehearse(plans, shape, average)
    trials = [Trial(n, plan.policy, rate) for n, (plan, rate) in enumerate(zip(plans, rates, strict=True))]
    return plans[pick(trials).plan], {trial.policy: trial.per_s for trial in trials}


def _rate_per_s(plans: Sequence[Plan], number: int, shape: Shape, average: Average) -> float:
    stepper, load = VirtualStepper(plans, shape), random.Random(0)
    text, clients = ByteText(), shape.slots * shape.rows
    engine = Engine(stepper, (), EngineConfig(2 * clients, tuple(width_of(plan) for plan in plans)))
    engine.state.policy = number
    waiting: list[Request] = []

    def ask(tokens: int) -> None:
        length = load.randint(max(1, average.prompt - max(shape.chunk, 1) + 1), average.prompt)
        prompt = (0,) * min(length, shape.capacity - tokens)
        request = Request(Ask(prompt, tokens, GREEDY, ignores_end=True), text.reader(), ())
        waiting.append(request)
        engine.submit(request)

    for _ in range(clients):  # rows end one after another from the start, as they do later on
        ask(load.randint(1, average.output))
    marks: list[tuple[float, int]] = []
    finished = 0
    for goal in (clients, (1 + COUNTED) * clients):
        while finished < goal:
            engine.step()
            over = [request for request in waiting if request.is_over]
            for request in over:
                waiting.remove(request)
                ask(average.output)
            finished += len(over)
        marks.append((stepper.now_us, engine.meters.output_tokens))
    (start_us, before), (stop_us, after) = marks
    return (after - before) / (stop_us - start_us) * 1e6


@dataclass
class VirtualStepper:
    """Steps that compute nothing and take the time that plans say."""

    plans: Sequence[Plan]
    shape: Shape
    now_us: float = 0.0
    _events: list[Any] = field(default_factory=list)
    _waiting: dict[int, list[Any]] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.policies = tuple(plan.policy for plan in self.plans)
        self._routes = Routes(self.plans, [lower(plan) for plan in self.plans])
        self._index = {g.trace.step.kind: step for step, g in enumerate(self.plans[0].unit.graphs)}
        self._pieces = {
            (number, program.step): pieces_of(self.plans[route.policy], program)
            for number, route in enumerate(self._routes.all)
            for program in route.programs
        }
        self._is_free = [True] * len(self.plans[0].cluster.devices)
        self._waiting = {device: [] for device in range(len(self._is_free))}

    def open(self, slot: int, policy: int) -> int:
        """A lane of the policy."""
        number = self._routes.take(policy)
        assert number is not None, "no device is ever lost here"
        self._open[slot] = number
        return number

    def close(self, slot: int) -> None:
        """Gives the lane back."""
        self._routes.give_back(self._open.pop(slot))

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """Its first piece is ready now."""
        self._push(self.now_us, (slot, kind, self._pieces[self._open[slot], self._index[kind]]))

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """The next step that ends, whenever that is."""
        while self._events:
            self.now_us, _, what = heapq.heappop(self._events)
            if isinstance(what, int):
                self._is_free[what] = True
                self._serve(what)
                continue
            slot, kind, pieces = what
            if not pieces:
                rows = self.shape.rows if kind == "decode" else 1
                tokens = torch.zeros(rows, dtype=torch.int64)
                return StepDone(slot, kind, {} if kind == "insert" else {"next_tokens": tokens}, 0.0)
            self._count += 1
            device = pieces[0].device
            heapq.heappush(self._waiting[device], (pieces[0].left_us, self._count, what))
            self._serve(device)
        return None

    def wake(self) -> None:
        """Nobody sleeps."""

    def use(self) -> Use:
        """Nothing is shown."""
        return Use({}, {})

    def _serve(self, device: int) -> None:
        """The shortest piece that waits for a free device."""
        if not self._is_free[device] or not self._waiting[device]:
            return
        _, _, (slot, kind, pieces) = heapq.heappop(self._waiting[device])
        self._is_free[device] = False
        done_us = self.now_us + pieces[0].busy_us
        self._push(done_us, device)
        self._push(done_us + pieces[0].after_us, (slot, kind, pieces[1:]))

    def _push(self, at_us: float, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_us, self._count, what))


def pieces_of(plan: Plan, program: Program) -> tuple[Piece, ...]:
    """A step's launches in their order, by device; what crosses is spread over the crossings."""
    place = {
        i.launch: device
        for device, column in enumerate(program.instructions)
        for i in column
        if isinstance(i, Run)
    }
    runs: list[tuple[int, float]] = []
    for launch, device in sorted(place.items()):
        us = plan.costs[program.step].us(launch, device)
        if runs and runs[-1][0] == device:
            runs[-1] = (device, runs[-1][1] + us)
        else:
            runs.append((device, us))
    after_us = _wire_us(plan, program, len(runs) - 1) / max(1, len(runs) - 1)
    pieces: list[Piece] = []
    for number, (device, us) in enumerate(runs):
        parts = max(1, math.ceil(us / SLICE_US))
        left = [us * (parts - n) / parts for n in range(parts)]
        pieces += [Piece(device, us / parts, 0.0, left_us) for left_us in left]
        if number < len(runs) - 1:
            pieces[-1] = replace(pieces[-1], after_us=after_us)
    return tuple(pieces)


def _wire_us(plan: Plan, program: Program, crossings: int) -> float:
    """Time of all bytes of a step on their links, and a latency for every crossing."""
    total, latency = 0.0, 0.0
    for transfer in program.transfers:
        link = plan.cluster.link(transfer.src, transfer.dst)
        assert link is not None, "what is sent has a link"
        total += link.wire_us(transfer.num_bytes)
        latency = max(latency, link.latency_us)
    return total + crossings * latency
