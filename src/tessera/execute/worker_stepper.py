"""WorkerStepper: steps on one worker process a device; keeps `stepper.Stepper`.

Every step is one run of one program, ordered from all devices that take part in it. Orders go out in one
order, the same on every device. Where the plan moves state between two steps, the programs that do it run
before the later step, within its `start`.

When a device is lost, the microbatches whose lane uses it are closed and told with one message that names the
device and the instruction it was at; the hub starts its worker again. A run that takes too long is looked
into: the workers are asked where they are, and the one that is silent, or that the others wait for, is lost.
Where all answer, and one has sent what another waits for, it is the link between them that was cut: it is
opened again, and only the runs over it have to start again.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from tessera.errors import MismatchError, TesseraError, WorkerError
from tessera.execute.answers import problem_of
from tessera.execute.blame import Positions, judge, whereabouts
from tessera.execute.footprint import check_fits, footprints, ready_programs
from tessera.execute.hub import FORKSERVER, Hub, LocalHub, Lost, Up, hidden_main
from tessera.execute.inbox import Hangup, Wake
from tessera.execute.lanes import Lanes, LoadedLane
from tessera.execute.messages import (
    Begin,
    Cancel,
    Cancelled,
    Clear,
    Done,
    Failed,
    Message,
    PeerLost,
    Progress,
    Where,
)
from tessera.execute.packing import Packed, pack, pack_all, unpack_all
from tessera.execute.spans import SpanLog
from tessera.execute.stepper import (
    DeviceBack,
    DeviceLost,
    Event,
    StepCall,
    StepDone,
    Tensors,
    Use,
)
from tessera.execute.transport import AUTO, resolve
from tessera.execute.worker import Setup
from tessera.ir import BufferKind, Plan, Program, Run

__all__ = ["FORKSERVER", "MakeHub", "WorkerStepper", "hidden_main", "make_setups"]

# Makes the way to workers that are not processes of this machine.
MakeHub = Callable[[Sequence[Setup]], Hub]
# A worker that is asked where it is has this long to answer; it does so beside its work.
ANSWER_S = 3.0
# Workers that are lost so often in a row before all are ready end the start.
MAX_STARTS = 3
# A link that is cut so often in a row, without a step over it between, counts against the requests.
MAX_CUTS = 2
REMEDY = "Check the memory of this machine, then run again."


@dataclass
class _Microbatch:
    """One that is open."""

    number: int
    lane: LoadedLane
    # State that no run has used yet, by name.
    state: dict[str, torch.Tensor]
    # Index of the program that ran last; -1: none.
    at: int = -1
    call: StepCall | None = None
    # Indexes of the programs of this call that are still to run.
    left: deque[int] = field(default_factory=deque)
    began_s: float = 0.0
    # What has come of this call.
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)


@dataclass
class _Running:
    """One program that workers are at."""

    microbatch: _Microbatch
    index: int
    program: Program
    missing: set[int]
    # By when it must be over.
    until_s: float


@dataclass
class _Inquiry:
    """Workers that were asked where they are, because a run is late or a link was cut."""

    asked: set[int]
    until_s: float
    run: int | None = None
    # The two ends of the link, and what was said of it.
    ends: tuple[int, int] | None = None
    why: str = ""
    told: dict[int, Positions] = field(default_factory=dict)


class WorkerStepper:
    """A stepper over worker processes; in a `with` statement, which returns when all are ready.

    microbatches  how many can be open at once; by default as many as the plans have slots
    transport     how bytes travel between workers; see `transport`
    timeout_s     a step that takes longer counts the device that holds it up as lost; None: never
    hub           makes the way to the workers; by default processes of this machine
    max_failures  after so many failures in a row a device is given up for good; None: never
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        weights: Tensors,
        *,
        microbatches: int | None = None,
        num_threads: int = 1,
        transport: str = AUTO,
        timeout_s: float | None = None,
        method: str = "spawn",
        hub: MakeHub | None = None,
        max_failures: int | None = None,
        scale: float = 1.0,
        is_profiled: bool = False,
    ) -> None:
        self.plans = tuple(plans)
        self.lanes = Lanes(plans)
        programs = [ready_programs(plan) for plan in plans]
        self.footprints = footprints(plans, programs)
        check_fits(plans, self.footprints)
        # By the lane's number.
        self._programs = [lane for lanes in programs for lane in lanes]
        self._steps = [_steps_of(lane) for lane in self._programs]
        self.microbatches = microbatches or max(plan.slots for plan in plans)
        self._plan = self.plans[0]  # all have the same steps
        self._names = self._plan.cluster.names
        self._timeout_s = timeout_s
        chosen = resolve(transport, self._plan.cluster.devices, is_local=hub is None)
        setups = make_setups(
            self._plan, self._programs, weights, self.microbatches, num_threads, chosen, scale, is_profiled
        )
        self.hub = hub(setups) if hub is not None else LocalHub(self._names, setups, method)
        self.hub.max_failures = max_failures
        self._inputs = [{t.buffers[b].name for b in t.buffers_of(BufferKind.INPUT)} for t in setups[0].traces]
        # Where set, workers report every launch and transfer.
        self.spans: SpanLog | None = None
        self._open: dict[int, _Microbatch] = {}
        # Lost, and not told yet.
        self._dead: set[int] = set()
        # Microbatch -> (run, device) that was told to stop and has not said that it did; orders that wait.
        self._ending: dict[int, set[tuple[int, int]]] = {}
        self._held: dict[int, list[tuple[int, Message]]] = {}
        self._running: dict[int, _Running] = {}
        self._num_runs = 0
        self._inquiries: list[_Inquiry] = []
        self._events: deque[Event] = deque()
        # Link -> (run, device) of what was cancelled when it was opened again: until that is done, a device's
        # complaints are about the old link.
        self._stale: dict[tuple[int, int], set[tuple[int, int]]] = {}
        # Link -> how often it was cut without a step over it between.
        self._cuts: Counter[tuple[int, int]] = Counter()
        self._busy_s = dict.fromkeys(self._names, 0.0)
        self._moved: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> "WorkerStepper":
        try:
            self.hub.start()
            self._await_all()
        except BaseException:
            self.hub.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.hub.stop()

    def load(self, plans: Sequence[Plan]) -> None:
        """Sends the programs of other plans to the workers; what is open goes on."""
        if max(plan.slots for plan in plans) > self.microbatches:
            raise MismatchError(f"there are {self.microbatches} microbatches only", "Plan with fewer slots.")
        programs = [ready_programs(plan) for plan in plans]
        found = footprints(plans, programs)
        check_fits(plans, found)
        new = self.lanes.load(plans)
        lanes = [lane for lanes in programs for lane in lanes]
        self._programs += lanes
        self._steps += [_steps_of(lane) for lane in lanes]
        self.plans, self.footprints = tuple(plans), found
        self.hub.load(new[0].number, lanes)

    def open(self, microbatch: int, lane: int, state: Tensors | None = None) -> None:
        """Opens a microbatch; its state is sent with the first program that has it at home, or is zeros."""
        if microbatch in self._open or not 0 <= microbatch < self.microbatches:
            raise TesseraError(f"microbatch {microbatch} is open already, or not one of {self.microbatches}")
        found = self.lanes.all[lane]
        self._open[microbatch] = _Microbatch(microbatch, found, dict(state or {}))
        if state is None:
            for device in self._devices(found):
                self._order(microbatch, device, Clear(microbatch, lane))

    def close(self, microbatch: int) -> None:
        """Frees a microbatch that runs nothing."""
        if microbatch in self._dead:
            return
        if self._open[microbatch].call is not None:
            raise TesseraError(f"microbatch {microbatch} is at work")
        del self._open[microbatch]

    def start(self, call: StepCall) -> None:
        """Starts a step on every device that takes part in it."""
        if call.microbatch in self._dead:
            return
        opened = self._open[call.microbatch]
        if opened.call is not None:
            raise TesseraError(f"microbatch {call.microbatch} is at work")
        opened.left = deque(self._path(opened, call.step))
        opened.call, opened.began_s = call, time.monotonic()
        opened.outputs, opened.final, opened.busy_s = {}, {}, {}
        self._run_next(opened)

    def take(self, timeout_s: float | None) -> Event | None:
        """The next thing that happened; None after the timeout or a wake."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events:
            self._look_at_clock()
            if self._events:
                break
            times = [t for t in (until, self._next_s()) if t is not None]
            news = self.hub.take(max(0.0, min(times) - time.monotonic()) if times else None)
            if news is None:
                if until is not None and time.monotonic() >= until:
                    return None
            elif isinstance(news[1], Wake):
                return None
            else:
                self._hear(*news)
        event = self._events.popleft()
        if isinstance(event, DeviceLost):
            self._dead.difference_update(event.microbatches)
        return event

    def wake(self) -> None:
        """Makes `take` return; from any thread."""
        self.hub.wake()

    def use(self) -> Use:
        """What devices and links did since the start, and how devices are."""
        devices = {name: self.hub.status(device) for device, name in enumerate(self._names)}
        return Use(dict(self._busy_s), dict(self._moved), devices)

    def now_s(self) -> float:
        """This machine's clock."""
        return time.monotonic()

    def _await_all(self) -> None:
        """Until all workers are ready; one that says why it cannot start ends the start."""
        waiting = set(range(len(self._names)))
        while waiting:
            news = self.hub.take(None)
            assert news is not None, "there was no timeout"
            device, message = news
            place = f"device {self._names[device]}" if device >= 0 else ""
            match message:
                case Up():
                    waiting.discard(device)
                case Failed(text, remedy):
                    raise WorkerError(
                        f"could not start: {text}", remedy or "Lower --slots, or free memory.", place
                    )
                case Hangup(reason):
                    lost = self.hub.lose(device)
                    waiting.add(device)
                    if lost.failures >= MAX_STARTS or lost.retry_s is None:
                        what = reason or "the worker ended while it started"
                        raise WorkerError(f"{what} ({lost.how})", "Check this machine's memory.", place)

    def _path(self, opened: _Microbatch, step: int) -> list[int]:
        """Programs that lead from where a microbatch is to a step, the step's own last."""
        steps = self._steps[opened.lane.number]
        if step not in steps:
            raise MismatchError(f"lane {opened.lane.number} has no step {step}")
        index = steps[step]
        moves = set(range(len(self._programs[opened.lane.number]))) - set(steps.values())
        if any(index < move <= opened.at for move in moves):
            raise MismatchError(
                f"state moves between the steps of lane {opened.lane.index}, which cannot go back",
                "Plan the steps together as one served unit.",
            )
        first = opened.at + 1 if opened.at >= 0 else index
        return [*(i for i in range(first, index) if i in moves), index]

    def _run_next(self, opened: _Microbatch) -> None:
        """Orders the next program of a call from every device that takes part in it."""
        assert opened.call is not None, "a call is on"
        index = opened.left.popleft()
        program = self._programs[opened.lane.number][index]
        is_step, call = not opened.left, opened.call
        inputs: dict[str, Packed] = {}
        if is_step:
            wanted = self._inputs[program.step]
            inputs = pack_all({name: tensor for name, tensor in call.inputs.items() if name in wanted})
        fresh = self._take_state(opened, program)
        wants_state = is_step and call.wants_state
        devices = participants(program, {*fresh, *(d for _, d in program.homes if wants_state)})
        self._num_runs += 1
        until_s = float("inf") if self._timeout_s is None else time.monotonic() + self._timeout_s
        self._running[self._num_runs] = _Running(opened, index, program, set(devices), until_s)
        skips = ",".join(call.skips) if is_step else ""
        for device in devices:
            state = fresh.get(device, {})
            order = Begin(
                self._num_runs,
                opened.number,
                opened.lane.number,
                index,
                inputs,
                state,
                wants_state,
                self.spans is not None,
                skips,
            )
            self._order(opened.number, device, order)

    def _order(self, microbatch: int, device: int, order: Message) -> None:
        """Sends an order of a microbatch; those of one whose cancelled run is not over everywhere wait."""
        if self._ending.get(microbatch):
            self._held.setdefault(microbatch, []).append((device, order))
        else:
            self.hub.order(device, order)  # one that is gone is heard of as a hang-up

    def _over(self, is_over: Callable[[int, int], bool]) -> None:
        """Some cancelled runs (by run and device) are over; orders that waited for the last one go out."""
        for microbatch, ending in list(self._ending.items()):
            ending -= {pair for pair in ending if is_over(*pair)}
            if not ending:
                del self._ending[microbatch]
                for device, order in self._held.pop(microbatch, []):
                    self.hub.order(device, order)

    def _take_state(self, opened: _Microbatch, program: Program) -> dict[int, dict[str, Packed]]:
        """Device -> the state that lives there and that this run is the first to use."""
        buffers = self._plan.graphs[program.step].trace.buffers
        found: dict[int, dict[str, Packed]] = {}
        for buffer, device in program.homes:
            name = buffers[buffer].name
            if name in opened.state:
                found.setdefault(device, {})[name] = pack(opened.state.pop(name))
        return found

    def _devices(self, lane: LoadedLane) -> list[int]:
        return [device for device, name in enumerate(self._names) if name in lane.devices]

    def _hear(self, device: int, message: Any) -> None:
        match message:
            case Done():
                self._collect(device, message)
            case Cancelled(run):
                self._over(lambda of, at: (of, at) == (run, device))
                for stale in self._stale.values():
                    stale.discard((run, device))
            case Up():
                self.lanes.lost.discard(self._names[device])
                self._events.append(DeviceBack(self._names[device]))
            case Hangup(reason):
                self._lose(device, reason or "the worker process ended before its work was done")
            case Failed(text, remedy):
                self._lose(device, text, remedy)
            case PeerLost(peer, text, epoch) if 0 <= peer < len(self._names) and peer != device:
                is_stale = any(at == device for _, at in self._stale.get(_pair(device, peer), ()))
                if self.hub.is_ready(peer) and self.hub.epoch(peer) == epoch and not is_stale:
                    self._ask({device, peer}, ends=(device, peer), why=text)
            case Progress(rows):
                self._note(device, {int(run): int(position) for _, run, position in rows})
            case _:
                self._lose(device, f"the worker said {type(message).__name__} out of turn")

    def _collect(self, device: int, done: Done) -> None:
        """A device's share of a run."""
        running = self._running.get(done.run)
        if running is None:  # its microbatch was lost in the meantime
            return
        opened, program = running.microbatch, running.program
        assert opened.call is not None, "a call is on"
        is_step = not opened.left
        skips = opened.call.skips if is_step else ()
        trace = self._plan.graphs[program.step].trace
        wants_state = is_step and opened.call.wants_state
        wrong = problem_of(done, trace, program, device, running.missing, skips, wants_state)
        if wrong:
            self._lose(device, wrong)
            return
        running.missing.discard(device)
        opened.outputs |= unpack_all(done.outputs)
        opened.final |= unpack_all(done.state)
        opened.busy_s[self._names[device]] = opened.busy_s.get(self._names[device], 0.0) + done.busy_s
        self._busy_s[self._names[device]] += done.busy_s
        if self.spans is not None:
            self.spans.add(device, done, program, opened.number, self.hub.clock_offset_s)
        if running.missing:
            return
        del self._running[done.run]
        opened.at = running.index
        for transfer in program.transfers:
            self._moved[self._names[transfer.src], self._names[transfer.dst]] += transfer.num_bytes
            self._cuts.pop(_pair(transfer.src, transfer.dst), None)
        if opened.left:
            self._run_next(opened)
            return
        for one in participants(program, set()):
            self.hub.healthy(one)
        call, opened.call = opened.call, None
        seconds = time.monotonic() - opened.began_s
        self._events.append(
            StepDone(opened.number, call.step, opened.outputs, seconds, opened.final, opened.busy_s)
        )

    def _next_s(self) -> float | None:
        """When something is late."""
        asked = {inquiry.run for inquiry in self._inquiries}
        times = [running.until_s for run, running in self._running.items() if run not in asked]
        times += [inquiry.until_s for inquiry in self._inquiries]
        return None if not times or min(times) == float("inf") else min(times)

    def _look_at_clock(self) -> None:
        """Asks about runs that are late, and judges where nobody answers any more."""
        next_s = self._next_s()
        if next_s is None or time.monotonic() < next_s:
            return
        now = time.monotonic()
        for inquiry in [i for i in self._inquiries if i.until_s <= now]:
            if inquiry in self._inquiries:  # a loss ends inquiries
                self._decide(inquiry)
        asked = {inquiry.run for inquiry in self._inquiries}
        for run, running in self._running.items():
            if running.until_s <= now and run not in asked:
                self._ask(running.missing, run=run)

    def _ask(
        self,
        devices: Collection[int],
        run: int | None = None,
        ends: tuple[int, int] | None = None,
        why: str = "",
    ) -> None:
        """Has workers say where they are."""
        self._inquiries.append(_Inquiry(set(devices), time.monotonic() + ANSWER_S, run, ends, why))
        for device in devices:
            self.hub.order(device, Where())

    def _note(self, device: int, positions: Positions) -> None:
        """What a worker says of itself."""
        for inquiry in list(self._inquiries):
            if device in inquiry.asked and inquiry in self._inquiries:
                inquiry.told.setdefault(device, positions)
                if inquiry.asked == inquiry.told.keys():
                    self._decide(inquiry)

    def _decide(self, inquiry: _Inquiry) -> None:
        """Who is silent is lost; else who holds up the run, or the link."""
        self._inquiries.remove(inquiry)
        running = self._running.get(inquiry.run) if inquiry.run is not None else None
        if inquiry.ends is None and running is None:  # it has ended meanwhile
            return
        silent = sorted(inquiry.asked - inquiry.told.keys())
        for device in silent:
            self._lose(device, f"no answer within {self._timeout_s or ANSWER_S:g} s")
        if silent:
            return
        if inquiry.ends is not None:
            self._cut(*inquiry.ends, inquiry.why)
        elif running is not None and inquiry.run is not None:
            if not running.missing <= inquiry.told.keys():
                return
            verdict = judge(running.program, inquiry.run, running.missing, inquiry.told)
            what = f"its work was not done within {self._timeout_s:g} s"
            if verdict.source is not None:
                self._cut(
                    verdict.device,
                    verdict.source,
                    f"what was sent has not arrived within {self._timeout_s:g} s",
                )
            else:
                self._lose(verdict.device, what, is_certain=verdict.is_certain)

    def _cut(self, device: int, peer: int, why: str) -> None:
        """Opens a link again; the runs that use it are over, since nobody knows what was lost with it."""
        pair = _pair(device, peer)
        hit = [
            running.microbatch.number
            for running in self._running.values()
            if any(_pair(t.src, t.dst) == pair for t in running.program.transfers)
        ]
        self.hub.relink(device, peer)
        if not hit:
            return
        self._cuts[pair] += 1
        over = [
            (run, running.missing)
            for run, running in self._running.items()
            if running.microbatch.number in hit
        ]
        self._stale[pair] = {(run, at) for run, missing in over for at in missing if at in pair}
        self._end(hit, set())
        one, two = self._names[device], self._names[peer]
        message = (
            f"the link between {one} and {two} was cut ({why}); both workers answer, and it is opened again"
        )
        is_certain = self._cuts[pair] > MAX_CUTS
        self._events.append(DeviceLost(one, tuple(sorted(hit)), message, 0, 0.0, is_certain))
        self._events.append(DeviceBack(one))

    def _lose(self, device: int, what: str, remedy: str = "", is_certain: bool = True) -> None:
        """Ends a worker, closes the microbatches whose lane uses its device, and has another started."""
        where = self._whereabouts(device)
        lost = self.hub.lose(device)
        place = f"device {self._names[device]}"
        message = str(WorkerError(f"{what} ({lost.how}), {where}", remedy or REMEDY, place))
        self._tell_lost(device, message, lost, is_certain)
        if not self.hub.restarts_together:
            return
        for other, name in enumerate(self._names):
            if other != device:
                others = self.hub.lose(other, counts=False)
                message = f"device {name}: started again, since {self._names[device]} was lost"
                self._tell_lost(other, message, others, is_certain)

    def _tell_lost(self, device: int, message: str, lost: Lost, is_certain: bool) -> None:
        name = self._names[device]
        self.lanes.lost.add(name)
        self._inquiries = [i for i in self._inquiries if device not in i.asked]
        self._stale = {pair: stale for pair, stale in self._stale.items() if device not in pair}
        hit = [number for number, opened in self._open.items() if name in opened.lane.devices]
        self._end(hit, {device})
        self._events.append(
            DeviceLost(name, tuple(sorted(hit)), message, lost.failures, lost.retry_s, is_certain)
        )

    def _end(self, microbatches: Collection[int], gone: Collection[int]) -> None:
        """Closes microbatches; whoever still works for one is told to stop."""
        for run in [r for r, running in self._running.items() if running.microbatch.number in microbatches]:
            running = self._running.pop(run)
            number = running.microbatch.number
            if self._held.pop(number, None) is not None:
                continue  # nobody has heard of it
            for other in running.missing - set(gone):
                self._ending.setdefault(number, set()).add((run, other))
                self.hub.order(other, Cancel(run))
        for number in microbatches:
            self._held.pop(number, None)
        self._over(lambda run, device: device in gone)
        for number in microbatches:
            del self._open[number]
        self._dead.update(microbatches)

    def _whereabouts(self, device: int) -> str:
        """What a device was at, as far as it is known."""
        known = dict(self.hub.progress(device).values())
        for inquiry in self._inquiries:
            known |= inquiry.told.get(device, {})
        mine = []
        for run, running in self._running.items():
            what = f"microbatch {running.microbatch.number}"
            if known.get(run, -1) >= 0:
                return whereabouts(self._plan, running.program, device, known[run], what)
            if device in running.missing:
                mine.append(what)
        return f"before its share of {min(mine)}" if mine else "with no work of its own"


