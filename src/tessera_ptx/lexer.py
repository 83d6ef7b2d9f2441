"""Text to statements: the regular expressions and the position map of the PTX reader.

The reader never walks characters: comments are blanked by one substitution, and each statement is
one match of `STATEMENT`. A match must begin where the previous one ended; what lies between is
text that is not PTX. `.loc` and `.file` end without a semicolon, so they are matched by their full
grammar rather than to the end of the line: an instruction behind them on the same line is seen.
"""

import re
from bisect import bisect_right

from tessera_ptx.errors import ParseError

NAME = r"(?:[A-Za-z][\w$]*|[_$%][\w$]+|_)"
_STRING = r'"(?:[^"\\\n]|\\.)*"'

_COMMENT = re.compile(rf'{_STRING}|//[^\n]*|/\*.*?\*/|/\*|"', re.DOTALL)

_LOC = (
    r"\.loc\s+\d+\s+\d+\s+\d+"
    r"(?:\s*,\s*function_name\s+[\w$.]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?"
)
_FILE = rf"\.file\s+\d+\s+{_STRING}(?:\s*,\s*\d+\s*,\s*\d+)?"

# Groups: 1 guard sign, 2 guard, 3 opcode, 4 operands | 5 label | 6 brace | 7 positional directive
# | 8 other directive with its text up to the semicolon.
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

# Module level. Groups: 1 version, 2 target, 3 address size | 4 .file/.loc | 5 section | 6 function head
# linkage, 7 entry or func | 8 other directive up to its semicolon (variables, .alias, .pragma).
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


class Source:
    """The text with comments blanked, and the way from an offset to a line and column."""

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
        """Line and column, both from 1."""
        if self._starts is None:
            self._starts = [0, *(m.end() for m in re.finditer("\n", self.raw))]
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def error(self, message: str, offset: int) -> ParseError:
        """A ParseError that points at an offset of the text."""
        offset = min(offset, len(self.raw))
        line, column = self.place(offset)
        shown = self.raw[offset - column + 1 :].split("\n", 1)[0]
        clean = "".join(c if c.isprintable() or c == "\t" else "?" for c in shown[:200])
        return ParseError(message, self.file, line, column, clean.replace("\t", " "))

    def skip_space(self, offset: int) -> int:
        """The offset of the next character that is not white space."""
        match = SPACE.match(self.text, offset)
        return match.end() if match else offset
