"""Static memory: every buffer of a program gets its place before anything is allocated.

One arena a slot and device: the lane's state first, at the same offsets in every program of the lane, then
inputs, temporaries and outputs, which share memory where their lifetimes do not meet. Lifetimes are counted
in launches of the trace, not of the device, and a buffer that is received lives from the launch that makes
the value elsewhere. So whatever was in its place was used last before that launch, and the signal that frees
the place can stand where the trace has not reached it: no two devices can wait for each other.

Places are found largest buffer first, at the lowest offset that no buffer alive at the same time holds. That
is a heuristic; `lower_bound` says how small the arena could have been at best.

Not counted: memory that an operator takes and gives back within one launch.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tessera.ir import (
    BufferKind,
    Free,
    Graph,
    Instruction,
    Launch,
    Place,
    Plan,
    Program,
    Run,
    Send,
    Signal,
    Trace,
    Wait,
    arg_views,
)

# Torch aligns its own memory so; results can depend on it.
ALIGN = 64
# A moment before the first launch.
START = -1


@dataclass(slots=True)
class Uses:
    """What one device does with one buffer, as numbers of launches in the trace."""

    # Launches of this device that touch it.
    touched: list[int] = field(default_factory=list)
    # Those that write it.
    written: list[int] = field(default_factory=list)
    # Launches of other devices that make what is received here.
    landing: list[int] = field(default_factory=list)
    is_given: bool = False
    is_kept: bool = False

    def lifetime(self, end: int) -> tuple[int, int]:
        """First and last moment, both included."""
        moments = [*self.touched, *self.landing]
        return (START if self.is_given else min(moments), end if self.is_kept else max(moments))


@dataclass(slots=True)
class StateRegion:
    """The part of a device's arena that one lane keeps its state in."""

    offsets: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0

    def add(self, name: str, size_bytes: int) -> None:
        """Gives a state its offset, once."""
        if name not in self.offsets:
            self.offsets[name] = self.size_bytes
            self.size_bytes += _aligned(size_bytes)


def with_memory(plan: Plan, programs: Sequence[Program]) -> tuple[Program, ...]:
    """The programs of one lane, each with places, signals and waits."""
    state = _state_regions(plan, programs)
    return tuple(_placed(plan.graphs[p.step], p, state) for p in programs)


def lower_bound(graph: Graph, program: Program, device: int) -> int:
    """Bytes that are alive at one moment at most: no layout of this program can need less."""
    end = len(graph.trace.launches)
    change: dict[int, int] = defaultdict(int)
    for buffer, uses in _uses(graph, program)[device].items():
        first, last = uses.lifetime(end)
        size = _aligned(graph.trace.buffers[buffer].size_bytes)
        change[first] += size
        change[last + 1] -= size
    alive = best = 0
    for moment in sorted(change):
        alive += change[moment]
        best = max(best, alive)
    return best


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN) * ALIGN


def _state_regions(plan: Plan, programs: Sequence[Program]) -> list[StateRegion]:
    """Per device, all state that lives there in some program of the lane."""
    regions = [StateRegion() for _ in plan.cluster.devices]
    for program in programs:
        buffers = plan.graphs[program.step].trace.buffers
        lives = [*program.homes, *((t.buffer, d) for t in program.transfers for d in (t.src, t.dst))]
        for buffer, device in lives:
            if buffers[buffer].kind is BufferKind.STATE:
                regions[device].add(buffers[buffer].name, buffers[buffer].size_bytes)
    return regions


def _placed(graph: Graph, program: Program, state: Sequence[StateRegion]) -> Program:
    uses = _uses(graph, program)
    places = [_layout(graph.trace, used, state[device]) for device, used in enumerate(uses)]
    sizes = tuple(
        max([state[d].size_bytes, *(_aligned(p.stop) for p in here)]) for d, here in enumerate(places)
    )
    signals, waits = _Reuse(graph, program, uses, places).found()
    lists = tuple(_inserted(column, signals[d], waits[d]) for d, column in enumerate(program.instructions))
    return replace(program, instructions=lists, places=tuple(places), arena_bytes=sizes)


