"""VirtualStepper: steps that compute nothing and take their true time on a virtual clock.

`take` moves the clock to the next end of a step, loss or return of a device, or by its timeout. A step takes
its true costs times its `scale`. State that an earlier step left elsewhere moves before the later step, in
proportion to the earlier scale; state of joining rows never moves back. Moves of pages take their links one
after the other and no device's time.

True costs (`Truth`) are independent of the costs that plans were made with. Not handled: counts of bytes that
steps transfer, moves and steps that compete for a link, and memory.
"""

import heapq
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from tessera.adapt.drift import scaled_costs
from tessera.execute import stepper
from tessera.execute.lanes import Lanes, LoadedLane
from tessera.ir import Cluster, Plan
from tessera.simulate.columns import ScriptedSteps, Scripts, Wires
from tessera.simulate.core import VirtualMachine, Work


@dataclass(frozen=True)
class Truth:
    """Factors by kernel type (drawn from the seed) and by device."""

    plan: Plan
    noise: float = 0.0
    seed: int = 0
    slow: tuple[tuple[str, float], ...] = ()

    @property
    def cluster(self) -> Cluster:
        return self.plan.cluster

    def factor(self, kernel: str, device: str) -> float:
        slowdown = math.prod(factor for name, factor in self.slow if name == device)
        if not self.noise:
            return slowdown
        words = [self.seed, zlib.crc32(kernel.encode()), zlib.crc32(device.encode())]
        return slowdown * math.exp(self.noise * float(np.random.default_rng(words).standard_normal()))

    def scripts(self, plan: Plan) -> Scripts:
        """Steps that the true plan lacks cost what their own plan says."""
        true_costs = {g.trace.digest: x for g, x in zip(self.plan.graphs, self.plan.costs, strict=True)}
        costs = tuple(true_costs.get(g.trace.digest, x) for g, x in zip(plan.graphs, plan.costs, strict=True))
        return Scripts(plan.unit, scaled_costs(plan.unit, costs, self.factor), self.cluster)


@dataclass(frozen=True, slots=True)
class Loss:
    device: str
    at_s: float
    # None: it does not return.
    back_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    losses: tuple[Loss, ...] = ()
    # (device, second, factor)
    slowdowns: tuple[tuple[str, float, float], ...] = ()
    # Requests wait for lost devices instead of failing.
    is_mended: bool = False


NO_FAULTS = Faults()


@dataclass(slots=True)
class _Open:
    lane: int
    call: stepper.StepCall | None = None
    since_us: float = 0.0
    works: tuple[Work, ...] = ()
    is_running: bool = False
    queued: stepper.StepCall | None = None
    ordered_us: float = 0.0


@dataclass(frozen=True, slots=True)
class _VirtualMove:
    move: stepper.PageMove
    since_us: float
    # By (source, destination).
    num_bytes: Counter[tuple[int, int]]


