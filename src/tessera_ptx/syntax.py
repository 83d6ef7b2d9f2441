"""Syntax tree of a PTX module, as returned by `parser.parse`.

Function bodies are flat: names of nested scopes become `name#scope` (`%tmp#3`). `Function.labels` index
`Function.body`. Instructions of the same spelling share `op`. Lines and columns are 1-based. Not kept:
comments, `.loc`, `.file`, `.section` contents, `.pragma` (except as function attributes).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Op(NamedTuple):
    text: str  # ld.global.v4.f32
    name: str  # ld
    mods: tuple[str, ...]  # ("global", "v4", "f32")


class Reg(NamedTuple):
    """`%r1`, or a vector component (`%v.x`)."""

    name: str


class Special(NamedTuple):
    """`%tid.x`, `%laneid`, `%clock64`, ..."""

    name: str


class Imm(NamedTuple):
    """Unsigned literals above 2**63 stay unsigned."""

    value: int


class FloatImm(NamedTuple):
    """`bits` is 32 or 64 for a bit pattern, 0 for a decimal."""

    value: float
    bits: int
    raw: int  # bit pattern


class Sym(NamedTuple):
    """Variable, parameter, function, label or prototype, plus a constant."""

    name: str
    offset: int = 0


class Mem(NamedTuple):
    """`[base + offset]`; tensor operands have coordinates."""

    base: "Reg | Sym | Imm | Special"
    offset: int
    coords: "tuple[Operand, ...]" = ()


class Vec(NamedTuple):
    items: "tuple[Operand, ...]"


class Pair(NamedTuple):
    """`%r1|%p1`: two results."""

    first: "Operand"
    second: "Operand"


class Not(NamedTuple):
    """`!%p1`, or `-%r1` in hand-written code."""

    item: "Operand"
    sign: str = "!"


class Args(NamedTuple):
    """`(a, b)` of a call."""

    items: "tuple[Operand, ...]"


Operand = Reg | Special | Imm | FloatImm | Sym | Mem | Vec | Pair | Not | Args


class Guard(NamedTuple):
    """`@%p1` or `@!%p1`."""

    reg: Reg
    negated: bool


class Instruction(NamedTuple):
    """Operands in written order, destination first."""

    op: Op
    guard: Guard | None
    operands: tuple[Operand, ...]
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class RegDecl:
    """`.reg .b32 %r<5>` or `.reg .pred p` (count 0)."""

    type: str
    name: str
    count: int
    line: int
    vector: int = 1


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    type: str
    size: int  # 0: unsized
    align: int
    is_array: bool
    # Declared `.ptr`; ptr_space "": generic.
    is_pointer: bool
    ptr_space: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    space: str
    type: str
    size: int  # 0: unsized (extern)
    align: int
    linkage: str
    refers: tuple[str, ...]
    initial: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Prototype:
    name: str
    returns: tuple[Param, ...]
    params: tuple[Param, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    is_entry: bool
    linkage: str
    params: tuple[Param, ...]
    returns: tuple[Param, ...]
    # ("reqntid", (128,)), ("maxntid", (256, 1, 1)), ("noreturn", ()).
    attributes: Mapping[str, tuple[int, ...]]
    registers: tuple[RegDecl, ...]
    variables: tuple[Variable, ...]
    body: tuple[Instruction, ...]
    labels: Mapping[str, int]
    tables: Mapping[str, tuple[str, ...]]
    prototypes: Mapping[str, Prototype]
    line: int
    column: int
    defined: bool = True
    param_offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Module:
    file: str
    version: tuple[int, int]
    target: str  # sm_90a
    target_options: tuple[str, ...]
    address_size: int
    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]
    aliases: Mapping[str, str]

    @property
    def entries(self) -> tuple[Function, ...]:
        return tuple(f for f in self.functions if f.is_entry)
