"""WorkerStepper: a `stepper.Stepper` over one worker process per device.

When a run is late, workers are asked for their positions: one that is silent, or that the others wait for, is
lost; its microbatches are closed and the hub restarts it. If one has sent what another waits for, the link
was cut: it is reopened, and only runs over it restart.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.errors import DeviceMemoryError, MismatchError, TesseraError, WorkerError
from tessera.execute import messages, stepper
from tessera.execute.hub import Hub, LostWorker, Wake
from tessera.execute.lanes import Lanes, LoadedLane, shared_out
from tessera.execute.lower import describe
from tessera.execute.mailbox import Hangup
from tessera.execute.memory import Footprint, Programs, check_fits, footprints, ready_programs
from tessera.execute.processes import FORKSERVER
from tessera.execute.runs import MoveUnderWay, Runs
from tessera.execute.transport import AUTO, resolve
from tessera.ir import BufferKind, Plan, Program, Recv, Send

MakeHub = Callable[[Sequence[messages.Setup]], Hub]
# For a worker's position; a separate thread answers.
ANSWER_S = 3.0
MAX_STARTS = 3
# Cuts of a link in a row, without a step over it, after which losses count against requests.
MAX_CUTS = 2
REMEDY = "Check the memory of this machine, then run again."
# Run -> position of the last issued instruction; -1: none yet.
Positions = Mapping[int, int]


@dataclass
class _Inquiry:
    devices: set[int]
    run: int = -1
    ends: tuple[int, int] | None = None
    why: str = ""
    answers: dict[int, Positions] = field(default_factory=dict)
    until_s: float = field(default_factory=lambda: time.monotonic() + ANSWER_S)


class WorkerStepper(Runs):
    """A context manager, ready when all workers are.

    timeout_s     limit of a step, after which the device that blocks it is lost; None: none
    max_failures  see `Hub`
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        weights: stepper.Tensors,
        *,
        microbatches: int | None = None,
        transport: str = AUTO,
        timeout_s: float | None = None,
        method: str = FORKSERVER,
        hub: MakeHub | None = None,
        max_failures: int | None = None,
        scale: float = 1.0,
        is_profiled: bool = False,
    ) -> None:
        self.microbatches = microbatches or max(plan.microbatches for plan in plans)
        self.plans, loaded = tuple(plans), Lanes(plans, self.microbatches)
        self._lowered = {id(plan): ready_programs(plan) for plan in plans}
        self.footprints = self._check_memory(plans)
        lanes = _numbered(loaded.all, self._lowered)
        chosen = resolve(transport, plans[0].cluster.devices, is_local=hub is None)
        sizes = (self.microbatches, chosen, scale, is_profiled)
        setups = messages.make_setups(loaded, lanes, weights, *sizes)
        workers = hub(setups) if hub is not None else Hub(plans[0].cluster.names, setups, method)
        workers.max_failures = max_failures
        super().__init__(loaded, workers, timeout_s)
        self.add(lanes)
        self._inquiries: list[_Inquiry] = []
        # Link -> runs cancelled when it was reopened: until they end, complaints are about the old link.
        self._stale: dict[tuple[int, int], list[int]] = {}
        # In a row, without a step over the link.
        self._cuts: Counter[tuple[int, int]] = Counter()

    def __enter__(self) -> "WorkerStepper":
        try:
            self.hub.start()
            self._await_all()
        except BaseException:
            self.hub.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.hub.stop()

    def load(self, plans: Sequence[Plan]) -> None:
        if max(plan.microbatches for plan in plans) > self.microbatches:
            message = f"there are {self.microbatches} microbatches only"
            raise MismatchError(message, "Plan with fewer (--microbatches).")
        self._check_weights(plans)
        replaced = {id(plan): plan for plan in (*self.lanes.replaced, *self.plans)}
        self._lowered = {key: self._lowered[key] for key in replaced}
        self._lowered |= {id(plan): ready_programs(plan) for plan in plans if id(plan) not in replaced}
        others = list({id(opened.lane.plan): opened.lane for opened in self.opened.values()}.values())
        in_use: Collection[int] = self.opened.keys()
        try:
            needed = self._check_memory(plans, others, in_use)
        except DeviceMemoryError:  # for other microbatches than devices had
            needed, in_use = self._check_memory(plans, others), ()
        num_steps = len(self.lanes.graphs)
        new = self.lanes.load(plans, in_use)
        lanes = _numbered(new, self._lowered)
        self.add(lanes)
        self.plans, self.footprints = tuple(plans), needed
        traces = tuple(graph.trace for graph in self.lanes.graphs[num_steps:])
        us = [messages.modelled_us(self.lanes, device, num_steps) for device in range(len(self._names))]
        programs, numbers = tuple(map(tuple, lanes)), tuple(tuple(lane.microbatches) for lane in new)
        self._drop_lanes([messages.LoadLanes(programs, traces, rows, numbers) for rows in us])

    def _check_memory(
        self, plans: Sequence[Plan], old: Sequence[LoadedLane] = (), in_use: Collection[int] = ()
    ) -> tuple[Footprint, ...]:
        every = [*plans, *(lane.plan for lane in old)]
        numbers = [*shared_out(plans, self.microbatches, in_use), *(lane.microbatches for lane in old)]
        needed = footprints(every, [self._lowered[id(plan)] for plan in every], numbers)
        check_fits(every, needed)
        return needed

    def _check_weights(self, plans: Sequence[Plan]) -> None:
        shared = self.hub.setups[0].weights
        for trace in (graph.trace for plan in plans for graph in plan.graphs):
            for weight in (trace.buffers[b] for b in trace.buffers_of(BufferKind.WEIGHT)):
                if not weight.constant_hex and weight.name not in shared:
                    message = f"the workers have no weight '{weight.name}' of the {trace.step.kind} step"
                    raise MismatchError(message, "Start the workers with a plan for this model.")

    def _drop_lanes(self, new: Sequence[messages.LoadLanes] = ()) -> None:
        """Frees lanes of replaced plans, and their pages, once nothing uses them."""
        dropped: list[int] = []
        if self.lanes.replaced:
            homes = {home for entry in self.moves for home in entry.homes if home is not None}
            dropped = self.lanes.drop({opened.lane.number for opened in self.opened.values()}, homes)
        if dropped or new:
            self.hub.load(new, dropped)

    def open(self, microbatch: int, lane: int, state: stepper.Tensors | None = None) -> None:
        if microbatch in self.opened or microbatch not in self.lanes.all[lane].microbatches:
            raise TesseraError(f"microbatch {microbatch} is open already, or not one of lane {lane}")
        self._open(microbatch, self.lanes.all[lane], state)

    def move(self, move: stepper.PageMove) -> None:
        ends = (move.source, move.destination)
        if any(number in self.dead for number in ends):
            self._events.append(stepper.Moved(move.number, "the device of one of its microbatches was lost"))
            return
        lanes = [self.opened[number].lane if number in self.opened else None for number in ends]
        routes = stepper.routes_of(move, self.lanes, lanes[0], lanes[1])
        self.start_move(move, routes, tuple(lane.home for lane in lanes if lane is not None))

    def close(self, microbatch: int) -> None:
        super().close(microbatch)
        self._fail_moves({microbatch}, "one of its microbatches was closed")
        self._drop_lanes()

    def _fail_moves(self, microbatches: Collection[int], why: str, gone: Collection[int] = ()) -> None:
        def is_hit(entry: MoveUnderWay) -> bool:
            ends = {entry.move.source, entry.move.destination}
            return bool(ends & set(microbatches)) or any(
                set(pair) & set(gone) for pair in entry.runs.values()
            )

        self.fail_moves(why, is_hit, gone)

    def take(self, timeout_s: float | None) -> stepper.Event | None:
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
        if isinstance(event, stepper.DeviceLost):
            self.dead.difference_update(event.microbatches)
        if isinstance(event, stepper.DeviceLost | stepper.Moved):
            self._drop_lanes()
        return event

    def wake(self) -> None:
        self.hub.wake()

    def use(self) -> stepper.DeviceUse:
        devices = {name: self.hub.status(device) for device, name in enumerate(self._names)}
        return stepper.DeviceUse(dict(self.busy_s), dict(self.moved), devices, dict(self.experts))

    def now_s(self) -> float:
        return time.monotonic()

    def _await_all(self) -> None:
        waiting = set(range(len(self._names)))
        while waiting:
            news = self.hub.take(None)
            assert news is not None, "there was no timeout"
            device, message = news
            place = f"device {self._names[device]}" if device >= 0 else ""
            match message:
                case messages.WorkerReady():
                    waiting.discard(device)
                case messages.Failed(text, remedy):
                    message = f"could not start: {text}"
                    raise WorkerError(message, remedy or "Lower --microbatches, or free memory.", place)
                case Hangup(reason):
                    lost = self.hub.lose(device)
                    waiting.add(device)
                    if lost.failures >= MAX_STARTS or lost.retry_s is None:
                        what = reason or "the worker ended while it started"
                        raise WorkerError(f"{what} ({lost.how})", "Free memory, or use fewer devices.", place)

    def _hear(self, device: int, message: Any) -> None:
        match message:
            case messages.Done():
                if not self.has_moved(device, message.run):
                    self._collect(device, message)
            case messages.Cancelled(run):
                self.confirm_end(run, device)
            case messages.WorkerReady():
                self.lanes.lost.discard(self._names[device])
                self._events.append(stepper.DeviceBack(self._names[device]))
            case Hangup(reason):
                self._lose(device, reason or "the worker process ended before its work was done")
            case messages.Failed(text, remedy):
                self._lose(device, text, remedy)
            case messages.PeerLost(peer, text, epoch) if 0 <= peer < len(self._names) and peer != device:
                is_stale = device in self.unconfirmed(self._stale.get(_pair(device, peer), ()))
                member = self.hub.members[peer]
                if member.state == "ready" and member.epoch == epoch and not is_stale:
                    self._ask(_Inquiry({device, peer}, ends=(device, peer), why=text))
            case messages.Progress(rows):
                self._note(device, {run: position for _, run, position in rows})
            case _:
                self._lose(device, f"the worker said {type(message).__name__} out of turn")

    def _collect(self, device: int, done: messages.Done) -> None:
        running = self.running.get(done.run)
        result = self.collect(device, done)
        if isinstance(result, str):
            self._lose(device, result)
            return
        if running is not None and not running.missing:
            for transfer in running.program.transfers:
                self._cuts.pop(_pair(transfer.src, transfer.dst), None)
        if result is not None:
            self._events.append(result)

    def _next_s(self) -> float | None:
        inquired = {inquiry.run for inquiry in self._inquiries}
        times = [running.until_s for run, running in self.running.items() if run not in inquired]
        times += [inquiry.until_s for inquiry in self._inquiries]
        times += [entry.until_s for entry in self.moves]
        return None if not times or min(times) == float("inf") else min(times)

    def _look_at_clock(self) -> None:
        now, next_s = time.monotonic(), self._next_s()
        if next_s is None or now < next_s:
            return
        for inquiry in [i for i in self._inquiries if i.until_s <= now]:
            if inquiry in self._inquiries:  # a loss ends inquiries
                self._decide(inquiry)
        inquired = {inquiry.run for inquiry in self._inquiries}
        for run, running in self.running.items():
            if running.until_s <= now and run not in inquired:
                self._ask(_Inquiry(set(running.missing), run))
        pairs, silent = self.late_moves()
        for pair in pairs:
            self.hub.relink(*pair)
        for device in silent:
            self._lose(device, f"it has not cancelled a move of pages within {self._timeout_s:g} s")

    def _ask(self, inquiry: _Inquiry) -> None:
        self._inquiries.append(inquiry)
        for device in inquiry.devices:
            self.hub.order(device, messages.Where())

    def _note(self, device: int, positions: Positions) -> None:
        for inquiry in list(self._inquiries):
            if device in inquiry.devices and inquiry in self._inquiries:
                inquiry.answers.setdefault(device, positions)
                if inquiry.devices == inquiry.answers.keys():
                    self._decide(inquiry)

    def _decide(self, inquiry: _Inquiry) -> None:
        """Loses silent devices; else the device or link that blocks the run."""
        self._inquiries.remove(inquiry)
        running = self.running.get(inquiry.run)
        if inquiry.ends is None and running is None:
            return
        silent = sorted(inquiry.devices - inquiry.answers.keys())
        for device in silent:
            self._lose(device, f"no answer within {self._timeout_s or ANSWER_S:g} s")
        if silent:
            return
        if inquiry.ends is not None:
            self._cut(*inquiry.ends, inquiry.why)
        elif running is not None and running.missing <= inquiry.answers.keys():
            verdict = judge(running.program, inquiry.run, running.missing, inquiry.answers)
            what = f"its work was not done within {self._timeout_s:g} s"
            if verdict.source is not None:
                what = f"what was sent has not arrived within {self._timeout_s:g} s"
                self._cut(verdict.device, verdict.source, what)
            else:
                self._lose(verdict.device, what, is_certain=verdict.is_certain)

    def _cut(self, device: int, peer: int, why: str) -> None:
        """Reopens a link; ends the runs over it, whose transfers may be lost."""
        pair = _pair(device, peer)
        going = self.running
        uses = [x for x in going.values() if any(_pair(t.src, t.dst) == pair for t in x.program.transfers)]
        hit = sorted({running.microbatch.number for running in uses})
        words = f"the link between {self._names[device]} and {self._names[peer]} was cut ({why})"
        self.fail_moves(words, lambda entry: any(_pair(*ends) == pair for ends in entry.runs.values()))
        self.hub.relink(device, peer)
        if not hit:
            return
        self._cuts[pair] += 1
        self._stale[pair] = [run for run, running in going.items() if running.microbatch.number in hit]
        self.cancel(hit, set())
        one, message = self._names[device], f"{words}; both workers answer, and it is opened again"
        is_certain = self._cuts[pair] > MAX_CUTS
        self._events.append(stepper.DeviceLost(one, tuple(hit), message, 0, 0.0, is_certain))
        self._fail_moves(hit, words)
        self._events.append(stepper.DeviceBack(one))

    def _lose(self, device: int, what: str, remedy: str = "", is_certain: bool = True) -> None:
        where = self._whereabouts(device)
        lost = self.hub.lose(device)
        place = f"device {self._names[device]}"
        message = str(WorkerError(f"{what} ({lost.how}), {where}", remedy or REMEDY, place))
        self._report_loss(device, message, lost, is_certain)
        if not self.hub.restarts_together:
            return
        for other, name in enumerate(self._names):
            if other != device:
                others = self.hub.lose(other, counts=False)
                message = f"device {name}: started again, since {self._names[device]} was lost"
                self._report_loss(other, message, others, is_certain)

    def _report_loss(self, device: int, message: str, lost: LostWorker, is_certain: bool) -> None:
        name = self._names[device]
        self.lanes.lost.add(name)
        self._inquiries = [i for i in self._inquiries if device not in i.devices]
        hit = [number for number, opened in self.opened.items() if name in opened.lane.devices]
        self.cancel(hit, {device})
        self._events.append(
            stepper.DeviceLost(name, tuple(sorted(hit)), message, lost.failures, lost.retry_s, is_certain)
        )
        self._fail_moves(hit, f"{name} was lost", {device})

    def _whereabouts(self, device: int) -> str:
        positions = self.hub.progress(device)
        for inquiry in self._inquiries:
            positions |= inquiry.answers.get(device, {})
        mine = []
        for run, running in self.running.items():
            what = f"microbatch {running.microbatch.number}"
            if positions.get(run, -1) >= 0:
                graph, program = self.lanes.graphs[running.program.step], running.program
                column, position = program.instructions[device], positions[run]
                if position < len(column):
                    words = f"{describe(graph, program, column[position])}, {graph.trace.step.kind} of {what}"
                    return f"at instruction {position} of {len(column)}, {words}"
                return f"before its share of {what}"
            if device in running.missing:
                mine.append(what)
        return f"before its share of {min(mine)}" if mine else "with no work of its own"


