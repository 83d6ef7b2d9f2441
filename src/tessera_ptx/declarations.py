"""Directives that declare: variables, parameters, registers, function heads.

Sizes follow the fundamental types; a parameter block is laid out with natural alignment, which is
what CUDA's launch interface uses. Everything here returns nodes of `syntax` or raises a ParseError.
"""

import re
from typing import NamedTuple

from tessera_ptx.lexer import NAME, Source
from tessera_ptx.operands import parse_int
from tessera_ptx.syntax import Param, RegDecl, Variable

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
    """The dotted words in front of a declared name: `.visible .global .align 8 .b8`."""

    linkage: str
    space: str
    type: str
    vector: int
    align: int
    is_pointer: bool
    ptr_space: str
    end: int


def read_words(source: Source, at: int, stop: int) -> Words:
    """Reads dotted words from `at` up to the first other character."""
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


def _count(source: Source, dims: str, at: int) -> int:
    """The number of elements of `[4][3]`; 0 when a dimension is open."""
    total = 1
    for match in _DIMENSION.finditer(dims):
        size = parse_int(match[1]) if match[1] else 0
        if size is None or total * size > _MAX_BYTES:
            raise source.error(f"'{match[1]}' is no array size", at)
        total *= size
    return total


def read_params(source: Source, at: int, stop: int) -> tuple[Param, ...]:
    """The parameters between two brackets; `at` is behind '(' and `stop` at ')'."""
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
    """Byte offset of each parameter in the launch's parameter block."""
    offsets, at = {}, 0
    for param in params:
        align = max(param.align, 1)
        at = -(-at // align) * align
        offsets[param.name] = at
        at += param.size
    return offsets


def read_registers(source: Source, words: Words, stop: int) -> list[RegDecl]:
    """`.reg .b32 %r<5>, x;`: one node a name."""
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


def read_variables(source: Source, words: Words, stop: int) -> list[Variable]:
    """`.global .align 4 .b8 name[16] = {...}, other;`: one node a name; `stop` is at the semicolon."""
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


def _initial(source: Source, at: int, stop: int) -> tuple[str, int]:
    """The text of an initial value and where it ends; '' when there is none."""
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
