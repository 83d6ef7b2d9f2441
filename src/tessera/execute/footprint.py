"""Footprint: what a device must hold for some plans, known before anything is allocated.

    peak = weights that some lane reads there + slots x what one microbatch needs at most
    one microbatch = its lane's state there + the most bytes of inputs, received values, temporaries and
                     outputs that a program has there at one time, each counted until its `Free`

That is what a GPU holds, whose memory pool takes freed buffers back, and what the planner counts. A worker on
a CPU takes more of its machine's memory: it frees nothing, to keep its launches bound; see `stand`. Memory is
counted in multiples of `ALIGN`, as torch gives it out.

Weights of several plans over the same model are counted once by name; constants of a trace are counted for
each step. Not counted: what an operator takes and gives back within one launch, and the bytes in which worker
processes hand transfers over (`landing_bytes`), which are memory of the machine and not of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import DeviceMemoryError
from tessera.execute.check_program import check_programs
from tessera.execute.lower import lower
from tessera.ir import BufferKind, Free, Plan, Program, Recv, Run, Trace, arg_views

# programs[lane][index]
Programs = Sequence[Sequence[Program]]
# Torch aligns its own memory so.
ALIGN = 64


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of one device."""

    device: str
    weight_bytes: int
    slot_bytes: int
    slots: int

    @property
    def peak_bytes(self) -> int:
        """All of it, with every slot in use."""
        return self.weight_bytes + self.slots * self.slot_bytes


def ready_programs(plan: Plan) -> tuple[tuple[Program, ...], ...]:
    """programs[lane] of a plan, each proved right."""
    lanes = lower(plan)
    for programs in lanes:
        check_programs(plan, programs)
    return lanes


def footprints(plans: Sequence[Plan], programs: Sequence[Programs]) -> tuple[Footprint, ...]:
    """One a device, for plans that are loaded together."""
    slots = max(plan.slots for plan in plans)
    found = []
    for index, device in enumerate(plans[0].cluster.devices):
        weights = {
            w: s for p, lanes in zip(plans, programs, strict=True) for w, s in _weights(p, lanes, index)
        }
        each = (
            _lane_bytes(plan, lane, index)
            for plan, lanes in zip(plans, programs, strict=True)
            for lane in lanes
        )
        found.append(Footprint(device.name, sum(weights.values()), max(each), slots))
    return tuple(found)


def touched(trace: Trace, program: Program, device: int) -> list[int]:
    """The buffers that a device has for a program: what it runs on, moves or keeps, without the weights."""
    found: set[int] = set()
    for instruction in program.instructions[device]:
        if isinstance(instruction, Run):
            launch = trace.launches[instruction.launch]
            args = (*launch.args, *(value for _, value in launch.kwargs), *launch.outputs)
            found.update(view.buffer for arg in args for view in arg_views(arg))
            found.update(access.buffer for access in launch.accesses)
    found.update(t.buffer for t in program.transfers if device in (t.src, t.dst))
    views = {name: view.buffer for name, view in trace.outputs}
    found.update(views[name] for name, holder in program.outputs if holder == device)
    found.update(buffer for buffer, home in program.homes if home == device)
    # Nobody sends an empty buffer, and everybody may name it.
    empty = {b for b, buffer in enumerate(trace.buffers) if buffer.size_bytes == 0}
    return sorted((found - set(trace.buffers_of(BufferKind.WEIGHT))) | empty)


def _lane_bytes(plan: Plan, programs: Sequence[Program], device: int) -> int:
    """What one microbatch of a lane needs on a device."""
    state: dict[str, int] = {}
    most = 0
    for program in programs:
        trace = plan.graphs[program.step].trace
        here = touched(trace, program, device)
        kept = [trace.buffers[b] for b in here if trace.buffers[b].kind is BufferKind.STATE]
        state |= {buffer.name: _aligned(buffer.size_bytes) for buffer in kept}
        most = max(most, peak_bytes(trace, program, device))
    return sum(state.values()) + most


def peak_bytes(trace: Trace, program: Program, device: int) -> int:
    """The most bytes of a program that are alive on a device at one time, without weights and state."""
    sizes = {
        b: _aligned(trace.buffers[b].size_bytes)
        for b in touched(trace, program, device)
        if trace.buffers[b].kind is not BufferKind.STATE
    }
    alive = {b for b in sizes if trace.buffers[b].kind is BufferKind.INPUT}
    now = most = sum(sizes[b] for b in alive)
    for instruction in program.instructions[device]:
        if isinstance(instruction, Free):
            now -= sizes.get(instruction.buffer, 0) if instruction.buffer in alive else 0
            alive.discard(instruction.buffer)
            continue
        if isinstance(instruction, Run):
            new = {access.buffer for access in trace.launches[instruction.launch].accesses}
        elif isinstance(instruction, Recv):
            new = {program.transfers[instruction.transfer].buffer}
        else:
            continue
        new = (new & sizes.keys()) - alive
        alive |= new
        now += sum(sizes[b] for b in new)
        most = max(most, now)
    return most


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
            f"{footprint.slots} slots of {_gb(footprint.slot_bytes)}), {_gb(over)} more than its "
            f"{_gb(device.memory_bytes)}"
        )
        raise DeviceMemoryError(message, _remedy(footprint, device.memory_bytes), f"device {device.name}")


def landing_bytes(programs: Programs, src: int, dst: int) -> int:
    """Bytes in which one slot hands over all transfers of a program from one worker process to another."""
    return max((landing(p, src, dst)[1] for lane in programs for p in lane), default=0)


def landing(program: Program, src: int, dst: int) -> tuple[dict[int, int], int]:
    """Transfer -> offset in what one slot hands over from src to dst, and the bytes used."""
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
    fitting = room // footprint.slot_bytes if footprint.slot_bytes else 0
    if fitting >= 1:
        return f"Lower --slots to {fitting}, or capture with a smaller batch or context."
    if room <= 0:
        return f"Put {_gb(-room)} of its weights on another device: plan again with more devices."
    share = 1 - room / footprint.slot_bytes
    return f"Use one slot, and capture with a batch or context at least {share:.0%} smaller."


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e7 else f"{size_bytes / 1e6:.3f} MB"
