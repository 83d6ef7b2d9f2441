"""Footprint: what a device must hold for some plans, known before anything is allocated.

    peak = weights that some lane reads there + microbatches x what one microbatch needs at most
    one microbatch = its lane's state there + the most bytes of inputs, received values, temporaries and
                     outputs that a program has there at one time, each counted until its `Free`

That is what a GPU's memory pool holds and what the planner counts. A worker on a CPU may take somewhat more
of its machine's memory: what is freed there serves buffers of the same size only; see `memory`. Memory is
counted in multiples of `ALIGN`, as torch gives it out.

Weights of several plans over the same model are counted once by name; constants of a trace are counted for
each step. Not counted: what an operator takes and gives back within one launch, and the bytes in which worker
processes hand transfers over (`landing_bytes`), which are memory of the machine and not of the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera.errors import DeviceMemoryError
from tessera.execute.lower import check_programs, lower
from tessera.ir import BufferKind, Free, Instruction, Plan, Program, Recv, Run, Send, Trace

# programs[lane][index]
Programs = Sequence[Sequence[Program]]
# What is there before a step starts.
GIVEN = (BufferKind.INPUT, BufferKind.STATE)
# Torch aligns its own memory so.
ALIGN = 64


@dataclass(frozen=True, slots=True)
class Footprint:
    device: str
    weight_bytes: int
    # Of the hungriest lane, and of all microbatches together, each on its lane.
    microbatch_bytes: int
    microbatches: int
    held_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it, with every microbatch in use."""
        return self.weight_bytes + self.held_bytes


def ready_programs(plan: Plan) -> tuple[tuple[Program, ...], ...]:
    """programs[lane] of a plan, each proved right."""
    lanes = lower(plan)
    for programs in lanes:
        check_programs(plan, programs)
    return lanes


def footprints(plans: Sequence[Plan], programs: Sequence[Programs]) -> tuple[Footprint, ...]:
    """One a device, for plans that are loaded together."""
    microbatches = max(plan.microbatches for plan in plans)
    found = []
    for index, device in enumerate(plans[0].cluster.devices):
        weights = {
            w: s for p, lanes in zip(plans, programs, strict=True) for w, s in _weights(p, lanes, index)
        }
        each = [
            [_lane_bytes(plan, lane, index) for lane in lanes]
            for plan, lanes in zip(plans, programs, strict=True)
        ]
        most = max(max(lanes) for lanes in each)
        table = plans[0].lane_table
        held = microbatches * most
        if len(plans) == 1 and table:  # else any microbatch may come to follow the hungriest lane of all
            held = sum(each[0][table[microbatch % len(table)]] for microbatch in range(microbatches))
        found.append(Footprint(device.name, sum(weights.values()), most, microbatches, held))
    return tuple(found)


def touched(trace: Trace, program: Program, device: int) -> Iterator[tuple[int, bool]]:
    """(buffer, True) where a device's list first needs it, (buffer, False) where it needs it no more.

    Inputs and state are needed from the start on. Without the weights, but for empty ones: nobody sends an
    empty buffer, and everybody may name it.
    """
    column = program.instructions[device]
    views = {name: view.buffer for name, view in trace.outputs}
    named = {b for instruction in column for b in _named(trace, program, instruction)}
    named |= {views[name] for name, holder in program.outputs if holder == device}
    named |= {b for b, home in program.homes if home == device}
    seen = set(trace.buffers_of(BufferKind.WEIGHT))
    for index, buffer in enumerate(trace.buffers):
        if buffer.size_bytes == 0 or (index in named and buffer.kind in GIVEN):
            seen.add(index)
            yield index, True
    for instruction in column:
        if isinstance(instruction, Free):
            yield instruction.buffer, False
            continue
        for index in _named(trace, program, instruction):
            if index not in seen:
                seen.add(index)
                yield index, True


def _named(trace: Trace, program: Program, instruction: Instruction) -> Iterator[int]:
    """The buffers that an instruction works on."""
    if isinstance(instruction, Run):
        launch = trace.launches[instruction.launch]
        yield from (view.buffer for view in launch.views)
        yield from (access.buffer for access in launch.accesses)
    elif isinstance(instruction, (Send, Recv)):
        yield program.transfers[instruction.transfer].buffer


def _lane_bytes(plan: Plan, programs: Sequence[Program], device: int) -> int:
    """What one microbatch of a lane needs on a device."""
    state: dict[str, int] = {}
    most = 0
    for program in programs:
        buffers = plan.graphs[program.step].trace.buffers
        now = 0
        for index, is_needed in touched(plan.graphs[program.step].trace, program, device):
            size = _aligned(buffers[index].size_bytes)
            if buffers[index].kind is BufferKind.STATE:
                state[buffers[index].name] = size
            else:
                now += size if is_needed else -size
                most = max(most, now)
    return sum(state.values()) + most


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN) * ALIGN


def check_fits(plans: Sequence[Plan], found: Sequence[Footprint]) -> None:
    """Raises DeviceMemoryError for the first device whose memory is too small, with what to lower."""
    for device, footprint in zip(plans[0].cluster.devices, found, strict=True):
        over = footprint.peak_bytes - device.memory_bytes
        if over <= 0:
            continue
        message = (
            f"{_gb(footprint.peak_bytes)} are needed ({_gb(footprint.weight_bytes)} of weights and "
            f"{footprint.microbatches} microbatches of {_gb(footprint.microbatch_bytes)}), "
            f"{_gb(over)} more than its {_gb(device.memory_bytes)}"
        )
        raise DeviceMemoryError(message, _remedy(footprint, device.memory_bytes), f"device {device.name}")


def landing_bytes(programs: Programs, src: int, dst: int) -> int:
    """Bytes in which a microbatch hands all transfers of a program from one worker process to another."""
    return max((landing(p, src, dst)[1] for lane in programs for p in lane), default=0)


def landing(program: Program, src: int, dst: int) -> tuple[dict[int, int], int]:
    """Transfer -> offset in what one microbatch hands over from src to dst, and the bytes used."""
    places: dict[int, int] = {}
    used = 0
    for number, transfer in enumerate(program.transfers):
        if (transfer.src, transfer.dst) == (src, dst):
            places[number] = used
            used += _aligned(transfer.num_bytes)
    return places, used


def _weights(plan: Plan, programs: Programs, device: int) -> list[tuple[str, int]]:
    found = []
    for lane in programs:
        for program in lane:
            trace = plan.graphs[program.step].trace
            for buffer in program.weights[device]:
                weight = trace.buffers[buffer]
                name = f"{weight.name} of step {program.step}" if weight.constant_hex else weight.name
                found.append((name, weight.size_bytes))
    return found


def _remedy(footprint: Footprint, memory_bytes: int) -> str:
    room = memory_bytes - footprint.weight_bytes
    fitting = room // footprint.microbatch_bytes if footprint.microbatch_bytes else 0
    if fitting >= 1:
        return f"Lower --microbatches to {fitting}, or capture with a smaller batch or context."
    if room <= 0:
        return f"Put {_gb(-room)} of its weights on another device: plan again with more devices."
    share = 1 - room / footprint.microbatch_bytes
    return f"Use one microbatch, and capture with a batch or context at least {share:.0%} smaller."


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e7 else f"{size_bytes / 1e6:.3f} MB"
