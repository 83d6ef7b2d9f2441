"""The body of one function: statements, scopes, labels.

Registers, variables and labels of a nested scope are renamed to `name#scope`, so that the flat body
has one meaning per name; inline assembly of nvcc reuses `%tmp` and the like in many scopes.
"""

import re

from tessera_ptx.declarations import read_params, read_registers, read_variables, read_words
from tessera_ptx.lexer import NAME, STATEMENT, Source
from tessera_ptx.operands import BadOperand, OperandReader
from tessera_ptx.syntax import (
    Function,
    Guard,
    Instruction,
    Op,
    Operand,
    Param,
    Prototype,
    Reg,
    RegDecl,
    Sym,
    Variable,
)

_MAX_DEPTH = 200
_DIGITS = re.compile(r"(.*?)(\d+)$", re.ASCII)
_TARGETS = re.compile(rf"\.(?:branchtargets|calltargets)\s+({NAME}(?:\s*,\s*{NAME})*)\s*$", re.ASCII)
_PROTOTYPE = re.compile(
    rf"\.callprototype\s*(\([^()]*\))?\s*({NAME})\s*(?:(\([^()]*\)))?((?:\s*\.\w+(?:\s+\d+)?)*)\s*$", re.ASCII
)
_BRANCHES = frozenset({"bra", "brx", "call"})


