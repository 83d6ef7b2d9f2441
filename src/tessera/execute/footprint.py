"""Footprint: what a device must hold for some plans, known before anything is allocated.

    peak = weights that some lane reads there + slots x the largest arena of one slot

Weights of several plans over the same model are counted once by name; constants of a trace are counted for
each step. Not counted: what an operator takes and gives back within one launch, and the bytes in which worker
processes hand transfers over (`landing_bytes`), which are memory of the machine and not of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import DeviceMemoryError
from tessera.execute.check_program import check_programs
from tessera.execute.lower import lower
from tessera.execute.static_memory import ALIGN, with_memory
from tessera.ir import Plan, Program

# programs[lane][index]
Programs = Sequence[Sequence[Program]]


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
    """programs[lane] of a plan with static memory, each proved right."""
    lanes = tuple(with_memory(plan, programs) for programs in lower(plan))
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
        slot = max(p.arena_bytes[index] for lanes in programs for lane in lanes for p in lane)
        found.append(Footprint(device.name, sum(weights.values()), slot, slots))
    return tuple(found)


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
            used += -(-transfer.num_bytes // ALIGN) * ALIGN
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
