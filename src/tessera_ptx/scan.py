"""One pass over reachable instructions: definitions, accesses, stops."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tessera_ptx.cfg import FlowGraph
from tessera_ptx.flatten import Flat
from tessera_ptx.syntax import Instruction, Mem, Operand, Pair, Reg, Vec
from tessera_ptx.transfer import OpInfo, info_of


class MemoryAccess(NamedTuple):
    at: int  # instruction index
    operand: Mem
    effect: str  # r, w or a
    space: str


@dataclass(slots=True)
class Scan:
    infos: list[OpInfo | None] = field(default_factory=list)
    defs: dict[str, list[int]] = field(default_factory=dict)
    accesses: list[MemoryAccess] = field(default_factory=list)
    stops: list[tuple[int, str]] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    maps: list[int] = field(default_factory=list)
    short: set[int] = field(default_factory=set)


def registers_in(operand: Operand) -> tuple[str, ...]:
    if isinstance(operand, Reg):
        return (operand.name,)
    if isinstance(operand, Vec):
        return tuple(i.name for i in operand.items if isinstance(i, Reg))
    if isinstance(operand, Pair):
        return registers_in(operand.first) + registers_in(operand.second)
    return ()


def scan(flat: Flat, graph: FlowGraph) -> Scan:
    out = Scan(infos=[None] * len(flat.body), stops=[*flat.stops, *graph.stops])
    known: dict[str, OpInfo] = {}
    defs, infos, body = out.defs, out.infos, flat.body
    for block in sorted(graph.blocks, key=lambda b: b.start):
        for index in range(block.start, block.stop):
            instruction = body[index]
            op = instruction.op
            info = known.get(op.text)
            if info is None:
                info = known[op.text] = info_of(op)
            if info.row is not None and len(instruction.operands) < info.row.least:
                info = _cut_short(out, index, instruction, info)
            infos[index] = info
            for place in info.writes:
                if place < len(instruction.operands):
                    target = instruction.operands[place]
                    if type(target) is Reg:
                        defs.setdefault(target.name, []).append(index)
                    else:
                        for name in registers_in(target):
                            # `ld.v2 {%r1, %r1}` would define twice.
                            if defs.setdefault(name, [index])[-1] != index:
                                defs[name].append(index)
            if info.uses or info.marks or info.row is None:
                _note(out, index, instruction, info)
    return out


def _cut_short(out: Scan, index: int, instruction: Instruction, info: OpInfo) -> OpInfo:
    """Too few operands stop the kernel; no rule applies to the result."""
    out.short.add(index)
    out.stops.append((instruction.line, f"too few operands for '{info.op.text}'"))
    return replace(info, form=None, rule=None, scalar=True, is_load=False)


def _note(out: Scan, index: int, instruction: Instruction, info: OpInfo) -> None:
    op = info.op
    if info.row is None:
        out.stops.append((instruction.line, f"unknown instruction '{op.text}'"))
        return
    if "stop" in info.marks:
        what = "texture or surface access" if not info.uses else "multicast memory access"
        out.stops.append((instruction.line, f"{what} '{op.text}'"))
    if "tensor" in info.marks:
        out.tensors.append(index)
    elif "map" in info.marks:
        out.maps.append(index)
    operands = instruction.operands
    for use, space in info.uses:
        operand = operands[use.operand] if use.operand < len(operands) else None
        if isinstance(operand, Mem):
            out.accesses.append(MemoryAccess(index, operand, use.effect, space))
        elif not _optional(info, use.operand):
            out.stops.append((instruction.line, f"'{op.text}' without an address where one is expected"))


def _optional(info: OpInfo, operand: int) -> bool:
    """Barriers without a result, and copies without their last address."""
    if info.op.name == "mbarrier" or info.op.text.startswith("cp.async.mbarrier"):
        return True
    return operand > 0 and info.op.name in ("st", "red", "clusterlaunchcontrol")