class Scope:
    """Names declared in one `{ ... }`; inner declarations get a suffix."""

    __slots__ = ("families", "labels", "number", "parent", "plain", "reader", "registers", "renames")

    def __init__(self, number: int, parent: "Scope | None") -> None:
        self.number, self.parent = number, parent
        self.registers: set[str] = set()
        # prefix -> count, of `.reg .b32 %r<5>`
        self.families: dict[str, int] = {}
        self.renames: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        # Until the scope declares something, the parent's operand cache serves it.
        self.plain: frozenset[str] = frozenset() if parent is None else parent.plain
        self.reader: OperandReader = self._new_reader() if parent is None else parent.reader

    def _new_reader(self) -> OperandReader:
        return OperandReader(self.is_register, self.rename, self.plain)

    def declare(self, name: str, count: int | None) -> str:
        """Records a register (count as in RegDecl) or, with None, a variable; returns its unique name."""
        prefix = name.rstrip("0123456789")
        self.plain -= {prefix}
        if self.parent is None and count and prefix == name and name not in self.renames:
            self.plain |= {name}
        # Names may already stand in a cache from before this declaration.
        self.reader = self._new_reader()
        unique = name if self.parent is None else f"{name}#{self.number}"
        if count is None:
            self.renames[name] = unique
        elif count:
            self.families[name] = count
        else:
            self.registers.add(name)
            self.renames[name] = unique
        return unique

    def _family(self, name: str) -> bool:
        match = _DIGITS.match(name)
        if match is None:
            return False
        prefix, digits = match[1], match[2]
        # `%r12` may be number 2 of a family `%r1`: try every split.
        for i in range(len(digits)):
            count = self.families.get(prefix + digits[:i])
            if count is not None and (digits[i] != "0" or i == len(digits) - 1) and len(digits) - i < 10:
                return int(digits[i:]) < count
        return False

    def is_register(self, name: str) -> bool:
        """Whether the name was declared with .reg in this scope or one around it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.registers or scope._family(name):
                return True
            if name in scope.renames:
                return False
            scope = scope.parent
        return False

    def rename(self, name: str) -> str:
        """The unique name behind a name written in this scope."""
        scope: Scope | None = self
        while scope is not None:
            unique = scope.renames.get(name)
            if unique is not None:
                return unique
            if scope.parent is not None and scope._family(name):
                return f"{name}#{scope.number}"
            scope = scope.parent
        return name


class BodyReader:
    """Reads one body; `read` starts behind the opening brace."""

    def __init__(self, source: Source, head: Function) -> None:
        self.source, self.head = source, head
        self.scope = Scope(0, None)
        self.num_scopes = 1
        self.depth = 1
        self.body: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: list[RegDecl] = []
        self.variables: list[Variable] = []
        self.tables: dict[str, tuple[str, ...]] = {}
        self.prototypes: dict[str, Prototype] = {}
        # Instructions that name a label, with the scope they stand in.
        self.jumps: list[tuple[int, Scope]] = []
        self.pending_label = ""
        for param in (*head.params, *head.returns):
            self.scope.renames[param.name] = param.name
        self.ops: dict[str, Op] = {}

    def read(self, at: int) -> tuple[Function, int]:
        """The function and the offset behind its closing brace."""
        source, text, ops, body = self.source, self.source.text, self.ops, self.body
        line, seen, end = source.place(at)[0], at, at
        count, rfind = text.count, text.rfind
        for match in STATEMENT.finditer(text, at):
            if match.start() != end:
                break
            end = match.end()
            kind = match.lastindex
            if kind == 4:
                start = match.start(3)
                line += count("\n", seen, start)
                seen = start
                spelled = match[3]
                op = ops.get(spelled) or self._op(spelled)
                operands = self._operands(match, op)
                guard = None
                if match[2] is not None:
                    guard = self._guard(match)
                body.append(Instruction(op, guard, operands, line, start - rfind("\n", 0, start)))
                if op.name in _BRANCHES:
                    self.jumps.append((len(body) - 1, self.scope))
            elif kind == 5:
                self._label(match)
            elif kind == 6:
                if self._brace(match):
                    return self._finish(), end
            elif kind == 8:
                self._directive(match)
        where = source.skip_space(end)
        message = "the function is not closed" if where >= len(text) else "a statement is expected"
        raise source.error(message, where)

    def _op(self, spelled: str) -> Op:
        name, *mods = spelled.split(".")
        op = self.ops[spelled] = Op(spelled, name, tuple(mods))
        return op

    def _operands(self, match: re.Match[str], op: Op) -> tuple[Operand, ...]:
        text = match[4]
        if not text or text.isspace():
            return ()
        try:
            return self.scope.reader.read(text)
        except BadOperand as bad:
            at = self.source.skip_space(match.start(4) + bad.at)
            raise self.source.error(f"{bad.message} of {op.text}"[:200], at) from None

    def _guard(self, match: re.Match[str]) -> Guard:
        name = match[2]
        return Guard(Reg(self.scope.rename(name)), match[1] == "!")

    def _label(self, match: re.Match[str]) -> None:
        name = match[5]
        unique = name
        if name in self.scope.labels:
            raise self.source.error(f"label '{name}' is defined twice", match.start(5))
        if name in self.labels or name in self.tables:
            unique = f"{name}#{self.scope.number}"
        self.scope.labels[name] = unique
        self.labels[unique] = len(self.body)
        self.pending_label = unique

    def _brace(self, match: re.Match[str]) -> bool:
        """Opens or closes a scope; True when the function is closed."""
        if match[6] == "{":
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise self.source.error("scopes are nested too deeply", match.start(6))
            self.scope = Scope(self.num_scopes, self.scope)
            self.num_scopes += 1
            return False
        self.depth -= 1
        if self.scope.parent is None:
            return True
        self.scope = self.scope.parent
        return False

    def _directive(self, match: re.Match[str]) -> None:
        source, begin, stop = self.source, match.start(8), match.end(8)
        word = re.split(r"[^\w.]", match[8], maxsplit=1)[0][1:]
        if word in ("branchtargets", "calltargets"):
            self._table(match)
        elif word == "callprototype":
            self._prototype(match)
        elif word not in ("pragma", "attribute"):
            words = read_words(source, begin, stop)
            if words.space == "reg":
                for decl in read_registers(source, words, stop):
                    self.scope.declare(decl.name, decl.count)
                    self.registers.append(decl)
            else:
                for var in read_variables(source, words, stop):
                    unique = self.scope.declare(var.name, None)
                    self.variables.append(_renamed(var, unique))

    def _table(self, match: re.Match[str]) -> None:
        listed = _TARGETS.match(match[8])
        if listed is None or not self.pending_label:
            raise self.source.error("a labelled list of targets is expected", match.start(8))
        self.tables[self.pending_label] = tuple(n.strip() for n in listed[1].split(","))
        self.labels.pop(self.pending_label, None)

    def _prototype(self, match: re.Match[str]) -> None:
        proto = _PROTOTYPE.match(match[8])
        if proto is None or not self.pending_label:
            raise self.source.error("a labelled call prototype is expected", match.start(8))
        line, _ = self.source.place(match.start(8))
        base = match.start(8)
        lists: list[tuple[Param, ...]] = []
        for group in (1, 3):
            inner = (proto.start(group) + base + 1, proto.end(group) + base - 1)
            lists.append(read_params(self.source, *inner) if proto[group] else ())
        name = self.pending_label
        self.prototypes[name] = Prototype(name, lists[0], lists[1], line)
        self.labels.pop(name, None)

    def _finish(self) -> Function:
        head = self.head
        if any("#" in label for label in self.labels):
            self._rename_jumps()
        return Function(
            head.name, head.is_entry, head.linkage, head.params, head.returns, head.attributes,
            tuple(self.registers), tuple(self.variables), tuple(self.body), self.labels, self.tables,
            self.prototypes, head.line, head.column, True, head.param_offsets,
        )  # fmt: skip

    def _rename_jumps(self) -> None:
        """Points branches at the label of their own scope where a label name occurs in several."""
        for index, inner in self.jumps:
            scope: Scope | None = inner
            operands = list(self.body[index].operands)
            for k, operand in enumerate(operands):
                scope = inner
                while isinstance(operand, Sym) and scope is not None:
                    if operand.name in scope.labels:
                        operands[k] = Sym(scope.labels[operand.name])
                        break
                    scope = scope.parent
            self.body[index] = self.body[index]._replace(operands=tuple(operands))


def _renamed(variable: Variable, name: str) -> Variable:
    return Variable(
        name, variable.space, variable.type, variable.size, variable.align, variable.linkage,
        variable.refers, variable.initial, variable.line, variable.column,
    )  # fmt: skip