def _uses(graph: Graph, program: Program) -> list[dict[int, Uses]]:
    """Per device, buffer -> what is done with it; weights and empty buffers have no place."""
    trace = graph.trace
    found: list[dict[int, Uses]] = [defaultdict(Uses) for _ in program.instructions]
    for device, column in enumerate(program.instructions):
        for instruction in column:
            if isinstance(instruction, Run):
                _touch(trace.launches[instruction.launch], instruction.launch, found[device])
    for transfer in program.transfers:
        producer = graph.values[transfer.value].producer if transfer.value >= 0 else None
        found[transfer.dst][transfer.buffer].landing.append(START if producer is None else producer)
        found[transfer.src][transfer.buffer].touched += [START] if producer is None else []
    views = {name: view.buffer for name, view in trace.outputs}
    for name, device in program.outputs:
        found[device][views[name]].is_kept = True
    for buffer, device in program.homes:
        found[device][buffer].is_kept = True
    for used in found:
        for buffer, uses in used.items():
            kind = trace.buffers[buffer].kind
            uses.is_given = kind in (BufferKind.INPUT, BufferKind.STATE)
            uses.is_kept |= kind is BufferKind.STATE
    return [{b: uses for b, uses in sorted(used.items()) if _has_place(trace, b)} for used in found]


def _has_place(trace: Trace, buffer: int) -> bool:
    found = trace.buffers[buffer]
    return found.kind is not BufferKind.WEIGHT and found.size_bytes > 0


def _touch(launch: Launch, index: int, used: dict[int, Uses]) -> None:
    views = [v for arg in (*launch.args, *(a for _, a in launch.kwargs)) for v in arg_views(arg)]
    views += [v for v in launch.outputs if v is not None]
    written = {a.buffer for a in launch.accesses if a.write or a.atomic}
    for buffer in dict.fromkeys([*(v.buffer for v in views), *(a.buffer for a in launch.accesses)]):
        used[buffer].touched.append(index)
        if buffer in written:
            used[buffer].written.append(index)


def _layout(trace: Trace, used: Mapping[int, Uses], state: StateRegion) -> tuple[Place, ...]:
    """State where the lane has it; behind it first fit, largest first."""
    fixed = [b for b in used if trace.buffers[b].kind is BufferKind.STATE]
    places = [Place(b, state.offsets[trace.buffers[b].name], trace.buffers[b].size_bytes) for b in fixed]
    free = sorted(set(used) - set(fixed), key=lambda b: (-trace.buffers[b].size_bytes, b))
    lives = np.array([used[b].lifetime(len(trace.launches)) for b in free]).reshape(-1, 2)
    spans = np.zeros((len(free), 2), dtype=np.int64)
    for index, buffer in enumerate(free):
        size = trace.buffers[buffer].size_bytes
        first, last = lives[index]
        meets = (lives[:index, 0] <= last) & (lives[:index, 1] >= first)
        offset = _gap(spans[:index][meets], _aligned(size), state.size_bytes)
        spans[index] = offset, offset + _aligned(size)
        places.append(Place(buffer, offset, size))
    return tuple(sorted(places, key=lambda p: p.buffer))


def _gap(taken: NDArray[np.int64], size: int, base: int) -> int:
    """The lowest offset from `base` on with `size` bytes that nobody has taken."""
    if not len(taken):
        return base
    taken = taken[np.argsort(taken[:, 0], kind="stable")]
    ends = np.maximum.accumulate(np.concatenate(([base], taken[:, 1])))
    room = np.flatnonzero(taken[:, 0] - ends[:-1] >= size)
    return int(ends[room[0]] if len(room) else ends[-1])