def _numbered(lanes: Sequence[LoadedLane], lowered: Mapping[int, Programs]) -> list[Sequence[Program]]:
    """Steps and homes get their numbers among all plans."""
    return [
        tuple(
            replace(program, step=lane.steps[program.step], home=-1 if lane.home is None else lane.home)
            for program in lowered[id(lane.plan)][lane.index]
        )
        for lane in lanes
    ]


def _pair(one: int, two: int) -> tuple[int, int]:
    return min(one, two), max(one, two)


@dataclass(frozen=True, slots=True)
class Verdict:
    # For a link, the device that waits at its end.
    device: int
    # Source of a transfer that was sent and has not arrived: the link is cut.
    source: int | None = None
    # False if no report identifies the device.
    is_certain: bool = True


def judge(
    program: Program, run: int, missing: Collection[int], positions: Mapping[int, Positions]
) -> Verdict:
    """Follows the wait-for chain to the device or link that blocks the run.

    `missing`: devices that have not finished their share. `positions`: what their workers report.
    """
    device = min(missing)
    seen: set[int] = set()
    while device not in seen:
        seen.add(device)
        position = positions[device].get(run)
        if position is None:  # its loop is busy with something else
            return Verdict(device)
        column = program.instructions[device]
        behind = column[position + 1] if position + 1 < len(column) else None
        if not isinstance(behind, Recv):
            return Verdict(device)
        source = program.transfers[behind.transfer].src
        if source not in missing:
            return Verdict(device, source)
        begun = program.instructions[source][: positions[source].get(run, -1) + 1]
        if Send(behind.transfer) in begun:
            return Verdict(device, source)
        device = source
    return Verdict(device, is_certain=False)
