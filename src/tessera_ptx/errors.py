"""Errors of this library, each with its place, `file:line` or `file:line:column`.

Code that the analysis cannot follow is not an error: the report has the reason.
"""


class PtxError(Exception):
    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message, place)
        self.message, self.place = message, place

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class ParseError(PtxError):
    """Text that is not PTX; shown with the line and a caret."""

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
    """A launch that cannot go on."""


class OutOfBounds(InterpreterFault):
    """An access outside all buffers, misaligned, or in the wrong state space."""


class UnknownInstruction(InterpreterFault):
    """An instruction or form without a rule."""


class Deadlock(InterpreterFault):
    """Lanes that wait forever, or a launch past its step limit."""


class BadLaunch(InterpreterFault):
    """Arguments, grid or block that do not fit the kernel."""