class _Reuse:
    """Where one program uses memory twice: after which launch a place is free, and what must have left."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        uses: Sequence[Mapping[int, Uses]],
        places: Sequence[Sequence[Place]],
    ) -> None:
        self._graph, self._program, self._uses, self._places = graph, program, uses, places
        self._spans = [np.array([(p.offset, p.stop) for p in here]).reshape(-1, 2) for here in places]
        self._index = [{p.buffer: i for i, p in enumerate(here)} for here in places]

    def found(self) -> tuple[list[dict[int, list[int]]], list[dict[tuple[int, int], list[int]]]]:
        """Per device: launch -> transfers signalled behind it; (launch, 1 if behind it) -> those to await."""
        num = len(self._program.instructions)
        signals: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(num)]
        waits: list[dict[tuple[int, int], list[int]]] = [defaultdict(list) for _ in range(num)]
        landings: list[list[tuple[int, int, int]]] = [[] for _ in range(num)]  # (buffer, producer, signal)
        for number, transfer in enumerate(self._program.transfers):
            after = self._free_after(number)
            signals[transfer.dst][after].append(number)
            landings[transfer.dst].append((transfer.buffer, self._producer(number), after))
        for number, transfer in enumerate(self._program.transfers):
            moment = self._overwritten(number, landings[transfer.src])
            if moment is not None:
                waits[transfer.src][moment].append(number)
        return signals, waits

    def _producer(self, number: int) -> int:
        value = self._program.transfers[number].value
        made_by = self._graph.values[value].producer if value >= 0 else None
        return START if made_by is None else made_by

    def _sharing(self, device: int, buffer: int) -> list[int]:
        """Buffers of a device whose place shares bytes with this buffer's, itself among them."""
        start, stop = self._spans[device][self._index[device][buffer]]
        spans = self._spans[device]
        mask = (spans[:, 0] < stop) & (spans[:, 1] > start)
        return [self._places[device][int(i)].buffer for i in np.flatnonzero(mask)]

    def _free_after(self, number: int) -> int:
        """The last launch on the receiver that uses the landing place before the value is made."""
        transfer, producer = self._program.transfers[number], self._producer(number)
        last = START
        for buffer in self._sharing(transfer.dst, transfer.buffer):
            touched = self._uses[transfer.dst][buffer].touched
            index = bisect_left(touched, producer)
            last = max(last, touched[index - 1] if index else START)
        return last

    def _overwritten(self, number: int, landings: Sequence[tuple[int, int, int]]) -> tuple[int, int] | None:
        """When the sender's memory is first written again: before a launch, or behind one by a landing."""
        transfer, producer = self._program.transfers[number], self._producer(number)
        moments = []
        sharing = set(self._sharing(transfer.src, transfer.buffer))
        for buffer in sharing:
            uses = self._uses[transfer.src][buffer]
            later = uses.written if buffer == transfer.buffer else uses.touched
            index = bisect_right(later, producer)
            moments += [(later[index], 0)] if index < len(later) else []
        moments += [(after, 1) for buffer, made, after in landings if buffer in sharing and made > producer]
        return min(moments, default=None)


def _inserted(
    column: Sequence[Instruction],
    signals: Mapping[int, Sequence[int]],
    waits: Mapping[tuple[int, int], Sequence[int]],
) -> tuple[Instruction, ...]:
    """A device's list with signals and waits; what belongs behind a launch follows its sends and frees."""
    found: list[Instruction] = [Signal(n) for n in signals.get(START, ())]
    for block in _blocks(column):
        launch = next((i.launch for i in block if isinstance(i, Run)), START)
        found += [Wait(n) for n in waits.get((launch, 0), ())] if launch != START else []
        found += block
        if launch != START:
            found += [Wait(n) for n in waits.get((launch, 1), ())]
            found += [Signal(n) for n in signals.get(launch, ())]
    return tuple(found)


def _blocks(column: Sequence[Instruction]) -> list[list[Instruction]]:
    """Each launch with the receives before it and the sends and frees behind it."""
    blocks: list[list[Instruction]] = []
    has_run = True
    for instruction in column:
        if has_run and not isinstance(instruction, (Send, Free)):
            blocks.append([])
            has_run = False
        if not blocks:
            blocks.append([])
        blocks[-1].append(instruction)
        has_run = isinstance(instruction, (Run, Send, Free))
    return blocks
