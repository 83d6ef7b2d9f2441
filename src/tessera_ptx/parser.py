"""PTX text to a `Module`; see `syntax` for the nodes.

    parse(text, file="<ptx>") -> Module        raises ParseError, nothing else

Accepted: PTX ISA 6 to 9 as written by nvcc, clang/llc, Triton and by hand. Opcodes are not checked
here (`opcodes` knows them), so code for a newer ISA still parses; text that is no statement does not.
Not handled: preprocessor lines, array registers.
"""

import re
from collections.abc import Mapping

from tessera_ptx.body import BodyReader
from tessera_ptx.declarations import param_offsets, read_params, read_variables, read_words
from tessera_ptx.lexer import NAME, TOP, Source
from tessera_ptx.operands import parse_int
from tessera_ptx.syntax import Function, Module, Param, Variable

_NAME = re.compile(rf"\s*({NAME})", re.ASCII)
_CLOSE = re.compile(r"[^()]*\)", re.ASCII)
_ATTRIBUTE = re.compile(
    r"\s*\.([a-z]\w*)((?:\s+\w+(?:\s*,\s*\w+)*)?)(?:\s*\"[^\"\n]*\"(?:\s*,\s*\"[^\"\n]*\")*\s*;)?", re.ASCII
)
_ALIAS = re.compile(rf"\.alias\s+({NAME})\s*,\s*({NAME})\s*$", re.ASCII)
_IGNORED = ("pragma", "file", "loc", "section")


def parse(text: str | bytes, file: str = "<ptx>") -> Module:
    """The module of a PTX text. Bytes are read as UTF-8, with a trailing NUL as drivers store it."""
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode("utf-8", "replace")
    return _ModuleReader(Source(text, file)).read()


class _ModuleReader:
    """One pass over the top level; function bodies go to `BodyReader`."""

    def __init__(self, source: Source) -> None:
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
            tuple(self.variables), tuple(self.functions.values()), self.aliases, text.count("\n") + 1,
        )  # fmt: skip

    def _directive(self, match: re.Match[str]) -> int:
        """Takes in one directive; returns the offset behind it."""
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
        """Parameters in brackets at `at`, if any, and the offset behind them."""
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
