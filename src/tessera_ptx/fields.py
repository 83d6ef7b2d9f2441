"""Fields of a struct parameter that are numbers, not pointers.

When a kernel picks an 8-byte field at a computed place, every field may be the pointer. One is left out
only when a half of it is read by itself and used as no one uses half an address: it is loaded as a float,
multiplied by a register, or compared by order as a signed number. Reading half a field proves nothing by
itself: `(unsigned)s.p & 15` tests a pointer's alignment.
"""

from collections.abc import Iterable

from tessera_ptx.opcodes import vector_of, width_of
from tessera_ptx.syntax import Instruction, Mem, Reg, Sym, Vec

_ORDERED = frozenset({"lt", "le", "gt", "ge"})
_WORD = 4
_FIELD = 8


def number_fields(body: Iterable[Instruction], param: str) -> frozenset[int]:
    """Offsets of the 8-byte fields of this parameter that are certainly numbers."""
    read: dict[str, int] = {}
    defined: dict[str, int] = {}
    numbers: set[int] = set()
    used: set[str] = set()
    for instruction in body:
        for name in _registers(instruction.operands[:1]):
            defined[name] = defined.get(name, 0) + 1
        used |= _used_as_number(instruction)
        for name, offset in _halves_read(instruction, param):
            read[name] = offset
            if "f32" in instruction.op.mods:
                numbers.add(offset // _FIELD * _FIELD)
    # A register written twice may hold something else where it is used.
    sure = {name for name in read if name in used and defined[name] == 1}
    return frozenset(numbers | {read[name] // _FIELD * _FIELD for name in sure})


def _halves_read(instruction: Instruction, param: str) -> list[tuple[str, int]]:
    """(register, offset) of every 4-byte word of the parameter that is loaded."""
    op, operands = instruction.op, instruction.operands
    if op.name != "ld" or len(operands) < 2 or not isinstance(operands[1], Mem) or width_of(op) != _WORD:
        return []
    base = operands[1].base
    if not isinstance(base, Sym) or base.name != param:
        return []
    place = base.offset + operands[1].offset
    names = _registers(operands[:1])
    if len(names) != vector_of(op):
        return []
    return [(name, place + _WORD * number) for number, name in enumerate(names)]


def _used_as_number(instruction: Instruction) -> set[str]:
    op = instruction.op
    sources = instruction.operands[1:3]
    if op.name in ("mul", "mad"):
        # A hash multiplies by a constant.
        return {s.name for s in sources if isinstance(s, Reg)} if _all_registers(sources) else set()
    if op.name == "setp" and "s32" in op.mods and _ORDERED.intersection(op.mods):
        return {s.name for s in sources if isinstance(s, Reg)}
    return set()


def _all_registers(operands: tuple[object, ...]) -> bool:
    return all(isinstance(o, Reg) for o in operands)


def _registers(operands: tuple[object, ...]) -> list[str]:
    found: list[str] = []
    for operand in operands:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        found += [i.name for i in items if isinstance(i, Reg)]
    return found
