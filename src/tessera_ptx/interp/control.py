"""What the engine must know of instructions that move control or wait: barriers, calls, branch tables."""

from dataclasses import dataclass

from tessera_ptx.interp.decode import Decoder, Get, Put, Unknown
from tessera_ptx.interp.rules_warp import member_getter
from tessera_ptx.interp.state import Block
from tessera_ptx.interp.types import PRED, U32, U64
from tessera_ptx.syntax import Args, Instruction, Operand, Reg, Sym


@dataclass(frozen=True, slots=True)
class Barrier:
    """`bar.sync`, `bar.arrive`, `bar.red` and their `barrier.cta` spellings; `barrier.cluster`."""

    number: Get | None  # None: the cluster's barrier
    count: Get | None  # threads expected; None: all of the block
    waits: bool
    reduction: str  # "", and, or, popc
    predicate: Get | None
    result: Put | None
    arrives: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """A call: who, with what, into what."""

    target: str  # "" when the address is computed
    address: Get | None
    # Names of param variables, or getters of registers and constants.
    arguments: tuple[str | Get, ...]
    results: tuple[str | Put, ...]


def describe(block: Block, decoder: Decoder) -> None:
    """Fill `block.info`; what cannot be decoded stays None and is refused when a lane gets there."""
    try:
        if block.kind == "collective":
            block.info = member_getter(block.body[0], decoder)
        elif block.end is not None and block.kind == "brx":
            block.info = decoder.get(block.end.operands[0], U32)
        elif block.end is not None and block.kind == "barrier":
            block.info = _barrier(block.end, decoder)
        elif block.end is not None and block.kind == "call":
            block.info = _call(block.end, decoder)
    except Unknown:
        block.info = None


def _barrier(ins: Instruction, decoder: Decoder) -> Barrier:
    mods, operands = ins.op.mods, list(ins.operands)
    if "cluster" in mods:
        return Barrier(None, None, "wait" in mods, "", None, None, arrives="arrive" in mods)
    if "red" not in mods:
        gets = [decoder.get(o, U32) for o in operands]
        waits = "arrive" not in mods
        return Barrier(gets[0], gets[1] if len(gets) > 1 else None, waits, "", None, None)
    name = next(m for m in mods if m in ("and", "or", "popc"))
    result = decoder.put(operands[0], U32 if name == "popc" else PRED)
    count = decoder.get(operands[2], U32) if len(operands) == 4 else None
    return Barrier(decoder.get(operands[1], U32), count, True, name, decoder.predicate(operands[-1]), result)


def _call(ins: Instruction, decoder: Decoder) -> Call:
    operands = list(ins.operands)
    results = _list(operands)
    target = operands.pop(0)
    arguments = _list(operands)
    known = isinstance(target, Sym)
    return Call(
        target.name if isinstance(target, Sym) else "",
        None if known else decoder.get(target, U64),
        tuple(_argument(o, decoder) for o in arguments),
        tuple(_result(o, decoder) for o in results),
    )


def _list(operands: list[Operand]) -> tuple[Operand, ...]:
    """Takes a bracketed list off the front; an absent one is empty."""
    if operands and isinstance(operands[0], Args):
        first = operands.pop(0)
        assert isinstance(first, Args)
        return first.items
    return ()


def _argument(operand: Operand, decoder: Decoder) -> "str | Get":
    return operand.name if isinstance(operand, Sym) else decoder.get(operand, U64)


def _result(operand: Operand, decoder: Decoder) -> "str | Put":
    if isinstance(operand, Sym):
        return operand.name
    if not isinstance(operand, Reg):
        raise Unknown("a result that is no register")
    return decoder.put(operand, U64)