class VirtualStepper:
    def __init__(
        self,
        plans: Sequence[Plan],
        truth: Truth | None = None,
        faults: Faults = NO_FAULTS,
        host_us: float = 0.0,
    ) -> None:
        """`host_us`: the host settles a step and orders the next, one after another."""
        self.plans, self.lanes = tuple(plans), Lanes(plans)
        self._truth, self._faults = truth or Truth(plans[0]), faults
        self._names = self._truth.cluster.names
        self._host_us, self._host_free_us = host_us, 0.0
        self._scripts: dict[tuple[int, ...], Scripts] = {}
        self._wires = Wires(self._truth.cluster)
        num_devices, num_buses = len(self._names), len(self._wires.buses)
        self.machine = VirtualMachine(num_devices, num_buses)
        self._open: dict[int, _Open] = {}
        self._moves: dict[int, _VirtualMove] = {}
        self._bus_free_us = [0.0] * num_buses
        self._moved: Counter[tuple[str, str]] = Counter()
        # By lane.
        self._steps: dict[int, ScriptedSteps] = {}
        self._agenda: list[tuple[float, int, Callable[[], stepper.Event | None]]] = []
        self._order = count()
        for loss in faults.losses:
            self._at(loss.at_s, lambda loss=loss: self._lose(loss))  # type: ignore[misc]
            if loss.back_s is not None:
                self._at(loss.back_s, lambda name=loss.device: self._return(name))  # type: ignore[misc]
        for name, second, factor in faults.slowdowns:
            self._at(second, lambda name=name, factor=factor: self._slow_down(name, factor))  # type: ignore[misc]

    def __enter__(self) -> "VirtualStepper":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def load(self, plans: Sequence[Plan]) -> None:
        self.lanes.load(plans, self._open)
        self.plans = tuple(plans)
        self._drop_lanes()

    def _drop_lanes(self) -> None:
        if self.lanes.replaced:
            moves = [pending.move for pending in self._moves.values()]
            ends = (number for move in moves for number in (move.source, move.destination))
            homes = {self.lanes.all[self._open[number].lane].home for number in ends}
            lanes = {entry.lane for entry in self._open.values()}
            self.lanes.drop(lanes, {home for home in homes if home is not None})

    def open(self, microbatch: int, lane: int, state: stepper.Tensors | None = None) -> None:
        self._open[microbatch] = _Open(lane)

    def close(self, microbatch: int) -> None:
        self._open.pop(microbatch, None)
        self._fail_moves({microbatch}, "one of its microbatches was closed")
        self._drop_lanes()

    def can_queue(self, microbatch: int) -> bool:
        entry = self._open.get(microbatch)
        return entry is not None and entry.queued is None and self.lanes.all[entry.lane].can_queue

    def start(self, call: stepper.StepCall) -> None:
        entry, now_us = self._open[call.microbatch], self.machine.now_us
        self._host_free_us = max(now_us, self._host_free_us) + self._host_us
        if entry.is_running:
            entry.queued, entry.ordered_us = call, self._host_free_us
        else:
            self._begin_at(self._host_free_us, entry, call)

    def give(self, microbatch: int, inputs: stepper.Tensors) -> None:
        """Nothing is computed."""

    def _begin_at(self, at_us: float, entry: _Open, call: stepper.StepCall) -> None:
        if at_us <= self.machine.now_us:
            self._begin(entry, call)
            return

        def begin() -> None:
            if self._open.get(call.microbatch) is entry:
                self._begin(entry, call)

        entry.is_running = True
        self._at(at_us * 1e-6, begin)

    def _begin(self, entry: _Open, call: stepper.StepCall) -> None:
        entry.is_running, entry.works = True, self._works_of(entry, call)
        entry.call, entry.since_us = call, self.machine.now_us
        self.machine.start(call.microbatch, entry.works)

    def move(self, move: stepper.PageMove) -> None:
        ends = [self._open.get(number) for number in (move.source, move.destination)]
        lanes = [None if entry is None else self.lanes.all[entry.lane] for entry in ends]
        now_us = until_us = self.machine.now_us
        num_bytes: Counter[tuple[int, int]] = Counter()
        for route in stepper.routes_of(move, self.lanes, lanes[0], lanes[1]):
            num_bytes[route.source, route.destination] += route.num_bytes
        for (src, dst), size in num_bytes.items():
            if src != dst:
                wire = self._wires.of(0, src, dst, size)
                start_us = max(now_us, self._bus_free_us[wire.bus])
                self._bus_free_us[wire.bus] = start_us + wire.wire_us
                until_us = max(until_us, start_us + wire.wire_us + wire.latency_us)
        self._moves[move.number] = _VirtualMove(move, now_us, num_bytes)
        self._at(until_us * 1e-6, lambda: self._moved_all(move))

    def _moved_all(self, move: stepper.PageMove) -> stepper.Moved | None:
        pending = self._moves.get(move.number)
        if pending is None or pending.move is not move:
            return None
        del self._moves[move.number]
        for (src, dst), size in pending.num_bytes.items():
            self._moved[self._names[src], self._names[dst]] += size
        seconds = (self.machine.now_us - pending.since_us) * 1e-6
        return stepper.Moved(move.number, "", seconds, pending.num_bytes.total())

    def _fail_moves(self, microbatches: Collection[int], why: str) -> None:
        for number, pending in list(self._moves.items()):
            if pending.move.source in microbatches or pending.move.destination in microbatches:
                del self._moves[number]
                seconds = (self.machine.now_us - pending.since_us) * 1e-6
                failed = stepper.Moved(number, why, seconds)
                self._at(self.now_s(), lambda failed=failed: failed)  # type: ignore[misc]

    def take(self, timeout_s: float | None) -> stepper.Event | None:
        """None at once if there is nothing to wait for and no timeout."""
        limit_us = float("inf") if timeout_s is None else self.machine.now_us + timeout_s * 1e6
        while True:
            next_us = self._agenda[0][0] if self._agenda else float("inf")
            microbatch = self.machine.take(min(limit_us, next_us))
            if microbatch is not None:
                return self._done(microbatch)
            if next_us > limit_us or not self._agenda:
                return None
            event = heapq.heappop(self._agenda)[2]()
            if event is not None:
                return event

    def wake(self) -> None:
        """No-op: the virtual clock never blocks."""

    def use(self) -> stepper.DeviceUse:
        lost = self.lanes.lost
        status = {name: stepper.DeviceStatus("lost" if name in lost else "ready") for name in self._names}
        busy = dict(zip(self._names, (us * 1e-6 for us in self.busy_us), strict=False))
        return stepper.DeviceUse(busy, dict(self._moved), status)

    def now_s(self) -> float:
        return self.machine.now_us * 1e-6

    @property
    def busy_us(self) -> list[float]:
        return self.machine.busy_us

    def _done(self, microbatch: int) -> stepper.StepDone:
        entry = self._open[microbatch]
        call, (script, scale) = entry.call, entry.works[-1]
        assert call is not None, "what ends was started"
        named_us = zip(self._names, script.device_us, strict=True)
        busy_s = {name: us * scale * 1e-6 for name, us in named_us if us}
        seconds = (self.machine.now_us - entry.since_us) * 1e-6
        entry.is_running = False
        if entry.queued is not None:
            queued, entry.queued = entry.queued, None
            self._begin_at(entry.ordered_us, entry, queued)
        return stepper.StepDone(microbatch, call.step, {}, seconds, busy_s=busy_s)

    def _works_of(self, entry: _Open, call: stepper.StepCall) -> tuple[Work, ...]:
        last, steps = entry.call, self._steps_of(self.lanes.all[entry.lane])
        moves: list[Work] = []
        if last is not None:
            moves = [(move, last.scale) for n in range(last.step + 1, call.step + 1) for move in steps[n][0]]
        return (*moves, (steps[call.step][1], call.scale))

    def _steps_of(self, lane: LoadedLane) -> ScriptedSteps:
        if lane.number not in self._steps:
            if lane.steps not in self._scripts:
                self._scripts[lane.steps] = self._truth.scripts(lane.plan)
            self._steps[lane.number] = self._scripts[lane.steps].steps(lane.lane.placement)
        return self._steps[lane.number]

    def _at(self, second: float, action: Callable[[], stepper.Event | None]) -> None:
        heapq.heappush(self._agenda, (second * 1e6, next(self._order), action))

    def _lose(self, loss: Loss) -> stepper.DeviceLost | None:
        name = loss.device
        if name in self.lanes.lost:
            return None
        self.lanes.lost.add(name)
        gone = [n for n, entry in self._open.items() if name in self.lanes.all[entry.lane].devices]
        self.machine.drop(gone)
        for number in gone:
            del self._open[number]
        self._fail_moves(gone, f"{name} was lost")
        retry_s = float("inf") if self._faults.is_mended else None
        if loss.back_s is not None:
            retry_s = loss.back_s - loss.at_s
        return stepper.DeviceLost(
            name, tuple(gone), f"{name} was lost at {loss.at_s:g} s (simulated)", 1, retry_s
        )

    def _return(self, name: str) -> stepper.DeviceBack:
        self.lanes.lost.discard(name)
        return stepper.DeviceBack(name)

    def _slow_down(self, name: str, factor: float) -> None:
        self._truth = replace(self._truth, slow=(*self._truth.slow, (name, factor)))
        self._scripts.clear()
        self._steps.clear()
