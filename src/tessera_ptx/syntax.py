"""The syntax tree of a PTX module: what `parser.parse` returns.

    Module                  version, target, variables, functions (entries and .func), aliases
    ├── Variable            module or function variable: space, type, element count, initial value
    └── Function            one .entry or .func: params, returns, registers, variables, body
        ├── Param           name, type, size in bytes, array or not, `.ptr` attribute
        ├── RegDecl         `.reg .b32 %r<5>` keeps the prefix `%r` and the count 5
        └── Instruction     op, guard, operands, line, column

    Operand = Reg | Special | Imm | FloatImm | Sym | Mem | Vec | Pair | Not | Args

The body of a function is flat: scopes `{ ... }` are resolved by the parser, which renames an inner
register, variable or label that is declared in a nested scope to `name#scope` (`%tmp#3`). So a name
means one thing in the whole function. Labels are indices into `Function.body` (`Function.labels`).

An instruction's `op` is shared by all instructions of the same spelling: `op.text` is
`ld.global.v4.f32`, `op.name` is `ld`, `op.mods` is `("global", "v4", "f32")`. Tables keyed by `op`
are therefore looked up once per spelling.

Hot nodes are named tuples, the rest frozen slotted dataclasses: all immutable, all comparable.
Positions are 1-based lines and columns of the file as given.

Not kept: comments, `.loc`, `.file`, `.section` contents, `.pragma` (except as function attributes).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Op(NamedTuple):
    """An opcode with its qualifiers."""

    text: str  # ld.global.v4.f32
    name: str  # ld
    mods: tuple[str, ...]  # ("global", "v4", "f32")


class Reg(NamedTuple):
    """A virtual register, or a component of a vector register (`%v.x`)."""

    name: str


class Special(NamedTuple):
    """A read-only special register: `%tid.x`, `%laneid`, `%clock64`, ..."""

    name: str


class Imm(NamedTuple):
    """An integer constant; unsigned literals above 2**63 keep their unsigned value."""

    value: int


class FloatImm(NamedTuple):
    """A floating constant; `bits` (32 or 64) says how it was written, 0 for a decimal."""

    value: float
    bits: int
    raw: int  # the bit pattern when bits != 0


class Sym(NamedTuple):
    """A name that is no register: variable, parameter, function, label or prototype, plus a constant."""

    name: str
    offset: int = 0


class Mem(NamedTuple):
    """`[base + offset]`, `[base + index]` never occurs in PTX; tensor operands carry coordinates."""

    base: "Reg | Sym | Imm | Special"
    offset: int
    coords: "tuple[Operand, ...]" = ()


class Vec(NamedTuple):
    """`{a, b, c, d}`, also of one element."""

    items: "tuple[Operand, ...]"


class Pair(NamedTuple):
    """`%r1|%p1`: two results of one instruction."""

    first: "Operand"
    second: "Operand"


class Not(NamedTuple):
    """`!%p1` as an operand, also `-%r1` which some hand-written code uses (`sign` is then '-')."""

    item: "Operand"
    sign: str = "!"


class Args(NamedTuple):
    """`(a, b)`: argument or result list of a call."""

    items: "tuple[Operand, ...]"


Operand = Reg | Special | Imm | FloatImm | Sym | Mem | Vec | Pair | Not | Args


class Guard(NamedTuple):
    """`@%p1` or `@!%p1`."""

    reg: Reg
    negated: bool


class Instruction(NamedTuple):
    """One instruction; `operands` in written order, destination first where there is one."""

    op: Op
    guard: Guard | None
    operands: tuple[Operand, ...]
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class RegDecl:
    """`.reg .b32 %r<5>` or `.reg .pred p` (count 0: the name itself)."""

    type: str
    name: str
    count: int
    line: int
    vector: int = 1


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of an entry or function; array parameters have `is_array` and a size in bytes."""

    name: str
    type: str  # u64, b8, f32, texref ...
    size: int  # bytes; 0 for an unsized array
    align: int
    is_array: bool
    # `.ptr` was written: the value is an address; `ptr_space` its state space ("" = generic).
    is_pointer: bool
    ptr_space: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space; `space` is global, const, shared, local, param, tex, ..."""

    name: str
    space: str
    type: str
    size: int  # bytes; 0 for an unsized (extern) array
    align: int
    linkage: str  # visible, extern, weak, common or ""
    # Names of symbols and functions in the initial value; their addresses are stored here.
    refers: tuple[str, ...]
    # The text after '=', without it; "" when there is none.
    initial: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Prototype:
    """`.callprototype`: shapes of an indirect call."""

    name: str
    returns: tuple[Param, ...]
    params: tuple[Param, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """An `.entry` (a kernel) or a `.func` (a device function)."""

    name: str
    is_entry: bool
    linkage: str
    params: tuple[Param, ...]
    returns: tuple[Param, ...]
    # Directives of the header: ("reqntid", (128,)), ("maxntid", (256, 1, 1)), ("noreturn", ()).
    attributes: Mapping[str, tuple[int, ...]]
    registers: tuple[RegDecl, ...]
    variables: tuple[Variable, ...]
    body: tuple[Instruction, ...]
    labels: Mapping[str, int]
    # .branchtargets and .calltargets lists by their label.
    tables: Mapping[str, tuple[str, ...]]
    prototypes: Mapping[str, Prototype]
    line: int
    column: int
    # False for a forward declaration or an external function.
    defined: bool = True
    # Offset of each parameter in the parameter block (CUDA's layout: natural alignment).
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
        """The kernels, in the order of the file."""
        return tuple(f for f in self.functions if f.is_entry)
