"""Every error of this library, in one tree.

    PtxError                     one message and the place it concerns, as `file:line` or `file:line:column`
    ├── ParseError               text that is not PTX
    └── InterpreterFault         a launch that cannot go on
        ├── OutOfBounds          an access where no buffer is, or a misaligned one
        ├── UnknownInstruction   an instruction without a rule
        ├── Deadlock             lanes that wait for lanes that never come
        └── BadLaunch            arguments, grid or block that do not fit the kernel

What the analysis cannot follow is no error: the report says why the kernel may not be moved.
"""


class PtxError(Exception):
    """`place: message`."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message, place)
        self.message, self.place = message, place

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class ParseError(PtxError):
    """Text that is not PTX: `file:line:column: message`, the line, and a caret below the place."""

    def __init__(self, message: str, file: str, line: int, column: int, text: str = "") -> None:
        PtxError.__init__(self, message, f"{file}:{line}:{column}")
        self.file, self.line, self.column, self.text = file, line, column, text

    def __str__(self) -> str:
        shown = f"{self.place}: {self.message}"
        if not self.text:
            return shown
        return f"{shown}\n  {self.text}\n  {' ' * (self.column - 1)}^"

    def __reduce__(self) -> tuple[type["ParseError"], tuple[str, str, int, int, str]]:
        return ParseError, (self.message, self.file, self.line, self.column, self.text)


class InterpreterFault(PtxError):
    """A launch that cannot go on; `place` is `file:line` of the instruction."""


class OutOfBounds(InterpreterFault):
    """An access outside every buffer, a misaligned one, or one to a space that does not hold the address."""


class UnknownInstruction(InterpreterFault):
    """An instruction, or a form of one, that the interpreter has no rule for."""


class Deadlock(InterpreterFault):
    """Lanes that wait for lanes that never come, or a launch that runs on past its step limit."""


class BadLaunch(InterpreterFault):
    """Arguments, grid or block that do not fit the kernel."""
