"""Runs: open microbatches, the programs that workers run for them, and moves of pages between them.

A cancelled run continues until its devices report its end; orders of its microbatch wait for that. A step may
be ordered while another runs, over several devices only where `lanes` allows it.

A worker that answers for a run it has no part in, omits an output, or returns another shape is lost. Wrong
values in the right shape are not detected.

A move has a run per pair of devices. A failed move is cancelled at both ends before `Moved` says so: its
pages can be used again at once.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest

import torch

from tessera.errors import MismatchError, TesseraError
from tessera.execute import messages
from tessera.execute.hub import Hub
from tessera.execute.lanes import Lanes, LoadedLane
from tessera.execute.memory import named_on
from tessera.execute.page_mover import WORD
from tessera.execute.stepper import Event, Moved, PageMove, Route, SpanLog, StepCall, StepDone, Tensors
from tessera.execute.transport import HOST, SHM
from tessera.ir import BufferKind, DeviceKind, Program, Run, Trace
from tessera.kernels.choice import LATE_INPUTS


@dataclass
class OngoingStep:
    call: StepCall
    left: deque[int]
    # When it was ordered, or when the previous step ended.
    began_s: float
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=dict)


@dataclass
class OpenMicrobatch:
    number: int
    lane: LoadedLane
    state: dict[str, torch.Tensor]
    at: int = -1
    # Oldest first.
    steps: deque[OngoingStep] = field(default_factory=deque)


@dataclass
class Running:
    microbatch: OpenMicrobatch
    step: OngoingStep
    program: Program
    missing: set[int]
    until_s: float


@dataclass
class MoveUnderWay:
    move: PageMove
    homes: tuple[int | None, ...]
    num_bytes: Counter[tuple[int, int]]
    # Run -> source and destination, until it has ended.
    runs: dict[int, tuple[int, int]]
    # Deadline of the move, or of its cancellation once it has failed.
    until_s: float
    began_s: float = field(default_factory=time.monotonic)
    failure: str = ""


class Runs:
    def __init__(self, lanes: Lanes, hub: Hub, timeout_s: float | None) -> None:
        self.lanes, self.hub, self._timeout_s = lanes, hub, timeout_s
        self._names = lanes.all[0].plan.cluster.names
        # By lane number; for every program, the inputs that each device reads.
        self.programs: list[Sequence[Program]] = []
        self._inputs: list[list[list[frozenset[str]]]] = []
        self._steps: list[dict[int, int]] = []
        self.opened: dict[int, OpenMicrobatch] = {}
        # Closed by a loss that was not reported yet.
        self.dead: set[int] = set()
        self.running: dict[int, Running] = {}
        self._numbers = count(1)
        # Cancelled run or move, until it has ended everywhere -> ends that each device has still to report.
        self._ending: dict[int, Counter[int]] = {}
        # Microbatch -> its cancelled runs, and the orders that wait for their end.
        self._cancelled: dict[int, set[int]] = {}
        self._held: dict[int, list[tuple[int, bytes]]] = {}
        self.spans: SpanLog | None = None
        self.busy_s = dict.fromkeys(self._names, 0.0)
        self.experts: dict[str, list[int]] = {}
        self.moved: Counter[tuple[str, str]] = Counter()
        self.moves: list[MoveUnderWay] = []
        self._events: deque[Event] = deque()

    def add(self, lanes: Sequence[Sequence[Program]]) -> None:
        self.programs += lanes
        self._inputs += [[_inputs_of(p, self._trace(p)) for p in lane] for lane in lanes]
        self._steps += [_steps_of(lane) for lane in lanes]

    def _trace(self, program: Program) -> Trace:
        return self.lanes.graphs[program.step].trace

    def new_run(self) -> int:
        return next(self._numbers)

    def _open(self, microbatch: int, lane: LoadedLane, state: Tensors | None) -> None:
        self.opened[microbatch] = OpenMicrobatch(microbatch, lane, dict(state or {}))
        if state is None:
            for device, name in enumerate(self._names):
                if name in lane.devices:
                    self._order(microbatch, device, messages.Clear(microbatch, lane.number))

    def close(self, microbatch: int) -> None:
        if microbatch in self.dead:
            return
        if self.opened[microbatch].steps:
            raise TesseraError(f"microbatch {microbatch} is at work")
        del self.opened[microbatch]

    def can_queue(self, microbatch: int) -> bool:
        opened = self.opened.get(microbatch)
        if opened is None or len(opened.steps) > 1:
            return False
        lane, setup = opened.lane, self.hub.setups[0]
        if setup.transport in (HOST, SHM) and any(d.kind is DeviceKind.CUDA for d in setup.cluster.devices):
            return len(lane.devices) == 1  # flags of a microbatch belong to one run; see `cuda.transport`
        return lane.can_queue

    def start(self, call: StepCall) -> None:
        if call.microbatch in self.dead:
            return
        opened = self.opened[call.microbatch]
        if opened.steps and not self.can_queue(call.microbatch):
            raise TesseraError(f"microbatch {call.microbatch} is at work")
        step = OngoingStep(call, deque(self._path(opened, call.step)), time.monotonic())
        opened.steps.append(step)
        self._run_next(opened, step)

    def give(self, microbatch: int, inputs: Tensors) -> None:
        if microbatch in self.dead:
            return
        opened = self.opened[microbatch]
        (step,) = opened.steps
        run, running = next((n, x) for n, x in self.running.items() if x.step is step)
        names = self._inputs[opened.lane.number][opened.at]
        packed = {name: messages.pack(tensor) for name, tensor in inputs.items()}
        for device in sorted(running.missing):
            late = {name: values for name, values in packed.items() if name in names[device]}
            if late:
                self._order(microbatch, device, messages.LateInputs(run, late))

    def collect(self, device: int, done: messages.Done) -> StepDone | str | None:
        """The step if it is complete, or a problem."""
        running = self.running.get(done.run)
        if running is None:  # its microbatch was lost
            return None
        opened, step, program = running.microbatch, running.step, running.program
        is_step = not step.left
        skips = step.call.skips if is_step else ()
        trace = self._trace(program)
        wants_state = is_step and step.call.wants_state
        wrong = problem_of(done, trace, program, device, running.missing, skips, wants_state)
        if wrong:
            return wrong
        running.missing.discard(device)
        step.outputs |= {name: messages.unpack(packed) for name, packed in done.outputs.items()}
        step.final |= {name: messages.unpack(packed) for name, packed in done.state.items()}
        step.busy_s[self._names[device]] = step.busy_s.get(self._names[device], 0.0) + done.busy_s
        self.busy_s[self._names[device]] += done.busy_s
        for scope, rows in done.experts.items():
            self.experts[scope] = [*map(sum, zip_longest(self.experts.get(scope, ()), rows, fillvalue=0))]
        step.idle_s[self._names[device]] = done.idle_s
        if self.spans is not None:
            offsets_s = [member.offset_s for member in self.hub.members]
            self.spans.add(device, done, program, trace, opened.number, offsets_s)
        if running.missing:
            return None
        del self.running[done.run]
        for transfer in program.transfers:
            self.moved[self._names[transfer.src], self._names[transfer.dst]] += transfer.num_bytes
        if step.left:
            self._run_next(opened, step)
            return None
        for one in participants(program, set()):
            self.hub.members[one].failures = 0
        opened.steps.remove(step)
        now_s = time.monotonic()
        for other in self.running.values():  # the queued step begins now
            if other.microbatch is opened:
                other.step.began_s, other.until_s = now_s, self._due_s()
        seconds = now_s - step.began_s
        times = (step.busy_s, step.idle_s)
        return StepDone(opened.number, step.call.step, step.outputs, seconds, step.final, *times)

    def _due_s(self) -> float:
        return float("inf") if self._timeout_s is None else time.monotonic() + self._timeout_s

    def confirm_end(self, run: int, device: int) -> None:
        """A cancelled run or move has ended there."""
        if device in self.unconfirmed([run]):
            self._ending[run][device] -= 1
        self._go_on()

    def unconfirmed(self, runs: Collection[int]) -> set[int]:
        """Devices that have not reported the end of these cancelled runs."""
        ending = [self._ending[run] for run in runs if run in self._ending]
        return {device for devices in ending for device, num in devices.items() if num}

    def cancel(self, microbatches: Collection[int], gone: Collection[int]) -> None:
        held = {number for number in microbatches if self._held.pop(number, None) is not None}
        for run in [r for r, running in self.running.items() if running.microbatch.number in microbatches]:
            running = self.running.pop(run)
            number = running.microbatch.number
            if number in held:
                continue  # its order was never sent
            self._cancelled.setdefault(number, set()).add(run)
            self._cancel(run, running.missing - set(gone))
        for run in list(self._ending):
            late = self.unconfirmed([run]) & set(gone)
            for device in gone:
                del self._ending[run][device]
            if late:  # a lost device may have sent after the others had cleared the run
                self._cancel(run, list(self._ending[run]))
        self._go_on()
        for number in microbatches:
            del self.opened[number]
        self.dead.update(microbatches)

    def start_move(self, move: PageMove, routes: Sequence[Route], homes: tuple[int | None, ...]) -> None:
        for size in (size for route in routes for _, size in route.buffers):
            if size % WORD:
                message = f"a page has {size} bytes, no multiple of {WORD}"
                raise MismatchError(message, "Plan without moves.", f"move {move.number}")
        entry = MoveUnderWay(move, homes, Counter(), {}, self._due_s())
        for route in routes:
            run, pair = self.new_run(), (route.source, route.destination)
            entry.runs[run] = pair
            entry.num_bytes[pair] += route.num_bytes
            pages = (list(route.from_pages), list(route.to_pages))
            order = messages.MovePages(run, route.destination, *route.places, route.buffers, *pages)
            self.hub.order(route.source, order)
        self.moves.append(entry)
        self._settle_move(entry)

    def has_moved(self, device: int, run: int) -> bool:
        """The destination has all pages; False if this is no run of a move."""
        for entry in self.moves:
            if entry.runs.get(run, (-1, -1))[1] == device:
                if not entry.failure:
                    del entry.runs[run]
                    self._settle_move(entry)
                return True
        return False

    def fail_moves(
        self, why: str, is_hit: Callable[[MoveUnderWay], bool], gone: Collection[int] = ()
    ) -> None:
        for entry in list(self.moves):
            if not entry.failure and is_hit(entry):
                entry.failure, entry.until_s = why, self._due_s()
                for run, ends in entry.runs.items():
                    self._cancel(run, set(ends) - set(gone))
        self._go_on()

    def late_moves(self) -> tuple[list[tuple[int, int]], set[int]]:
        """Cancels late moves; returns their pairs of devices, and devices that have not confirmed."""
        late = [entry for entry in self.moves if entry.until_s <= time.monotonic()]
        silent = self.unconfirmed([run for entry in late if entry.failure for run in entry.runs])
        pairs = [pair for entry in late if not entry.failure for pair in entry.runs.values()]
        why = f"its pages have not arrived within {self._timeout_s:g} s" if late else ""
        self.fail_moves(why, lambda entry: any(entry is other for other in late))
        return pairs, silent

    def _settle_move(self, entry: MoveUnderWay) -> None:
        going = entry.runs.keys() & self._ending.keys() if entry.failure else entry.runs
        if going:
            return
        self.moves.remove(entry)
        num_bytes = 0 if entry.failure else entry.num_bytes.total()
        for (src, dst), size in entry.num_bytes.items() if not entry.failure else ():
            self.moved[self._names[src], self._names[dst]] += size
        seconds = time.monotonic() - entry.began_s
        self._events.append(Moved(entry.move.number, entry.failure, seconds, num_bytes))

    def _path(self, opened: OpenMicrobatch, step: int) -> list[int]:
        """Programs from a microbatch's position to a step, ending with the step's own."""
        steps, numbers = self._steps[opened.lane.number], opened.lane.steps
        number = numbers[step] if 0 <= step < len(numbers) else -1
        if number not in steps:
            raise MismatchError(f"lane {opened.lane.number} has no step {step}")
        index = steps[number]
        moves = set(range(len(self.programs[opened.lane.number]))) - set(steps.values())
        if any(index < move <= opened.at for move in moves):
            message = f"state moves between the steps of lane {opened.lane.index}, which cannot go back"
            raise MismatchError(message, "Plan the steps together as one served unit.")
        first = opened.at + 1 if opened.at >= 0 else index
        return [*(i for i in range(first, index) if i in moves), index]

    def _run_next(self, opened: OpenMicrobatch, step: OngoingStep) -> None:
        index = opened.at = step.left.popleft()
        program = self.programs[opened.lane.number][index]
        is_step, call = not step.left, step.call
        names = self._inputs[opened.lane.number][index]
        read = frozenset().union(*names) if is_step else frozenset[str]()
        inputs = {name: messages.pack(tensor) for name, tensor in call.inputs.items() if name in read}
        fresh = self._take_state(opened, program)
        wants_state = is_step and call.wants_state
        devices = participants(program, {*fresh, *(d for _, d in program.homes if wants_state)})
        number = self.new_run()
        self.running[number] = Running(opened, step, program, set(devices), self._due_s())
        skips = call.skips if is_step else ()
        for device in devices:
            place = (number, opened.number, opened.lane.number, index)
            share = {name: packed for name, packed in inputs.items() if name in names[device]}
            wants = (wants_state, self.spans is not None)
            is_open = is_step and call.is_open and bool(names[device] & LATE_INPUTS)
            order = messages.Begin(*place, share, fresh.get(device, {}), *wants, skips, is_open)
            self._order(opened.number, device, order)

    def _order(self, microbatch: int, device: int, order: messages.Message) -> None:
        """Holds an order back while a cancelled run of the microbatch has not ended everywhere."""
        data = messages.encode(order)
        if microbatch in self._cancelled:
            self._held.setdefault(microbatch, []).append((device, data))
        else:
            self.hub.order(device, data)  # a lost worker is reported as a hang-up

    def _cancel(self, run: int, devices: Collection[int]) -> None:
        for device in devices:
            self._ending.setdefault(run, Counter())[device] += 1
            self.hub.order(device, messages.Cancel(run))

    def _go_on(self) -> None:
        """Ends failed moves, and sends orders, whose cancelled runs have ended everywhere."""
        self._ending = {run: devices for run, devices in self._ending.items() if any(devices.values())}
        for entry in list(self.moves):
            self._settle_move(entry)
        for microbatch in [m for m, runs in self._cancelled.items() if runs.isdisjoint(self._ending)]:
            del self._cancelled[microbatch]
            for device, data in self._held.pop(microbatch, []):
                self.hub.order(device, data)

    def _take_state(self, opened: OpenMicrobatch, program: Program) -> dict[int, messages.PackedTensors]:
        """Device -> its state that this run is the first to use."""
        buffers = self._trace(program).buffers
        state: dict[int, messages.PackedTensors] = {}
        for buffer, device in program.homes:
            name = buffers[buffer].name
            if name in opened.state:
                state.setdefault(device, {})[name] = messages.pack(opened.state.pop(name))
        return state


def _inputs_of(program: Program, trace: Trace) -> list[frozenset[str]]:
    names = {b: trace.buffers[b].name for b in trace.buffers_of(BufferKind.INPUT)}
    named = [named_on(trace, program, device) for device in range(len(program.instructions))]
    return [frozenset(names[b] for b in buffers & names.keys()) for buffers in named]


def participants(program: Program, taking: Collection[int]) -> list[int]:
    """Devices with instructions, an output to return, or state to receive or return."""
    holding = {device for _, device in program.outputs} | set(taking)
    return [d for d, column in enumerate(program.instructions) if column or d in holding]


def _steps_of(programs: Sequence[Program]) -> dict[int, int]:
    """Step -> index of its program; other programs only move state."""
    return {
        program.step: index
        for index, program in enumerate(programs)
        if any(isinstance(i, Run) for column in program.instructions for i in column)
    }


def problem_of(
    done: messages.Done,
    trace: Trace,
    program: Program,
    device: int,
    missing: Collection[int],
    skips: Collection[str] = (),
    wants_state: bool = False,
) -> str:
    """Empty: no problem. `missing`: devices that have not answered."""
    if device not in missing:
        return "it answered a run that it has no part in, or answered twice"
    names = {name for name, at in program.outputs if at == device and name not in skips}
    if done.outputs.keys() != names:
        return f"it handed over {_listed(done.outputs)} in place of {_listed(names)}"
    for name, view in trace.outputs:
        packed = done.outputs.get(name)
        if packed is not None and (packed.dtype, packed.shape) != (view.dtype, view.shape):
            return f"its '{name}' is {packed.dtype} {list(packed.shape)}, not {view.dtype} {list(view.shape)}"
    state = {trace.buffers[b].name: trace.buffers[b].size_bytes for b, at in program.homes if at == device}
    if wants_state and {name: packed.data.nbytes for name, packed in done.state.items()} != state:
        return f"it handed over state {_listed(done.state)} in place of {_listed(state)}, or of another size"
    if any(row[0] >= len(trace.launches) for row in done.spans):
        return f"it reported a launch beyond the {len(trace.launches)} of the step"
    if any(row[0] >= len(program.transfers) for row in done.transfers):
        return f"it reported a transfer beyond the {len(program.transfers)} of the program"
    return ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "nothing"
