"""Syntax tree of a PTX module, as returned by `parser.parse`.

    Module                  version, target, variables, functions (entries and .func), aliases
    ├── Variable            module or function variable: space, type, element count, initial value
    └── Function            one .entry or .func: params, returns, registers, variables, body
        ├── Param           name, type, size in bytes, array or not, `.ptr` attribute
        ├── RegDecl         `.reg .b32 %r<5>` keeps the prefix `%r` and the count 5
        └── Instruction     op, guard, operands, line, column

    Operand = Reg | Special | Imm | FloatImm | Sym | Mem | Vec | Pair | Not | Args

Function bodies are flat: names declared in a nested scope become `name#scope` (`%tmp#3`), unique in the
function. `Function.labels` index `Function.body`. Instructions of the same spelling share `op`: `op.text` is
`ld.global.v4.f32`, `op.name` is `ld`, `op.mods` is `("global", "v4", "f32")`. Nodes are immutable and
comparable. Lines and columns are 1-based. Not kept: comments, `.loc`, `.file`, `.section` contents, `.pragma`
(except as function attributes).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Op(NamedTuple):
    """Opcode with qualifiers."""

    text: str  # ld.global.v4.f32
    name: str  # ld
    mods: tuple[str, ...]  # ("global", "v4", "f32")


class Reg(NamedTuple):
    """Virtual register or vector component (`%v.x`)."""

    name: str


class Special(NamedTuple):
    """Special register: `%tid.x`, `%laneid`, `%clock64`, ..."""

    name: str


class Imm(NamedTuple):
    """Integer constant; unsigned literals above 2**63 stay unsigned."""

    value: int


class FloatImm(NamedTuple):
    """Float constant; `bits` is 32 or 64 for a bit pattern, 0 for a decimal."""

    value: float
    bits: int
    raw: int  # bit pattern if bits != 0


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
    """`{a, b, c, d}`, also with one element."""

    items: "tuple[Operand, ...]"


class Pair(NamedTuple):
    """`%r1|%p1`: two results."""

    first: "Operand"
    second: "Operand"


class Not(NamedTuple):
    """`!%p1`, or `-%r1` in hand-written code (`sign` is '-')."""

    item: "Operand"
    sign: str = "!"


class Args(NamedTuple):
    """`(a, b)`: arguments or results of a call."""

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
    """Parameter of an entry or function."""

    name: str
    type: str  # u64, b8, f32, texref ...
    size: int  # bytes; 0 for an unsized array
    align: int
    is_array: bool
    # Declared `.ptr`: an address in `ptr_space` ("" = generic).
    is_pointer: bool
    ptr_space: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Variable:
    """`space` is global, const, shared, local, param, tex, ..."""

    name: str
    space: str
    type: str
    size: int  # bytes; 0 for an unsized (extern) array
    align: int
    linkage: str  # visible, extern, weak, common or ""
    # Symbols and functions whose addresses are in the initial value.
    refers: tuple[str, ...]
    # Text after '=', or "".
    initial: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Prototype:
    """`.callprototype` of an indirect call."""

    name: str
    returns: tuple[Param, ...]
    params: tuple[Param, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """An `.entry` (kernel) or `.func` (device function)."""

    name: str
    is_entry: bool
    linkage: str
    params: tuple[Param, ...]
    returns: tuple[Param, ...]
    # Header directives: ("reqntid", (128,)), ("maxntid", (256, 1, 1)), ("noreturn", ()).
    attributes: Mapping[str, tuple[int, ...]]
    registers: tuple[RegDecl, ...]
    variables: tuple[Variable, ...]
    body: tuple[Instruction, ...]
    labels: Mapping[str, int]
    # .branchtargets and .calltargets by label.
    tables: Mapping[str, tuple[str, ...]]
    prototypes: Mapping[str, Prototype]
    line: int
    column: int
    # False for a declaration or external function.
    defined: bool = True
    # Offset of each parameter in the parameter block.
    param_offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Module:
    """One PTX file."""

    file: str
    version: tuple[int, int]
    target: str  # sm_90a
    target_options: tuple[str, ...]  # texmode_independent, debug, ...
    address_size: int
    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]
    aliases: Mapping[str, str]
    num_lines: int

    @property
    def entries(self) -> tuple[Function, ...]:
        """Kernels in file order."""
        return tuple(f for f in self.functions if f.is_entry)
