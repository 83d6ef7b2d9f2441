"""WorkerStepper: the steps of a served model on one worker process a device; keeps `serving.Stepper`.

The workers, lanes and messages are the engine's. What differs is who says what comes next: here every run is
one step of one slot, asked for by the caller. Steps of a slot come in any order, so all of them must find the
slot's state where it is: a plan whose lanes would move state between steps is refused.

When a device is lost, the slots whose lane uses it are closed and reported with one message that names the
device and the instruction it was at. Other slots go on, and new ones open on lanes that avoid the device.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute.answers import problem_of
from tessera.execute.blame import blame, whereabouts
from tessera.execute.crew import MakeHub, make_crew
from tessera.execute.flight import Route, participants
from tessera.execute.inbox import Hangup, Wake
from tessera.execute.messages import Begin, Cancel, Clear, Done, Failed, PeerLost
from tessera.execute.packing import pack_all, unpack_all
from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Tensors, Use
from tessera.ir import BufferKind, Plan, Program, need_one_batch


@dataclass
class _Running:
    """One step of one slot that workers are at."""

    slot: int
    kind: StepKind
    program: Program | None
    missing: set[int]
    began_s: float
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    # Outputs that nobody asks for.
    skips: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        return f"slot {self.slot}"


class WorkerStepper:
    """A stepper over worker processes, for one or more plans of one served unit.

    timeout_s  a step that takes longer counts its slowest device as lost; None: never
    hub        makes the way to the workers; by default processes of this machine
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        weights: Tensors,
        shape: Shape,
        *,
        num_threads: int = 1,
        transport: str = "shm",
        timeout_s: float | None = None,
        method: str = "spawn",
        hub: MakeHub | None = None,
    ) -> None:
        for plan in plans:
            need_one_batch(plan, "a service")
        crew = make_crew(plans, weights, num_threads, transport, False, method, hub)
        self._plans, self._routes, self._hub = crew.plans, crew.routes, crew.hub
        self.footprints, self.shape = crew.footprints, shape
        self.policies = tuple(plan.policy for plan in self._plans)
        self._names = self._plans[0].cluster.names
        self._timeout_s = timeout_s
        traces = [g.trace for g in self._plans[0].unit.graphs]
        self._index = {trace.step.kind: step for step, trace in enumerate(traces)}
        self._inputs = [{t.buffers[b].name for b in t.buffers_of(BufferKind.INPUT)} for t in traces]
        for route in self._routes.all:
            check_homes(self._plans[0], route)
        # Slot -> its route.
        self._open: dict[int, int] = {}
        self._running: dict[int, _Running] = {}
        self._tickets = 0
        self._lost: deque[SlotsLost] = deque()
        self._busy_s = dict.fromkeys(self._names, 0.0)
        self._moved: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> "WorkerStepper":
        try:
            self._hub.start()
        except BaseException:
            self._hub.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._hub.stop()

    def open(self, slot: int, policy: int) -> int:
        """Gives a free slot a lane of a policy, with empty state."""
        if slot in self._open or not 0 <= slot < self.shape.slots:
            raise TesseraError(f"slot {slot} is open already, or not one of {self.shape.slots}")
        number = self._routes.take(policy)
        if number is None:
            lost = ", ".join(self._names[d] for d in sorted(self._routes.lost))
            raise WorkerError(f"no lane avoids {lost}", "Start the service again.")
        self._open[slot] = number
        for device in sorted(self._routes.all[number].devices):
            self._hub.order(device, Clear(slot, number))  # one that is gone is heard of as a hang-up
        return number

    def close(self, slot: int) -> None:
        """Frees a slot that runs nothing."""
        if any(running.slot == slot for running in self._running.values()):
            raise TesseraError(f"slot {slot} is at work")
        self._routes.give_back(self._open.pop(slot))

    def run(self, slot: int, kind: StepKind, inputs: Tensors, skips: tuple[str, ...] = ()) -> None:
        """Starts a step on every device that takes part in it."""
        number, index = self._open[slot], self._index[kind]
        program = self._routes.all[number].programs[index]
        given = pack_all({n: t for n, t in inputs.items() if n in self._inputs[index]})
        devices = participants(program, set())
        self._tickets += 1
        began_s = time.monotonic()
        self._running[self._tickets] = _Running(slot, kind, program, set(devices), began_s, skips=skips)
        order = Begin(self._tickets, slot, number, index, given, {}, False, False, ",".join(skips))
        for device in devices:
            self._hub.order(device, order)

    def take(self, timeout_s: float | None) -> StepDone | SlotsLost | None:
        """The next thing that happened; None after the timeout or a wake."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._lost:
            left = None if until is None else max(0.0, until - time.monotonic())
            patience = self._patience()
            is_last = patience is None or (left is not None and left < patience)
            news = self._hub.take(left if is_last else patience)
            if news is None and is_last:
                return None
            if news is None:
                self._time_out()
            elif isinstance(news[1], Wake):
                return None
            else:
                done = self._hear(*news)
                if done is not None:
                    return done
        return self._lost.popleft()

    def wake(self) -> None:
        """Makes `take` return; from any thread."""
        self._hub.wake()

    def use(self) -> Use:
        """Seconds of launches on each device, and bytes between devices, since the start."""
        return Use(dict(self._busy_s), dict(self._moved))

    def _hear(self, device: int, message: object) -> StepDone | None:
        match message:
            case Done():
                return self._collect(device, message)
            case Hangup(reason):
                self._lose(device, reason or "the worker process ended before its work was done")
            case Failed(text, remedy):
                self._lose(device, text, remedy)
            case PeerLost(peer, text) if 0 <= peer < len(self._names):
                self._lose(peer, f"{self._names[device]} cannot reach it ({text})")
            case _:
                self._lose(device, f"the worker said {type(message).__name__} out of turn")
        return None

    def _collect(self, device: int, done: Done) -> StepDone | None:
        """A device's share of a step; the step, when it was the last one."""
        running = self._running.get(done.ticket)
        if running is None:  # its slot was lost in the meantime
            return None
        assert running.program is not None, "a step that runs has a program"
        trace = self._plans[0].unit.graphs[running.program.step].trace
        wrong = problem_of(done, trace, running.program, device, running.missing, running.skips)
        if wrong:
            self._lose(device, wrong)
            return None
        running.missing.discard(device)
        running.outputs |= unpack_all(done.outputs)
        self._busy_s[self._names[device]] += done.busy_s
        if running.missing:
            return None
        del self._running[done.ticket]
        for transfer in running.program.transfers:
            self._moved[self._names[transfer.src], self._names[transfer.dst]] += transfer.num_bytes
        return StepDone(running.slot, running.kind, running.outputs, time.monotonic() - running.began_s)

    def _patience(self) -> float | None:
        """How long nothing may happen before a step is late."""
        if self._timeout_s is None or not self._running:
            return None
        oldest = min(running.began_s for running in self._running.values())
        return max(0.0, oldest + self._timeout_s - time.monotonic())

    def _time_out(self) -> None:
        ticket, running = min(self._running.items(), key=lambda item: item[1].began_s)
        self._lose(blame(self._hub, ticket, running), f"no answer within {self._timeout_s:g} s")

    def _lose(self, device: int, what: str, remedy: str = "") -> None:
        """Takes a device out, and closes the slots whose lane uses it."""
        if device in self._routes.lost:
            return
        where = whereabouts(self._plans[0], self._hub, device, self._running)
        how = self._hub.end(device)
        fault = WorkerError(
            f"{what} ({how}), {where}",
            remedy or "Check the memory of this machine, then run again.",
            f"device {self._names[device]}",
        )
        self._routes.lose(device)
        slots = tuple(s for s, n in self._open.items() if device in self._routes.all[n].devices)
        for ticket in [t for t, running in self._running.items() if running.slot in slots]:
            for other in self._running.pop(ticket).missing - self._routes.lost:
                self._hub.order(other, Cancel(ticket))
        for slot in slots:
            del self._open[slot]
        is_over = not self._routes.open()
        self._lost.append(SlotsLost(tuple(sorted(slots)), self._names[device], str(fault), is_over))


def check_homes(plan: Plan, route: Route) -> None:
    """Every state must live in one place in all steps of a lane."""
    homes: dict[str, int] = {}
    for program in route.programs:
        buffers = plan.unit.graphs[program.step].trace.buffers
        for buffer, device in program.homes:
            name = buffers[buffer].name
            if homes.setdefault(name, device) != device:
                raise MismatchError(
                    f"state '{name}' moves between the steps of lane {route.lane}",
                    "Plan chunk, insert and decode together as one served unit.",
                )
    assert len(route.programs) == len(plan.unit.graphs), "programs that move state have been refused"
