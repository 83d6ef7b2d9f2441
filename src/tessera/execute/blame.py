"""Who holds up a run, and what a device was doing when it was lost: for a message that says where to look."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tessera.ir import Free, Graph, Instruction, Plan, Program, Recv, Run, Send

# Run -> position of the instruction that a worker has issued last; -1: none yet.
Positions = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a late run waits for."""

    # The device that holds it up; of a link, the one that waits at its end.
    device: int
    # Where the other has sent what this one waits for: it is lost on the way.
    source: int | None = None
    # False if nobody's words say who it is.
    is_certain: bool = True


def judge(program: Program, run: int, missing: Collection[int], told: Mapping[int, Positions]) -> Verdict:
    """From waiting to awaited until one has no excuse.

    missing  devices that have not finished their share
    told     device -> what its worker says of itself; all that are missing have said something
    """
    device = min(missing)
    seen: set[int] = set()
    while device not in seen:
        seen.add(device)
        position = told[device].get(run)
        if position is None:  # its loop has not come to this run: it is at something else
            return Verdict(device)
        column = program.instructions[device]
        behind = column[position + 1] if position + 1 < len(column) else None
        if not isinstance(behind, Recv):
            return Verdict(device)
        source = program.transfers[behind.transfer].src
        if source not in missing or _has_sent(program, source, behind.transfer, told[source].get(run)):
            return Verdict(device, source)
        device = source
    return Verdict(device, is_certain=False)


def _has_sent(program: Program, device: int, transfer: int, position: int | None) -> bool:
    if position is None:
        return False
    column = program.instructions[device]
    return any(isinstance(i, Send) and i.transfer == transfer for i in column[: position + 1])


def whereabouts(plan: Plan, program: Program, device: int, position: int, what: str) -> str:
    column = program.instructions[device]
    if not 0 <= position < len(column):
        return f"before its share of {what}"
    graph = plan.graphs[program.step]
    words = describe(graph, program, column[position])
    return f"at instruction {position} of {len(column)}, {words}, {graph.trace.step.kind} of {what}"


def describe(graph: Graph, program: Program, instruction: Instruction) -> str:
    match instruction:
        case Run(launch):
            return f"run of launch {launch} ({graph.trace.kernel_of(launch).name})"
        case Free(buffer):
            return f"free of buffer {buffer} ({graph.trace.buffers[buffer].name})"
        case _:
            transfer = program.transfers[instruction.transfer]
            name = graph.trace.buffers[transfer.buffer].name
            word = type(instruction).__name__.lower()
            return f"{word} of transfer {instruction.transfer} (buffer {transfer.buffer}, {name})"
