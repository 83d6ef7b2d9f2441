"""Splits text into statements and operand texts into nodes.

Comments are blanked, and each statement is one match of `STATEMENT`; text between matches is an error. `.loc`
and `.file` have no semicolon: they are matched by their grammar, so an instruction behind is seen.
"""

import re
import struct
from bisect import bisect_right
from collections.abc import Callable

from tessera_ptx.errors import ParseError
from tessera_ptx.syntax import Args, FloatImm, Imm, Mem, Not, Operand, Pair, Reg, Special, Sym, Vec

NAME = r"(?:[A-Za-z][\w$]*|[_$%][\w$]+|_)"
_STRING = r'"(?:[^"\\\n]|\\.)*"'

_COMMENT = re.compile(rf'{_STRING}|//[^\n]*|/\*.*?\*/|/\*|"', re.DOTALL)

_LOC = (
    r"\.loc\s+\d+\s+\d+\s+\d+"
    r"(?:\s*,\s*function_name\s+[\w$.]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?"
)
_FILE = rf"\.file\s+\d+\s+{_STRING}(?:\s*,\s*\d+\s*,\s*\d+)?"

# 1 guard sign, 2 guard, 3 opcode, 4 operands | 5 label | 6 brace | 7 positional directive | 8 other directive
# up to the semicolon.
STATEMENT = re.compile(
    rf"""\s*(?:
      (?:@\s*(!?)\s*({NAME})\s+)?([a-z]\w*(?:\.\w+(?:::\w+)*)*)(?![\w$:.])(?!\s*:)([^;]*);
    | ({NAME})\s*:(?!:)
    | ([{{}}])
    | ({_LOC}|{_FILE})(?!\w)
    | (\.[a-z]\w*(?:{_STRING}|[^;"])*);
    )""",
    re.VERBOSE | re.ASCII,
)

# Module level: 1 version, 2 target, 3 address size | 4 .file/.loc | 5 section | 6 function head linkage, 7
# entry or func | 8 other directive up to its semicolon (variables, .alias, .pragma).
TOP = re.compile(
    rf"""\s*(?:
      \.version\s+(\d+\.\d+)
    | \.target\s+([\w]+(?:\s*,\s*\w+)*)
    | \.address_size\s+(\d+)
    | ({_LOC}|{_FILE})(?!\w)
    | (@@DWARF[^\n]*|\.section\s+[\w.$]+\s*\{{[^}}]*\}})
    | ((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func)\b
    | (\.[a-z]\w*(?:{_STRING}|[^;"])*);
    )""",
    re.VERBOSE | re.ASCII,
)

SPACE = re.compile(r"\s*")


class SourceText:
    __slots__ = ("_starts", "file", "raw", "text")

    def __init__(self, text: str, file: str) -> None:
        self.raw, self.file = text, file
        self._starts: list[int] | None = None
        self.text = _COMMENT.sub(self._blank, text) if "/" in text or '"' in text else text

    def _blank(self, match: re.Match[str]) -> str:
        found = match[0]
        if found[0] == '"':
            if len(found) == 1:
                raise self.error("a string is not closed on its line", match.start())
            return found
        if found == "/*":
            raise self.error("a comment is not closed", match.start())
        if found[1] == "/":
            return " " * len(found)
        return re.sub(r"[^\n]", " ", found)

    def place(self, offset: int) -> tuple[int, int]:
        if self._starts is None:
            self._starts = [0, *(m.end() for m in re.finditer("\n", self.raw))]
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def error(self, message: str, offset: int) -> ParseError:
        offset = min(offset, len(self.raw))
        line, column = self.place(offset)
        shown = self.raw[offset - column + 1 :].split("\n", 1)[0]
        clean = "".join(c if c.isprintable() or c == "\t" else "?" for c in shown[:200])
        return ParseError(message, self.file, line, column, clean.replace("\t", " "))

    def skip_space(self, offset: int) -> int:
        match = SPACE.match(self.text, offset)
        return match.end() if match else offset


SPECIAL_NAMES = frozenset({
    "tid", "ntid", "laneid", "warpid", "nwarpid", "ctaid", "nctaid", "smid", "nsmid", "gridid",
    "is_explicit_cluster", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid",
    "cluster_ctarank", "cluster_nctarank", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge",
    "lanemask_gt", "clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi",
    "reserved_smem_offset_begin", "reserved_smem_offset_end", "reserved_smem_offset_cap",
    "total_smem_size", "aggr_smem_size", "dynamic_smem_size", "current_graph_exec",
})  # fmt: skip
_SPECIAL = re.compile(
    r"%(?:pm\d+(?:_64)?|envreg\d+|reserved_smem_offset_\d+|(\w+?))(?:\.([xyzw]))?", re.ASCII
)

