"""Decodes instructions into steps by the rule table.

A rule is a function `(ins, decoder) -> Step`, registered with `@rule("add", "sub")`. An instruction or form
without a rule raises UnknownInstruction when executed.

Blocks end at branches, calls, barriers and labels; a warp collective is a block of its own. A block's rank is
its post-order position in the post-dominator tree: running the lowest rank first reconverges lanes at
immediate post-dominators.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera_ptx.cfg import dominators, reverse_postorder
from tessera_ptx.errors import UnknownInstruction
from tessera_ptx.interp.state import Active, CodeBlock, DecodedFunction, Frame, Step
from tessera_ptx.interp.types import PRED, TYPES, U64, Array, Type, narrow, widen
from tessera_ptx.syntax import (
    FloatImm,
    Function,
    Imm,
    Instruction,
    Mem,
    Not,
    Operand,
    Pair,
    Reg,
    RegDecl,
    Special,
    Sym,
    Vec,
)

ENDS = frozenset({"bra", "brx", "ret", "exit", "trap", "call"})
_COLLECTIVE = frozenset({"mma", "ldmatrix", "stmatrix", "wmma", "wgmma", "movmatrix", "elect", "redux"})
_COLLECTIVE_SYNC = frozenset({"shfl", "vote", "match"})


def kind_of(ins: Instruction) -> str:
    name, mods = ins.op.name, ins.op.mods
    if name in ENDS:
        return name
    if name in ("bar", "barrier"):
        return "collective" if "warp" in mods else "barrier"
    if name in _COLLECTIVE or (name in _COLLECTIVE_SYNC and "sync" in mods):
        return "collective"
    return "plain"


def blocks_of(function: Function) -> list[CodeBlock]:
    starts = {0, *function.labels.values()}
    for index, ins in enumerate(function.body):
        kind = kind_of(ins)
        if kind != "plain":
            starts.add(index + 1)
            if kind == "collective":
                starts.add(index)
    ordered = sorted(s for s in starts if s < len(function.body)) or [0]
    blocks = []
    for here, there in zip(ordered, [*ordered[1:], len(function.body)], strict=True):
        blocks.append(_block(here, list(function.body[here:there])))
    where = {block.first: i for i, block in enumerate(blocks)}
    labels = {name: where.get(at, -1) for name, at in function.labels.items()}
    for i, block in enumerate(blocks):
        block.next = i + 1 if i + 1 < len(blocks) else -1
        block.targets = _targets(block, function, labels)
    _rank(blocks)
    return blocks


def _block(first: int, body: list[Instruction]) -> CodeBlock:
    kind = kind_of(body[-1]) if body else "plain"
    if kind in ("plain", "collective"):
        return CodeBlock(first, body, None, kind)
    return CodeBlock(first, body[:-1], body[-1], kind)


def _targets(block: CodeBlock, function: Function, labels: dict[str, int]) -> tuple[int, ...]:
    if block.end is None or block.kind not in ("bra", "brx"):
        return ()
    last = block.end.operands[-1]
    name = last.name if isinstance(last, Sym) else ""
    names = function.tables.get(name, ()) if block.kind == "brx" else (name,)
    return tuple(labels.get(n, -1) for n in names)


def successors(block: CodeBlock) -> list[int]:
    """-1 is the exit."""
    if block.kind in ("ret", "exit", "trap"):
        return [-1] if block.end is not None and block.end.guard is None else [-1, block.next]
    if block.kind in ("bra", "brx"):
        falls = block.end is not None and block.end.guard is not None
        return [*block.targets, block.next] if falls else list(block.targets)
    return [block.next]


def _rank(blocks: list[CodeBlock]) -> None:
    parent = post_dominators([successors(b) for b in blocks])
    children: dict[int, list[int]] = {}
    for block, above in enumerate(parent):
        children.setdefault(above, []).append(block)
    rank, stack = 0, [(-1, False)]
    while stack:
        node, done = stack.pop()
        if not done:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children.get(node, [])))
        elif node >= 0:
            blocks[node].rank = rank
            rank += 1


def post_dominators(edges: list[list[int]]) -> list[int]:
    """Endless loops get an exit."""
    rank = _ranks(edges)
    for block in range(len(edges)):
        if block not in rank:
            edges[block] = [*edges[block], -1]
            rank = _ranks(edges)
    blocks = list(rank)
    above = dominators([tuple(rank[s] for s in edges[b]) if b >= 0 else () for b in blocks])
    return [blocks[above[rank[block]]] for block in range(len(edges))]


def _ranks(edges: list[list[int]]) -> dict[int, int]:
    """Blocks in reverse post-order from the exit, -1, against the edges."""
    before: dict[int, list[int]] = {block: [] for block in range(-1, len(edges))}
    for block, targets in enumerate(edges):
        for after in targets:
            before[after].append(block)
    return {block: rank for rank, block in enumerate(reverse_postorder(before, -1))}


Get = Callable[[Frame], Any]
Put = Callable[[Frame, Active, Any], None]
Rule = Callable[[Instruction, "Decoder"], Step]
RULES: dict[str, Rule] = {}
CARRY = "%carry"  # condition code of add.cc
_SCOPED = re.compile(r"#\d+$")


class Unknown(Exception):
    """An instruction form without a rule."""


def rule(*names: str) -> Callable[[Rule], Rule]:

    def register(made: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for '{name}'")
            RULES[name] = made
        return made

    return register


def decode(
    function: Function, file: str, describe: Callable[[CodeBlock, "Decoder"], None]
) -> DecodedFunction:
    decoder = Decoder(function, file)
    blocks = blocks_of(function) if function.body else [CodeBlock(0, [], None, "ret")]
    for block in blocks:
        block.steps = [decoder.step(ins) for ins in block.body]
        if block.end is not None:
            block.guard, block.negated = decoder.guard(block.end)
        describe(block, decoder)
    if blocks[-1].kind in ("plain", "collective"):
        blocks.append(CodeBlock(len(function.body), [], None, "ret", rank=blocks[-1].rank + 1))
        blocks[-2].next = len(blocks) - 1
    sizes = {v.name: (v.size, v.align) for v in function.variables if v.space in ("local", "param")}
    sizes |= {p.name: (p.size, p.align) for p in (*function.params, *function.returns)}
    params, returns = (tuple(p.name for p in ps) for ps in (function.params, function.returns))
    return DecodedFunction(
        function.name, blocks, decoder.slots, decoder.dtypes, params, returns, sizes, function.is_entry,
        function.line,
    )  # fmt: skip


class Decoder:
    def __init__(self, function: Function, file: str) -> None:
        self.function, self.file = function, file
        self.slots: dict[str, tuple[int, np.dtype[Any]]] = {}
        self.dtypes: list[np.dtype[Any]] = []
        self._exact: dict[str, list[RegDecl]] = {}
        for decl in function.registers:
            self._exact.setdefault(_SCOPED.sub("", decl.name), []).append(decl)
        self._formals = _register_formals(function)

    def step(self, ins: Instruction) -> tuple[Step, Instruction, int, bool]:
        made = RULES.get(ins.op.name)
        try:
            if made is None:
                raise Unknown("no rule")
            step = made(ins, self)
        except Unknown as why:
            step = self._raiser(ins, str(why))
        guard, negated = self.guard(ins)
        return step, ins, guard, negated

    def _raiser(self, ins: Instruction, why: str) -> Step:
        place = f"{self.file}:{ins.line}"

        def step(frame: Frame, act: Active) -> None:
            raise UnknownInstruction(f"the interpreter does not run '{ins.op.text}' ({why})", place=place)

        return step

    def guard(self, ins: Instruction) -> tuple[int, bool]:
        if ins.guard is None:
            return -1, False
        return self.slot(ins.guard.reg.name)[0], ins.guard.negated

    def slot(self, name: str) -> tuple[int, np.dtype[Any]]:
        known = self.slots.get(name)
        if known is None:
            known = self.slots[name] = len(self.dtypes), self._dtype(name)
            self.dtypes.append(known[1])
        return known

    def _dtype(self, name: str) -> np.dtype[Any]:
        if name == CARRY:
            return np.dtype(bool)
        if name in self._formals:
            return TYPES[self._formals[name]].raw
        plain = _SCOPED.sub("", name.split(".", maxsplit=1)[0])
        decls = self._exact.get(plain, [])
        for cut in range(len(plain) - 1, 0, -1):
            if not plain[cut:].isdigit():
                break
            decls = decls + [d for d in self._exact.get(plain[:cut], []) if d.count]
        found = {TYPES[d.type].raw for d in decls if d.type in TYPES}
        if not found:
            raise Unknown(f"register {name} of no known type")
        # Scopes may declare one name with several types.
        return max(found, key=lambda d: (d.itemsize, d != np.dtype(bool)))

    def get(self, operand: Operand, wanted: Type) -> Get:
        if isinstance(operand, Sym) and operand.name in self._formals:
            operand = Reg(operand.name)
        if isinstance(operand, Reg):
            return self._get_reg(operand, wanted)
        if isinstance(operand, Imm | FloatImm):
            value = literal(operand, wanted)
            return lambda frame: value
        if isinstance(operand, Special):
            name = operand.name
            return lambda frame: narrow(special(frame, name), wanted)
        if isinstance(operand, Sym):
            place = self.symbol(operand.name)
            offset = operand.offset
            return lambda frame: narrow(np.asarray(np.uint64(place(frame) + offset)), wanted)
        if isinstance(operand, Not):
            inner = self.get(operand.item, wanted)
            return (lambda frame: ~inner(frame)) if operand.sign == "!" else (lambda frame: -inner(frame))
        raise Unknown(f"operand {operand!r}")

    def _get_reg(self, operand: Reg, wanted: Type) -> Get:
        slot, raw = self.slot(operand.name)
        if raw == wanted.dtype:
            return lambda frame: frame.regs[slot]
        if raw == wanted.raw:
            dtype = wanted.dtype
            return lambda frame: frame.regs[slot].view(dtype)
        return lambda frame: narrow(frame.regs[slot], wanted)

    def put(self, operand: Operand, given: Type) -> Put:
        if isinstance(operand, Pair):
            raise Unknown("a pair of destinations")
        if isinstance(operand, Sym) and operand.name in self._formals:
            operand = Reg(operand.name)
        if not isinstance(operand, Reg):
            raise Unknown(f"destination {operand!r}")
        if operand.name == "_":
            return lambda frame, act, value: None
        slot, raw = self.slot(operand.name)

        def put(frame: Frame, act: Active, value: Any) -> None:
            if value.dtype != raw:
                value = widen(value, given, raw)
            if act.full and value.ndim:
                frame.regs[slot] = value
            else:
                frame.regs[slot] = np.where(act.mask, value, frame.regs[slot])

        return put

    def vector(self, operand: Operand, wanted: Type) -> list[Get]:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        return [self.get(item, wanted) for item in items]

    def vector_put(self, operand: Operand, given: Type) -> list[Put]:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        return [self.put(item, given) for item in items]

    def address(self, operand: Operand) -> Get:
        if not isinstance(operand, Mem):
            raise Unknown("no memory operand")
        base = self.get(operand.base, U64)
        offset = np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF)
        if not operand.offset:
            return base
        return lambda frame: base(frame) + offset

    def symbol(self, name: str) -> Callable[[Frame], int]:

        def place(frame: Frame) -> int:
            at = frame.places.get(name)
            if at is not None:
                return at
            known = frame.machine.symbols.get(name)
            if known is None:
                raise UnknownInstruction(f"symbol '{name}' has no address", place=self.file)
            return known

        return place

    def predicate(self, operand: Operand) -> Get:
        return self.get(operand, PRED)


def _register_formals(function: Function) -> dict[str, str]:
    """Name -> type, as in `.func f (.reg .b32 k)`.

    The syntax tree does not mark them; only registers are used in arithmetic.
    """
    if function.is_entry:
        return {}
    formals = {p.name: p.type for p in (*function.params, *function.returns)}
    plain = {
        operand.name
        for ins in function.body
        if ins.op.name not in ("mov", "call")
        for operand in ins.operands
        if isinstance(operand, Sym)
    }
    return {name: kind for name, kind in formals.items() if name in plain}


def literal(operand: Imm | FloatImm, wanted: Type) -> Any:
    if isinstance(operand, FloatImm):
        if wanted.dtype.kind == "f":
            exact = (
                np.array([operand.raw], f"u{operand.bits // 8}").view(f"f{operand.bits // 8}")
                if operand.bits
                else None
            )
            return (exact[0] if exact is not None else np.float64(operand.value)).astype(wanted.dtype)
        size = wanted.bits // 8
        if operand.bits:
            return wanted.raw.type(operand.raw & ((1 << wanted.bits) - 1)).view(wanted.dtype)
        return np.array([operand.value], f"f{size}").view(wanted.dtype)[0]
    if wanted.bits == 1:
        return np.bool_(operand.value != 0)
    if wanted.dtype.kind == "f":
        return wanted.dtype.type(operand.value)
    return wanted.raw.type(operand.value & ((1 << wanted.bits) - 1)).view(wanted.dtype)


def special(frame: Frame, name: str) -> Array:
    machine = frame.machine
    known = machine.special.get(name)
    if known is not None:
        return known
    if name.startswith(("%clock", "%globaltimer")):
        machine.clock += 1
        return np.full(machine.num_lanes, machine.clock, np.uint64)
    raise UnknownInstruction(f"the interpreter has no special register {name}", place=machine.file)


def simple(put: Put, function: Callable[..., Any], *gets: Get) -> Step:
    if len(gets) == 1:
        (a,) = gets
        return lambda frame, act: put(frame, act, function(a(frame)))
    if len(gets) == 2:
        a, b = gets
        return lambda frame, act: put(frame, act, function(a(frame), b(frame)))
    if len(gets) == 3:
        a, b, c = gets
        return lambda frame, act: put(frame, act, function(a(frame), b(frame), c(frame)))
    return lambda frame, act: put(frame, act, function(*(g(frame) for g in gets)))


def only(found: list[Type], ins: Instruction) -> Type:
    if not found:
        raise Unknown(f"no type in {ins.op.text}")
    return found[-1]
