"""PTX text -> `Module`; raises ParseError, nothing else.

Accepts PTX ISA 6 to 9 from nvcc, clang/llc, Triton and by hand. Opcodes are not checked, so newer ISAs parse.
Parameters have natural alignment, as in CUDA launches. Names of nested scopes become `name#scope`, so each
name in the flat body is unique. Not handled: preprocessor lines, array registers.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tessera_ptx.lexer import NAME, STATEMENT, TOP, BadOperand, OperandReader, SourceText, parse_int
from tessera_ptx.syntax import (
    Function,
    Guard,
    Instruction,
    Module,
    Op,
    Operand,
    Param,
    Prototype,
    Reg,
    RegDecl,
    Sym,
    Variable,
)

TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16, "pred": 1,
    "texref": 8, "samplerref": 8, "surfref": 8, "e4m3x2": 2, "e5m2x2": 2,
}  # fmt: skip
SPACES = frozenset({"global", "const", "shared", "local", "param", "tex"})
LINKAGE = frozenset({"visible", "extern", "weak", "common"})

_WORD = re.compile(r"\s*\.([a-z]\w*(?:::\w+)*)(\s*\(([^)]*)\))?", re.ASCII)
_ALIGN = re.compile(r"\s+(\d+)", re.ASCII)
_DECLARATOR = re.compile(rf"\s*({NAME})\s*(<\s*(\d+)\s*>)?\s*((?:\[\s*\w*\s*\]\s*)*)", re.ASCII)
_DIMENSION = re.compile(r"\[\s*(\w*)\s*\]", re.ASCII)
_REFERENCE = re.compile(rf"(?<![\w$.%])({NAME})(?![\w$])", re.ASCII)
_MAX_BYTES = 1 << 48


class Words(NamedTuple):
    """`.visible .global .align 8 .b8`"""

    linkage: str
    space: str
    type: str
    vector: int
    align: int
    is_pointer: bool
    ptr_space: str
    end: int


def read_words(source: SourceText, at: int, stop: int) -> Words:
    linkage = space = type_ = ptr_space = ""
    vector, align, is_pointer = 1, 0, False
    text = source.text
    while (match := _WORD.match(text, at, stop)) is not None:
        word, at = match[1], match.end()
        if word in LINKAGE:
            linkage = word
        elif word == "align":
            number = _ALIGN.match(text, at, stop)
            if number is None or len(number[1]) > 9:
                raise source.error("an alignment is expected behind .align", at)
            align, at = int(number[1]), number.end()
        elif word == "ptr":
            is_pointer = True
        elif word.split("::")[0] in SPACES or word == "reg":
            if is_pointer:
                ptr_space = word
            else:
                space = word
        elif word in TYPE_BYTES:
            type_ = word
        elif word in ("v2", "v4", "v8"):
            vector = int(word[1])
        elif word not in ("attribute", "managed", "unified"):
            raise source.error(f"unknown directive or type '.{word}'", match.start(1))
    return Words(linkage, space, type_, vector, align, is_pointer, ptr_space, at)


def _count(source: SourceText, dims: str, at: int) -> int:
    """Elements of `[4][3]`; 0 for an open dimension."""
    total = 1
    for match in _DIMENSION.finditer(dims):
        size = parse_int(match[1]) if match[1] else 0
        if size is None or total * size > _MAX_BYTES:
            raise source.error(f"'{match[1]}' is no array size", at)
        total *= size
    return total


def read_params(source: SourceText, at: int, stop: int) -> tuple[Param, ...]:
    """`at` is behind '(' and `stop` at ')'."""
    params: list[Param] = []
    while source.skip_space(at) < stop:
        begin = source.skip_space(at)
        words = read_words(source, begin, stop)
        match = _DECLARATOR.match(source.text, words.end, stop)
        if match is None or not words.type or words.space not in ("param", "reg"):
            raise source.error("a parameter declaration is expected", begin)
        size = TYPE_BYTES[words.type] * words.vector
        if match[4]:
            size *= _count(source, match[4], match.start(4))
        line, column = source.place(begin)
        params.append(
            Param(
                match[1],
                words.type,
                size,
                words.align or TYPE_BYTES[words.type] * words.vector,
                bool(match[4]),
                words.is_pointer,
                words.ptr_space,
                line,
                column,
            )
        )
        at = source.skip_space(match.end())
        if at < stop:
            if source.text[at] != ",":
                raise source.error("',' or ')' is expected", at)
            at += 1
    return tuple(params)


def param_offsets(params: tuple[Param, ...]) -> dict[str, int]:
    offsets, at = {}, 0
    for param in params:
        align = max(param.align, 1)
        at = -(-at // align) * align
        offsets[param.name] = at
        at += param.size
    return offsets


def read_registers(source: SourceText, words: Words, stop: int) -> list[RegDecl]:
    """`.reg .b32 %r<5>, x;`"""
    if not words.type:
        raise source.error("a register type is expected", words.end)
    declared, at = [], words.end
    while True:
        match = _DECLARATOR.match(source.text, at, stop)
        if match is None or match[4] or len(match[3] or "") > 9:
            raise source.error("a register name is expected", at)
        line, _ = source.place(match.start(1))
        declared.append(RegDecl(words.type, match[1], int(match[3] or 0), line, words.vector))
        at = source.skip_space(match.end())
        if at >= stop:
            return declared
        if source.text[at] != ",":
            raise source.error("',' or ';' is expected", at)
        at += 1


def read_variables(source: SourceText, words: Words, stop: int) -> list[Variable]:
    """`.global .align 4 .b8 name[16] = {...}, other;`; `stop` is at the semicolon."""
    if not words.type or not words.space:
        raise source.error("a variable declaration is expected", words.end)
    declared, at = [], words.end
    while True:
        match = _DECLARATOR.match(source.text, at, stop)
        if match is None:
            raise source.error("a variable name is expected", at)
        size = TYPE_BYTES[words.type] * words.vector
        if match[4]:
            size *= _count(source, match[4], match.start(4))
        # `.b32 a<4>` declares a0..a3.
        names = (
            [match[1]] if match[3] is None else [f"{match[1]}{i}" for i in range(min(int(match[3]), 4096))]
        )
        initial, at = _initial(source, source.skip_space(match.end()), stop)
        line, column = source.place(match.start(1))
        refers = (
            tuple(n for n in _REFERENCE.findall(initial) if n not in ("generic", "mask")) if initial else ()
        )
        declared += [
            Variable(
                name,
                words.space.split("::")[0],
                words.type,
                size,
                words.align or TYPE_BYTES[words.type],
                words.linkage,
                refers,
                initial,
                line,
                column,
            )
            for name in names
        ]
        if at >= stop:
            return declared
        if source.text[at] != ",":
            raise source.error("',' or ';' is expected", at)
        at += 1


_VALUE = re.compile(r"[^,{}]*")
_BRACE = re.compile(r"[{}]")


def _initial(source: SourceText, at: int, stop: int) -> tuple[str, int]:
    text = source.text
    if at >= stop or text[at] != "=":
        return "", at
    begin = source.skip_space(at + 1)
    if begin < stop and text[begin] == "{":
        depth = 0
        for match in _BRACE.finditer(text, begin, stop):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return text[begin : match.end()], source.skip_space(match.end())
        raise source.error("the initial value is not closed", begin)
    match_value = _VALUE.match(text, begin, stop)
    end = match_value.end() if match_value else begin
    return text[begin:end].strip(), source.skip_space(end)


_MAX_DEPTH = 200
_DIGITS = re.compile(r"(.*?)(\d+)$", re.ASCII)
_TARGETS = re.compile(rf"\.(?:branchtargets|calltargets)\s+({NAME}(?:\s*,\s*{NAME})*)\s*$", re.ASCII)
_PROTOTYPE = re.compile(
    rf"\.callprototype\s*(\([^()]*\))?\s*({NAME})\s*(?:(\([^()]*\)))?((?:\s*\.\w+(?:\s+\d+)?)*)\s*$", re.ASCII
)
_BRANCHES = frozenset({"bra", "brx", "call"})


class NameScope:
    """Inner declarations get a suffix."""

    __slots__ = ("families", "labels", "number", "parent", "plain", "reader", "registers", "renames")

    def __init__(self, number: int, parent: "NameScope | None") -> None:
        self.number, self.parent = number, parent
        self.registers: set[str] = set()
        # Prefix -> count, for `.reg .b32 %r<5>`.
        self.families: dict[str, int] = {}
        self.renames: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        # Without declarations it shares its parent's operand cache.
        self.plain: frozenset[str] = frozenset() if parent is None else parent.plain
        self.reader: OperandReader = self._new_reader() if parent is None else parent.reader

    def _new_reader(self) -> OperandReader:
        return OperandReader(self.is_register, self.rename, self.plain)

    def declare(self, name: str, count: int | None) -> str:
        """Count as in RegDecl, None for a variable; returns the unique name."""
        prefix = name.rstrip("0123456789")
        self.plain -= {prefix}
        if self.parent is None and count and prefix == name and name not in self.renames:
            self.plain |= {name}
        # A cache may hold names from before this declaration.
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
        # `%r12` may be number 2 of a family `%r1`: tries every split.
        for i in range(len(digits)):
            count = self.families.get(prefix + digits[:i])
            if count is not None and (digits[i] != "0" or i == len(digits) - 1) and len(digits) - i < 10:
                return int(digits[i:]) < count
        return False

    def is_register(self, name: str) -> bool:
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.registers or scope._family(name):
                return True
            if name in scope.renames:
                return False
            scope = scope.parent
        return False

    def rename(self, name: str) -> str:
        scope: NameScope | None = self
        while scope is not None:
            unique = scope.renames.get(name)
            if unique is not None:
                return unique
            if scope.parent is not None and scope._family(name):
                return f"{name}#{scope.number}"
            scope = scope.parent
        return name


class BodyReader:
    def __init__(self, source: SourceText, head: Function) -> None:
        self.source, self.head = source, head
        self.scope = NameScope(0, None)
        self.num_scopes = 1
        self.depth = 1
        self.body: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: list[RegDecl] = []
        self.variables: list[Variable] = []
        self.tables: dict[str, tuple[str, ...]] = {}
        self.prototypes: dict[str, Prototype] = {}
        self.jumps: list[tuple[int, NameScope]] = []
        self.pending_label = ""
        for param in (*head.params, *head.returns):
            self.scope.renames[param.name] = param.name
        self.ops: dict[str, Op] = {}

    def read(self, at: int) -> tuple[Function, int]:
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
        """True at the end of the function."""
        if match[6] == "{":
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise self.source.error("scopes are nested too deeply", match.start(6))
            self.scope = NameScope(self.num_scopes, self.scope)
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
                    self.variables.append(replace(var, name=unique))

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
        for index, inner in self.jumps:
            scope: NameScope | None = inner
            operands = list(self.body[index].operands)
            for k, operand in enumerate(operands):
                scope = inner
                while isinstance(operand, Sym) and scope is not None:
                    if operand.name in scope.labels:
                        operands[k] = Sym(scope.labels[operand.name])
                        break
                    scope = scope.parent
            self.body[index] = self.body[index]._replace(operands=tuple(operands))


_NAME = re.compile(rf"\s*({NAME})", re.ASCII)
_CLOSE = re.compile(r"[^()]*\)", re.ASCII)
_ATTRIBUTE = re.compile(
    r"\s*\.([a-z]\w*)((?:\s+\w+(?:\s*,\s*\w+)*)?)(?:\s*\"[^\"\n]*\"(?:\s*,\s*\"[^\"\n]*\")*\s*;)?", re.ASCII
)
_ALIAS = re.compile(rf"\.alias\s+({NAME})\s*,\s*({NAME})\s*$", re.ASCII)
_IGNORED = ("pragma", "file", "loc", "section")


def parse(text: str | bytes, file: str = "<ptx>") -> Module:
    """UTF-8, with an optional trailing NUL."""
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    return _ModuleReader(SourceText(text, file)).read()


class _ModuleReader:
    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.version = (0, 0)
        self.target: tuple[str, ...] = ()
        self.address_size = 32
        self.variables: list[Variable] = []
        self.functions: dict[str, Function] = {}
        self.aliases: dict[str, str] = {}

    def read(self) -> Module:
        source, text = self.source, self.source.text
        at, end = source.skip_space(0), len(text)
        if at >= end:
            raise source.error("the file holds no PTX", 0)
        while at < end:
            match = TOP.match(text, at)
            if match is None:
                raise source.error("a module directive is expected", at)
            at = source.skip_space(self._directive(match))
            if self.version == (0, 0):
                raise source.error(".version must come first", match.start())
        if not self.target:
            raise source.error(".target is missing", end)
        return Module(
            source.file, self.version, self.target[0], self.target[1:], self.address_size,
            tuple(self.variables), tuple(self.functions.values()), self.aliases,
        )  # fmt: skip

    def _directive(self, match: re.Match[str]) -> int:
        kind = match.lastindex
        if kind == 1:
            major, minor = match[1].split(".")
            self.version = int(major[:4]), int(minor[:4])
        elif kind == 2:
            self.target = tuple(w.strip() for w in match[2].split(","))
        elif kind == 3:
            self.address_size = int(match[3][:4])
        elif kind == 7:
            return self._function(match)
        elif kind == 8:
            self._other(match)
        return match.end()

    def _other(self, match: re.Match[str]) -> None:
        source, begin, stop = self.source, match.start(8), match.end(8)
        alias = _ALIAS.match(match[8])
        if alias is not None:
            self.aliases[alias[1]] = alias[2]
            return
        if match[8][1:].split(None, 1)[0] in _IGNORED:
            return
        words = read_words(source, begin, stop)
        if words.space in ("reg", "param", ""):
            raise source.error("a module variable needs .global, .const, .shared or .tex", begin)
        self.variables += read_variables(source, words, stop)

    def _params(self, at: int) -> tuple[tuple[Param, ...], int]:
        at = self.source.skip_space(at)
        if not self.source.text.startswith("(", at):
            return (), at
        close = _CLOSE.match(self.source.text, at + 1)
        if close is None:
            raise self.source.error("a parameter list is not closed", at)
        return read_params(self.source, at + 1, close.end() - 1), close.end()

    def _function(self, match: re.Match[str]) -> int:
        source = self.source
        begin = match.start(7) - 1
        line, column = source.place(begin)
        returns, at = self._params(match.end()) if match[7] == "func" else ((), match.end())
        name = _NAME.match(source.text, at)
        if name is None:
            raise source.error("a function name is expected", at)
        params, at = self._params(name.end())
        attributes, at = self._attributes(at)
        head = Function(
            name[1], match[7] == "entry", match[6].strip().lstrip(".") if match[6] else "", params, returns,
            attributes, (), (), (), {}, {}, {}, line, column, False, param_offsets(params),
        )  # fmt: skip
        if source.text.startswith(";", at):
            self.functions.setdefault(head.name, head)
            return at + 1
        if not source.text.startswith("{", at):
            raise source.error("'{' or ';' is expected", at)
        known = self.functions.get(head.name)
        if known is not None and known.defined:
            raise source.error(f"'{head.name}' is defined twice", name.start(1))
        function, at = BodyReader(source, head).read(at + 1)
        self.functions.pop(head.name, None)
        self.functions[head.name] = function
        return at

    def _attributes(self, at: int) -> tuple[Mapping[str, tuple[int, ...]], int]:
        attributes: dict[str, tuple[int, ...]] = {}
        while (match := _ATTRIBUTE.match(self.source.text, at)) is not None:
            numbers = [parse_int(n) for n in match[2].split(",")] if match[2].strip() else []
            attributes[match[1]] = tuple(n for n in numbers if n is not None)
            at = match.end()
        return attributes, self.source.skip_space(at)