# The last alternative stops at any bracket, so a stray one is an error.
_CHUNK = re.compile(r"\s*(\[[^\]]*\]|\{[^{}]*\}|\([^()]*\)|[^,\[\]{}()]+)\s*(?:(,)|$)", re.ASCII)
_NAME = re.compile(rf"(!|-)?\s*({NAME})(?:\.([xyzwrgba]))?", re.ASCII)
_INT = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", re.ASCII)
_HEXFLOAT = re.compile(r"0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_SUM = re.compile(rf"({NAME}|[+-]?\s*\w+)((?:\s*[+-]\s*(?:-\s*)?\w+)*)", re.ASCII)
_ADDEND = re.compile(r"([+-])\s*(-?)\s*(\w+)", re.ASCII)
_GENERIC = re.compile(rf"generic\s*\(\s*({NAME})\s*\)", re.ASCII)

# Fast path for the most common spellings.
_PLAIN = re.compile(r"(%[a-z]+)\d+", re.ASCII)
_PLAIN_MEM = re.compile(r"\[\s*((%[a-z]+)\d+)\s*(?:\+\s*(-?[1-9]\d{0,9}|0)\s*)?\]", re.ASCII)
_BRACKETED = re.compile(r"\([^()]*\)")


class BadOperand(Exception):
    def __init__(self, message: str, at: int = 0) -> None:
        super().__init__(message, at)
        self.message, self.at = message, at


def parse_int(text: str) -> int | None:
    match = _INT.fullmatch(text.strip())
    if match is None:
        return None
    digits = match[2]
    try:
        if digits[:2] in ("0x", "0X", "0b", "0B"):
            value = int(digits, 0)
        elif digits[0] == "0" and len(digits) > 1:
            value = int(digits, 8)
        else:
            value = int(digits) if len(digits) < 30 else -1
    except ValueError:
        return None
    if value < 0 or value >= 1 << 64:
        return None
    return -value if match[1] == "-" else value


def is_special(name: str) -> bool:
    match = _SPECIAL.fullmatch(name)
    return match is not None and (match[1] is None or match[1] in SPECIAL_NAMES)


class OperandReader:
    """`rename` maps a name to its unique name; `plain` has the register prefixes (`%rd` of `.reg .b64
    %rd<9>`) that no scope renames.
    """

    __slots__ = ("_cache", "_is_register", "_plain", "_rename")

    def __init__(
        self, is_register: Callable[[str], bool], rename: Callable[[str], str], plain: frozenset[str]
    ) -> None:
        self._cache: dict[str, Operand] = {}
        self._is_register = is_register
        self._rename = rename
        self._plain = plain

    def read(self, text: str) -> tuple[Operand, ...]:
        cache = self._cache
        if "[" not in text and "{" not in text and "(" not in text:
            chunks = text.split(",")
        else:
            chunks = self._split(text)
        out = []
        for chunk in chunks:
            known = cache.get(chunk)
            if known is None:
                text = chunk.strip()
                plain = _PLAIN.fullmatch(text)
                known = Reg(text) if plain is not None and plain[1] in self._plain else self._one(text)
                cache[chunk] = known
            out.append(known)
        return tuple(out)

    def _split(self, text: str) -> list[str]:
        chunks, at, size, comma = [], 0, len(text), True
        while comma:
            match = _CHUNK.match(text, at)
            if match is None:
                raise BadOperand("an operand was expected", at)
            chunks.append(match[1])
            at, comma = match.end(), match[2] is not None
        if at != size:
            raise BadOperand("unexpected text behind the operands", at)
        return chunks

    def _one(self, text: str) -> Operand:
        if not text:
            raise BadOperand("an operand is empty")
        first = text[0]
        if first == "[":
            plain = _PLAIN_MEM.fullmatch(text)
            if plain is not None and plain[2] in self._plain:
                return Mem(Reg(plain[1]), int(plain[3] or 0))
            return self._memory(text[1:-1].strip())
        if first == "{":
            return Vec(self.read(text[1:-1])) if text[1:-1].strip() else Vec(())
        if first == "(":
            value = _constant(text)
            if value is not None:
                return Imm(value)
            return Args(self.read(text[1:-1])) if text[1:-1].strip() else Args(())
        if "|" in text:
            parts = text.split("|")
            if len(parts) != 2:
                raise BadOperand(f"'{text[:40]}' is no operand")
            return Pair(self._scalar(parts[0].strip()), self._scalar(parts[1].strip()))
        return self._scalar(text)

    def _scalar(self, text: str) -> Operand:
        match = _NAME.fullmatch(text)
        if match is not None:
            item = self._named(match[2], match[3])
            return item if match[1] is None else Not(item, match[1])
        number = _number(text)
        if number is not None:
            return number
        return self._sum(text)

    def _named(self, name: str, component: str | None) -> Operand:
        if name[0] == "%" and is_special(name) and not self._is_register(name):
            return Special(f"{name}.{component}" if component else name)
        if name == "WARP_SZ":
            return Imm(32)
        renamed = self._rename(name)
        if self._is_register(name) or name[0] == "%" or name == "_":
            return Reg(f"{renamed}.{component}" if component else renamed)
        if component:
            raise BadOperand(f"'{name}' is no vector register")
        return Sym(renamed)

    def _sum(self, text: str) -> Operand:
        match = _SUM.fullmatch(text)
        if match is None:
            value = _constant(text)
            if value is None:
                generic = _GENERIC.fullmatch(text)
                if generic is not None:
                    return Sym(self._rename(generic[1]))
                raise BadOperand(f"'{text[:40]}' is no operand")
            return Imm(value)
        base = self._scalar(match[1].strip()) if match[1] != text else None
        offset = _addends(match[2])
        if isinstance(base, Sym):
            return Sym(base.name, base.offset + offset)
        if isinstance(base, Imm):
            return Imm(base.value + offset)
        raise BadOperand(f"'{text[:40]}' is no operand")

    def _memory(self, text: str) -> Mem:
        if "(" in text:
            text = _BRACKETED.sub(_evaluated, text)
        base, comma, rest = text.partition(",")
        coords = self.read(rest) if comma else ()
        base = base.strip()
        match = _SUM.fullmatch(base)
        if match is None:
            raise BadOperand(f"'[{text[:40]}]' is no address")
        item = self._scalar(match[1].strip())
        offset = _addends(match[2])
        if isinstance(item, Sym) and item.offset:
            item, offset = Sym(item.name), offset + item.offset
        if not isinstance(item, Reg | Sym | Imm | Special):
            raise BadOperand(f"'[{text[:40]}]' is no address")
        return Mem(item, offset, coords)


def _evaluated(match: re.Match[str]) -> str:
    """What is no constant is refused later."""
    value = _constant(match[0])
    return match[0] if value is None else str(value)


def _addends(text: str) -> int:
    total = 0
    for match in _ADDEND.finditer(text):
        value = parse_int(match[3])
        if value is None:
            raise BadOperand(f"'{match[3][:40]}' is no integer")
        total += -value if (match[1] == "-") != bool(match[2]) else value
    return total


def _number(text: str) -> Imm | FloatImm | None:
    value = parse_int(text)
    if value is not None:
        return Imm(value)
    negative = text.startswith("-")
    match = _HEXFLOAT.fullmatch(text[1:].strip() if negative else text)
    if match is not None:
        wide = match[1] is None
        digits = match[2] if wide else match[1]
        raw = int(digits, 16) ^ ((1 << (63 if wide else 31)) if negative else 0)
        packed = raw.to_bytes(8 if wide else 4, "little")
        return FloatImm(struct.unpack("<d" if wide else "<f", packed)[0], 64 if wide else 32, raw)
    if _DECIMAL.fullmatch(text) and len(text) < 400:
        return FloatImm(float(text), 0, 0)
    return None


_CONST_TOKEN = re.compile(r"\s*(0[xX][0-9a-fA-F]+U?|\d+U?|<<|>>|[-+*/%&|^~()])")


def _constant(text: str) -> int | None:
    """With `+ - * << >> & | ^` and brackets."""
    tokens: list[str] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _CONST_TOKEN.match(text, at)
        if match is None or len(tokens) > 64:
            return None
        tokens.append(match[1])
        at = match.end()
    try:
        value, rest = _constant_sum(tokens, 0, 0)
    except (IndexError, ValueError):
        return None
    return value if rest == len(tokens) and -(1 << 63) <= value < 1 << 64 else None


_LEVELS: tuple[tuple[str, ...], ...] = (("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*",))


def _apply(op: str, a: int, b: int) -> int:
    if op in ("<<", ">>") and not 0 <= b < 64:
        raise ValueError(b)
    table = {"|": a | b, "^": a ^ b, "&": a & b, "+": a + b, "-": a - b, "*": a * b}
    if op == "<<":
        return a << b
    return a >> b if op == ">>" else table[op]


def _constant_sum(tokens: list[str], at: int, level: int) -> tuple[int, int]:
    if level == len(_LEVELS):
        return _constant_atom(tokens, at)
    value, at = _constant_sum(tokens, at, level + 1)
    while at < len(tokens) and tokens[at] in _LEVELS[level]:
        right, after = _constant_sum(tokens, at + 1, level + 1)
        value, at = _apply(tokens[at], value, right), after
    return value, at


def _constant_atom(tokens: list[str], at: int) -> tuple[int, int]:
    token = tokens[at]
    if token == "(":
        value, after = _constant_sum(tokens, at + 1, 0)
        if tokens[after] != ")":
            raise ValueError(token)
        return value, after + 1
    if token in ("-", "+", "~"):
        value, after = _constant_atom(tokens, at + 1)
        return {"-": -value, "+": value, "~": ~value}[token], after
    number = parse_int(token)
    if number is None:
        raise ValueError(token)
    return number, at + 1