def make_setups(
    plan: Plan,
    programs: Sequence[Sequence[Program]],
    weights: Tensors,
    microbatches: int,
    num_threads: int = 1,
    transport: str = "shm",
    scale: float = 1.0,
    is_profiled: bool = False,
) -> list[Setup]:
    """What each worker is born with; `programs` by the lane's number."""
    traces = tuple(g.trace for g in plan.graphs)
    names = {t.buffers[b].name for t in traces for b in t.buffers_of(BufferKind.WEIGHT)}
    own = {name: _shared(tensor) for name, tensor in weights.items() if name in names}
    return [
        Setup(
            device,
            plan.cluster,
            traces,
            list(programs),
            own,
            microbatches,
            num_threads,
            transport,
            epochs=(0,) * len(plan.cluster.devices),
            scale=scale,
            is_profiled=is_profiled,
            us=tuple(tuple(row[device].us for row in costs.costs) for costs in plan.prices),
        )
        for device in range(len(plan.cluster.devices))
    ]


def participants(program: Program, taking: Collection[int]) -> list[int]:
    """Devices with something to do: instructions, an output to hand over, or state to take in or hand out."""
    holding = {device for _, device in program.outputs} | set(taking)
    return [d for d, column in enumerate(program.instructions) if column or d in holding]


def _steps_of(programs: Sequence[Program]) -> dict[int, int]:
    """Step -> index of its program; the others only move state."""
    return {
        program.step: index
        for index, program in enumerate(programs)
        if any(isinstance(i, Run) for column in program.instructions for i in column)
    }


def _pair(one: int, two: int) -> tuple[int, int]:
    return min(one, two), max(one, two)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that other processes can have."""
    shared: torch.Tensor = tensor.detach().share_memory_()
    return shared
